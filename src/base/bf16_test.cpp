#include "base/bf16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace sps {
namespace {

float from_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
uint16_t rounded(uint32_t bits) {
  return bf16(from_bits(bits)).bits;
}

TEST(Bf16, EveryValueSurvivesTheRoundTrip) {
  for (uint32_t b = 0; b <= 0xFFFF; ++b) {
    bf16 x;
    x.bits = uint16_t(b);
    const float f = float(x);
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(float(bf16(f)))) << b;
    } else {
      EXPECT_EQ(bf16(f).bits, b);
    }
  }
}

TEST(Bf16, RoundsToNearestAndTiesToEven) {
  EXPECT_EQ(rounded(0x3F807FFF), 0x3F80);  // just below the middle
  EXPECT_EQ(rounded(0x3F808000), 0x3F80);  // middle: 0x3F80 is even
  EXPECT_EQ(rounded(0x3F808001), 0x3F81);
  EXPECT_EQ(rounded(0x3F818000), 0x3F82);  // middle: 0x3F81 is odd
  EXPECT_EQ(rounded(0x3F817FFF), 0x3F81);
  EXPECT_EQ(rounded(0xBF808000), 0xBF80);
  EXPECT_EQ(rounded(0xBF818000), 0xBF82);
  EXPECT_EQ(rounded(0x3FFF8000), 0x4000);  // the carry reaches the exponent
}

TEST(Bf16, OverflowRoundsToInfinity) {
  EXPECT_EQ(rounded(0x7F7F7FFF), 0x7F7F);  // nearest is the largest finite number
  EXPECT_EQ(rounded(0x7F7F8000), 0x7F80);
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(bf16(-std::numeric_limits<float>::max()).bits, 0xFF80);
}

TEST(Bf16, InfinitiesAndZerosKeepTheirSign) {
  EXPECT_EQ(bf16(INFINITY).bits, 0x7F80);
  EXPECT_EQ(bf16(-INFINITY).bits, 0xFF80);
  EXPECT_EQ(bf16(0.0F).bits, 0);
  EXPECT_EQ(bf16(-0.0F).bits, 0x8000);
}

// Also those whose payload lies in the lower half alone, which cutting off would turn into infinity, and
// those that rounding up would carry into the sign.
TEST(Bf16, NanStaysNanWithItsSign) {
  for (const uint32_t bits : {0x7F800001U, 0x7FC00000U, 0x7FFFFFFFU, 0x7F80FFFFU}) {
    EXPECT_TRUE(std::isnan(float(bf16(from_bits(bits))))) << bits;
    EXPECT_EQ(rounded(bits) >> 15, 0);
    EXPECT_TRUE(std::isnan(float(bf16(from_bits(bits | 0x80000000U))))) << bits;
    EXPECT_EQ(rounded(bits | 0x80000000U) >> 15, 1);
  }
}

TEST(Bf16, DenormalsRoundLikeOtherNumbers) {
  EXPECT_EQ(rounded(0x00000001), 0x0000);
  EXPECT_EQ(rounded(0x00008000), 0x0000);  // middle: 0 is even
  EXPECT_EQ(rounded(0x00008001), 0x0001);
  EXPECT_EQ(rounded(0x00018000), 0x0002);
  EXPECT_EQ(rounded(0x007FFFFF), 0x0080);  // becomes the smallest normal number
  EXPECT_EQ(rounded(0x80018000), 0x8002);
}

TEST(Bf16, DefaultIsZero) {
  EXPECT_EQ(float(bf16()), 0);
}

}  // namespace
}  // namespace sps
