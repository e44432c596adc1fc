// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011). Value i of a stream depends on (seed, stream, i) alone, so results do not depend on threads, on the
// order of calls, or on where a run was interrupted, and there is no state to save.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace sps {

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

class Rng {
 public:
  Rng(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
  // A stream named by text, for instance a tensor's name.
  Rng(uint64_t seed, std::string_view stream);

  uint64_t bits(uint64_t i) const;                      // 64 uniform bits
  double uniform(uint64_t i) const;                     // [0, 1), 53 bits
  double normal(uint64_t i) const;                      // N(0, 1), Box-Muller
  uint64_t below(uint64_t i, uint64_t n) const;         // [0, n), bias below n / 2^64

 private:
  std::array<uint32_t, 4> block(uint64_t i) const;
  uint64_t seed_, stream_;
};

}  // namespace sps
