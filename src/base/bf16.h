// bfloat16: the upper half of a float. Rounds to nearest even; NaN stays NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace sps {

struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float f) {
    const uint32_t u = std::bit_cast<uint32_t>(f);
    // Branch-free so that loops of conversions vectorise: NaN keeps its sign and becomes quiet.
    const uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    const uint32_t quiet = (u >> 16) | 0x40;
    bits = uint16_t((u & 0x7FFFFFFF) > 0x7F800000 ? quiet : rounded);
  }
  explicit bf16(double d) : bf16(float(d)) {}
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};
static_assert(sizeof(bf16) == 2);

}  // namespace sps
