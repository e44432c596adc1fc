#include "base/rng.h"

#include <cmath>
#include <numbers>

#include "base/hash.h"

namespace sps {

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {uint32_t(p1 >> 32) ^ c[1] ^ k[0], uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k[1], uint32_t(p0)};
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return c;
}

Rng::Rng(uint64_t seed, std::string_view stream) : Rng(seed, hash64(stream)) {}

std::array<uint32_t, 4> Rng::block(uint64_t i) const {
  return philox({uint32_t(i), uint32_t(i >> 32), uint32_t(stream_), uint32_t(stream_ >> 32)},
                {uint32_t(seed_), uint32_t(seed_ >> 32)});
}

uint64_t Rng::bits(uint64_t i) const {
  const auto b = block(i);
  return uint64_t{b[1]} << 32 | b[0];
}

double Rng::uniform(uint64_t i) const { return double(bits(i) >> 11) * 0x1p-53; }

double Rng::normal(uint64_t i) const {
  const auto b = block(i);
  const double u = (double((uint64_t{b[1]} << 32 | b[0]) >> 11) + 0.5) * 0x1p-53;
  const double v = double((uint64_t{b[3]} << 32 | b[2]) >> 11) * 0x1p-53;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

uint64_t Rng::below(uint64_t i, uint64_t n) const {
  __extension__ using u128 = unsigned __int128;
  return uint64_t(u128{bits(i)} * n >> 64);
}

}  // namespace sps
