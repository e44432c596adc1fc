#include "ops/vec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace sps::ops {
namespace {

// f by a vectorised loop over floats, and by lanes; both are what the kernels use.
template <class F>
std::vector<float> by_loop(const std::vector<float>& x, F f) {
  std::vector<float> y(x.size());
#pragma omp simd
  for (size_t i = 0; i < x.size(); ++i) y[i] = f(x[i]);
  return y;
}
template <class F>
std::vector<float> by_lanes(const std::vector<float>& x, F f) {
  std::vector<float> y(x.size());
  for_lanes(int64_t(x.size()), [&](int64_t i, auto mask) {
    store_lanes(y.data() + i, f(load_lanes(x.data() + i, mask)), mask);
  });
  return y;
}
const auto exp_of = [](auto x) { return fast_exp(x); };
const auto sigmoid_of = [](auto x) { return fast_sigmoid(x); };

std::vector<float> range(double from, double to, int64_t n) {
  std::vector<float> x;
  for (int64_t i = 0; i <= n; ++i) x.push_back(float(from + (to - from) * double(i) / double(n)));
  return x;
}

TEST(FastExp, AccurateOverItsRange) {
  std::vector<float> x = range(-87, 88, 1'000'003);
  for (const double centre : {0.0, 0.34657359, -0.34657359, 1.0})  // around the borders of the reduction
    for (int i = -1000; i <= 1000; ++i) x.push_back(float(centre + i * 1e-7));
  for (const auto& y : {by_loop(x, exp_of), by_lanes(x, exp_of)}) {
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i)
      worst = std::max(worst, std::abs(y[i] / std::exp(double(x[i])) - 1));
    EXPECT_LT(worst, 3e-7);
  }
}

TEST(FastExp, OneAtZero) {
  for (const auto& y : {by_loop({0.0F, -0.0F}, exp_of), by_lanes({0.0F, -0.0F}, exp_of)}) {
    EXPECT_EQ(y[0], 1);
    EXPECT_EQ(y[1], 1);
  }
}

TEST(FastExp, EdgesAndNan) {
  const std::vector<float> x{
      -87.01F, -1e4F, -std::numeric_limits<float>::max(), -INFINITY, 88.5F, 1e4F, INFINITY, NAN, -NAN};
  for (const auto& y : {by_loop(x, exp_of), by_lanes(x, exp_of)}) {
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(y[i], 0) << x[i];
    for (size_t i = 4; i < 7; ++i) {
      EXPECT_TRUE(std::isfinite(y[i])) << x[i];
      EXPECT_NEAR(y[i] / std::exp(88.0), 1, 3e-7) << x[i];
    }
    EXPECT_TRUE(std::isnan(y[7]));
    EXPECT_TRUE(std::isnan(y[8]));
  }
}

TEST(FastSigmoid, AccurateOverItsRange) {
  const std::vector<float> x = range(-86.9, 100, 1'000'003);
  for (const auto& y : {by_loop(x, sigmoid_of), by_lanes(x, sigmoid_of)}) {
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i)
      worst = std::max(worst, std::abs(y[i] * (1 + std::exp(-double(x[i]))) - 1));
    EXPECT_LT(worst, 4e-7);
  }
}

TEST(FastSigmoid, LimitsAndNan) {
  const std::vector<float> x{-INFINITY, -1e4F, -88, 0, 20, 1e4F, INFINITY, NAN};
  for (const auto& y : {by_loop(x, sigmoid_of), by_lanes(x, sigmoid_of)}) {
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_GE(y[i], 0) << x[i];
      EXPECT_LT(y[i], 2e-38) << x[i];
    }
    EXPECT_EQ(y[3], 0.5F);
    for (size_t i = 4; i < 7; ++i) EXPECT_EQ(y[i], 1) << x[i];
    EXPECT_TRUE(std::isnan(y[7]));
  }
}

// Any length, and nothing outside it is written.
template <class T>
void copies_exactly() {
  for (int64_t n = 0; n <= 50; ++n) {
    std::vector<T> x(size_t(n) + 40), y(x.size(), T(-1.0F));
    for (size_t i = 0; i < x.size(); ++i) x[i] = T(float(i) + 1);
    for_lanes(n,
              [&](int64_t i, auto mask) { store_lanes(y.data() + i, load_lanes(x.data() + i, mask), mask); });
    for (size_t i = 0; i < y.size(); ++i)
      ASSERT_EQ(float(y[i]), int64_t(i) < n ? float(x[i]) : -1.0F) << i << " of " << n;
  }
}
TEST(Lanes, CopyAnyLengthExactly) {
  copies_exactly<float>();
  copies_exactly<bf16>();
}

TEST(Lanes, AddAnyLength) {
  std::vector<float> x(200);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i) + 1;
  for (int64_t n = 0; n <= 200; ++n)  // whole numbers: exact in any order
    ASSERT_EQ(sum_lanes(n, [&](int64_t i, auto mask) { return load_lanes(x.data() + i, mask) * 2.0F; }),
              float(n * (n + 1)));
}

// The lanes' rounding is bf16's own, except that numbers below the normal range may become zero.
TEST(Lanes, RoundToBf16AsTheScalarDoes) {
  std::vector<float> x;
  for (uint32_t high = 0; high <= 0xFFFF; ++high)
    for (const uint32_t low : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU})
      x.push_back(std::bit_cast<float>(high << 16 | low));
  std::vector<bf16> y(x.size());
  for_lanes(int64_t(x.size()),
            [&](int64_t i, auto mask) { store_lanes(y.data() + i, load_lanes(x.data() + i, mask), mask); });
  for (size_t i = 0; i < x.size(); ++i) {
    const bf16 want(x[i]);
    if (std::isnan(x[i])) {
      ASSERT_TRUE(std::isnan(float(y[i])));
    } else if (std::abs(x[i]) < std::numeric_limits<float>::min()) {
      ASSERT_TRUE(y[i].bits == want.bits || float(y[i]) == 0) << x[i];
    } else {
      ASSERT_EQ(y[i].bits, want.bits) << x[i];
    }
  }
}

}  // namespace
}  // namespace sps::ops
