// Finds the id of a token by its bytes: open addressing over a list of tokens that must outlive it.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"

namespace sps {

class TokenIndex {
 public:
  static constexpr int32_t kNone = -1;

  // Tokens of no bytes are left out.
  explicit TokenIndex(std::span<const std::string> tokens)
      : tokens_(tokens), slots_(std::bit_ceil(2 * tokens.size() + 2), Slot{0, kNone}) {
    for (size_t id = 0; id < tokens.size(); ++id) {
      if (tokens[id].empty()) continue;
      const uint64_t hash = hash64(tokens[id]);
      Slot& slot = slots_[place(tokens[id], hash)];
      if (slot.id == kNone)
        slot = {uint32_t(hash >> 32), int32_t(id)};
      else if (repeated_ == kNone)
        repeated_ = int32_t(id);
    }
  }

  int32_t find(std::string_view bytes) const { return slots_[place(bytes, hash64(bytes))].id; }
  std::string_view bytes(int32_t id) const { return tokens_[size_t(id)]; }
  // The first token that an earlier one equals; kNone if all differ.
  int32_t repeated() const { return repeated_; }

 private:
  struct Slot {
    uint32_t hash;
    int32_t id;
  };
  size_t place(std::string_view bytes, uint64_t hash) const {
    const size_t mask = slots_.size() - 1;
    size_t i = hash & mask;
    while (slots_[i].id != kNone &&
           (slots_[i].hash != uint32_t(hash >> 32) || tokens_[size_t(slots_[i].id)] != bytes))
      i = (i + 1) & mask;
    return i;
  }

  std::span<const std::string> tokens_;
  std::vector<Slot> slots_;
  int32_t repeated_ = kNone;
};

}  // namespace sps
