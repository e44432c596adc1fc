// Hashes of bytes: XXH3. They name streams, find torn files and pin golden results; they are no protection against
// an adversary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace sps {

uint64_t hash64(std::string_view bytes);
inline uint64_t hash64(const void* data, size_t bytes) {
  return hash64(std::string_view(static_cast<const char*>(data), bytes));
}

// The same hash over bytes that arrive in pieces.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;
  void update(const void* data, size_t bytes);
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string hex(uint64_t hash);  // 16 lower-case digits

}  // namespace sps
