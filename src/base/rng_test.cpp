#include "base/rng.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <vector>

namespace sps {
namespace {

using Block = std::array<uint32_t, 4>;

// The known answers published with the generator.
TEST(Philox, KnownAnswers) {
  constexpr uint32_t ones = 0xFFFFFFFF;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({ones, ones, ones, ones}, {ones, ones}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

struct Moments {
  double mean = 0, variance = 0, skew = 0, kurtosis = 0;
};

Moments moments(const std::vector<double>& x) {
  Moments m;
  const double n = double(x.size());
  for (const double v : x) m.mean += v / n;
  for (const double v : x) {
    const double d = v - m.mean;
    m.variance += d * d / n;
    m.skew += d * d * d / n;
    m.kurtosis += d * d * d * d / n;
  }
  m.skew /= std::pow(m.variance, 1.5);
  m.kurtosis /= m.variance * m.variance;
  return m;
}

constexpr uint64_t kDraws = 200'000;
// Five standard deviations of an average over the draws, of something with standard deviation 1.
const double kFiveSigma = 5 / std::sqrt(double(kDraws));

TEST(Rng, UniformMomentsAndRange) {
  const Rng rng(1234, "uniform");
  std::vector<double> x(kDraws);
  for (uint64_t i = 0; i < kDraws; ++i) {
    x[i] = rng.uniform(i);
    ASSERT_GE(x[i], 0);
    ASSERT_LT(x[i], 1);
  }
  const Moments m = moments(x);
  EXPECT_NEAR(m.mean, 0.5, kFiveSigma * std::sqrt(1.0 / 12));
  EXPECT_NEAR(m.variance, 1.0 / 12, kFiveSigma * std::sqrt(1.0 / 180));
  EXPECT_NEAR(m.kurtosis, 1.8, 0.02);
}

TEST(Rng, NormalMomentsAndTails) {
  const Rng rng(1234, "normal");
  std::vector<double> x(kDraws);
  double beyond_two = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    x[i] = rng.normal(i);
    ASSERT_TRUE(std::isfinite(x[i]));
    beyond_two += std::abs(x[i]) > 2 ? 1.0 / kDraws : 0;
  }
  const Moments m = moments(x);
  EXPECT_NEAR(m.mean, 0, kFiveSigma);
  EXPECT_NEAR(m.variance, 1, kFiveSigma * std::sqrt(2.0));
  EXPECT_NEAR(m.skew, 0, kFiveSigma * std::sqrt(6.0));
  EXPECT_NEAR(m.kurtosis, 3, kFiveSigma * std::sqrt(24.0));
  EXPECT_NEAR(beyond_two, 0.0455003, kFiveSigma * std::sqrt(0.0455 * 0.9545));
}

TEST(Rng, ValueDependsOnSeedStreamAndIndexAlone) {
  const Rng a(1, "wte"), again(1, "wte");
  EXPECT_EQ(a.bits(77), again.bits(77));
  EXPECT_EQ(a.normal(5), again.normal(5));
  std::set<uint64_t> seen;
  for (const uint64_t seed : {0, 1, 2})
    for (const char* stream : {"", "wte", "wpe"})
      for (uint64_t i = 0; i < 1000; ++i) seen.insert(Rng(seed, stream).bits(i));
  EXPECT_EQ(seen.size(), 9000u);
}

// All 64 bits of index, seed and stream count.
TEST(Rng, HighHalvesCount) {
  constexpr uint64_t high = uint64_t{1} << 40;
  std::set<uint64_t> seen;
  for (const uint64_t seed : {uint64_t{0}, high})
    for (const uint64_t stream : {uint64_t{0}, high})
      for (const uint64_t i : {uint64_t{0}, high}) seen.insert(Rng(seed, stream).bits(i));
  EXPECT_EQ(seen.size(), 8u);
}

TEST(Rng, StreamsAreUncorrelated) {
  const Rng a(7, "layer.0"), b(7, "layer.1"), c(8, "layer.0");
  double ab = 0, ac = 0, lag = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    ab += a.normal(i) * b.normal(i) / kDraws;
    ac += a.normal(i) * c.normal(i) / kDraws;
    lag += a.normal(i) * a.normal(i + 1) / kDraws;
  }
  EXPECT_NEAR(ab, 0, kFiveSigma);
  EXPECT_NEAR(ac, 0, kFiveSigma);
  EXPECT_NEAR(lag, 0, kFiveSigma);
}

TEST(Rng, BelowCoversItsRangeEvenly) {
  const Rng rng(3, "below");
  constexpr uint64_t n = 10;
  std::array<double, n> share{};
  for (uint64_t i = 0; i < kDraws; ++i) {
    const uint64_t v = rng.below(i, n);
    ASSERT_LT(v, n);
    share[v] += 1.0 / kDraws;
  }
  for (const double s : share) EXPECT_NEAR(s, 0.1, kFiveSigma * 0.3);
  EXPECT_EQ(rng.below(0, 1), 0u);
  const uint64_t huge = ~uint64_t{0};
  EXPECT_LT(rng.below(0, huge), huge);
  EXPECT_GT(rng.below(0, huge) | rng.below(1, huge) | rng.below(2, huge), uint64_t{1} << 62);
}

}  // namespace
}  // namespace sps
