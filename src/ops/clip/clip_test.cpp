#include "ops/clip/clip.h"

#include "base/threads.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

const Exec ex;

double sum_on(Device device, const Matrix& x) {
  OnDevice on(device);
  return sum_of_squares(on.exec(), on(x));
}

TEST(Clip, SumOfSquaresByHand) {
  for (const auto& [device, dtype] : all_backends()) {
    if (dtype == DType::bf16) continue;
    Matrix x(dtype, 2, 2);
    x.set(0, 0, 1), x.set(0, 1, -2), x.set(1, 0, 3), x.set(1, 1, 0.5);
    EXPECT_EQ(sum_on(device, x), 14.25);
  }
}

// Both sum in double and differ in the order: the bound is that of the roundings of two sums.
TEST(Clip, FastCodeMatchesReference) {
  for (const int64_t rows : {1, 3, 100, 257})
    for (const int64_t cols : {1, 8, 48, 200, 513, 70000})
      for (const int64_t pad : {0, 5, 8}) {
        if (rows * cols > 1'000'000) continue;
        Matrix x(DType::f32, rows, cols, cols + pad);
        x.fill(0).randomise(1, "x");
        const double want = sum_of_squares(ex, x.to(DType::f64));
        const double bound = 2 * double(x->count()) * 0x1p-53 * want;
        for (const Device device : test_devices())
          EXPECT_NEAR(sum_on(device, x), want, bound) << rows << " x " << cols << " pad " << pad;
      }
}

// What lies between the rows of a strided view is not counted.
TEST(Clip, GapsAreNotCounted) {
  Matrix x(DType::f32, 5, 9);
  x.fill(1e6);
  const Tensor left = x->cols_from(0, 4);
  for (int64_t r = 0; r < 5; ++r)
    for (int64_t c = 0; c < 4; ++c) x.set(r, c, 2);
  EXPECT_EQ(sum_of_squares(ex, left), 80);
  for (const Device device : test_devices()) {
    OnDevice on(device);
    EXPECT_EQ(sum_of_squares(on.exec(), on(left, x.whole())), 80);
  }
}

TEST(Clip, NothingHasNormZero) {
  for (const Device device : test_devices()) {
    EXPECT_EQ(sum_on(device, Matrix(DType::f32, 0, 8)), 0);
    EXPECT_EQ(sum_on(device, Matrix(DType::f32, 3, 0)), 0);
  }
}

// More tensors than one launch takes, empty ones among them.
TEST(Clip, ManyAtOnceAreTheSameOneByOne) {
  for (const Device device : test_devices()) {
    std::vector<Matrix> xs;
    for (int64_t i = 0; i < 130; ++i) {
      const int64_t cols = i == 61 ? 40'000 : i;
      xs.emplace_back(DType::f32, 1 + i % 3, cols, cols + i % 2);
      xs.back().randomise(uint64_t(i), "x");
    }
    std::vector<double> sums;
    {
      OnDevice on(device);
      std::vector<Tensor> tensors;
      for (const Matrix& x : xs) tensors.push_back(on(x));
      sums = sums_of_squares(on.exec(), tensors);
    }
    ASSERT_EQ(sums.size(), xs.size());
    for (size_t i = 0; i < xs.size(); ++i) EXPECT_EQ(sums[i], sum_on(device, xs[i])) << i;
  }
}

// Squares that overflow or vanish in f32 do not in double.
TEST(Clip, RangeIsThatOfDouble) {
  Matrix x(DType::f32, 1, 100);
  for (const Device device : test_devices()) {
    EXPECT_NEAR(std::sqrt(sum_on(device, x.fill(1e30))), 1e31, 1e25);
    EXPECT_NEAR(std::sqrt(sum_on(device, x.fill(1e-30))), 1e-29, 1e-35);
  }
}

// A finite loss can come with a gradient that is not: one bad entry anywhere must be seen in the norm.
TEST(Clip, NonFiniteEntriesReachTheNorm) {
  for (const auto& [device, dtype] : all_backends())
    for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)})
      for (const int64_t at : {0, 1, 32767, 32768, 69999}) {
        if (dtype == DType::bf16) continue;
        Matrix x(dtype, 1, 70000);
        x.set(0, at, bad);
        EXPECT_FALSE(std::isfinite(sum_on(device, x))) << bad << " at " << at;
      }
}

TEST(Clip, SameBitsForAnyNumberOfThreads) {
  const int threads = thread_count();
  Matrix dense(DType::f32, 300, 1000), strided(DType::f32, 300, 1000, 1003);
  dense.randomise(1, "x"), strided.randomise(2, "x");
  set_thread_count(1);
  const double dense1 = sum_of_squares(ex, dense), strided1 = sum_of_squares(ex, strided);
  set_thread_count(2);
  EXPECT_EQ(sum_of_squares(ex, dense), dense1);
  EXPECT_EQ(sum_of_squares(ex, strided), strided1);
  set_thread_count(threads);
}

// Sums, norm and factor that stay on a GPU are what the host would make of them, to the bit.
TEST(Clip, FactorOnAGpuIsThatOfTheHost) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  std::vector<Matrix> xs;
  for (int64_t i = 0; i < 300; ++i) {
    xs.emplace_back(DType::f32, 1 + i % 3, i == 61 ? 40'000 : i);
    xs.back().randomise(uint64_t(i), "x", 0.1);
  }
  Matrix sums(DType::f64, 1, int64_t(xs.size())), flag(DType::f32, 1, 1), factor(DType::f32, 1, 1);
  std::vector<double> want;
  const auto factor_of = [&](double limit) {
    OnDevice on(Device::cuda);
    std::vector<Tensor> tensors;
    for (const Matrix& x : xs) tensors.push_back(on(x));
    want = sums_of_squares(on.exec(), tensors);
    sums_of_squares(on.exec(), tensors, on(sums));
    clip_factor(on.exec(), on(sums), on(flag), limit, on(factor));
  };
  for (const double limit : {0.0, 1.0, 2.5, 1e9}) {
    factor_of(limit);
    double squares = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(sums.get(0, int64_t(i)), want[i]) << i;
      squares += want[i];
    }
    EXPECT_EQ(factor.get(0, 0), double(float(clip_factor(std::sqrt(squares), limit)))) << limit;
  }
  flag.set(0, 0, 1);
  factor_of(1);
  EXPECT_EQ(factor.get(0, 0), -1);
  flag.set(0, 0, 0);
  for (const double bad : {double(NAN), double(INFINITY)}) {
    xs[61].set(0, 39'999, bad);
    factor_of(1);
    EXPECT_EQ(factor.get(0, 0), -1);
  }
}

TEST(Clip, FlagIsSetByWhatIsNotFinite) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  Matrix x(DType::f32, 1000, 1), flag(DType::f32, 1, 1);
  x.fill(3e38);
  const auto flag_of = [&](int64_t at, double value) {
    flag.set(0, 0, 0);
    x.set(at, 0, value);
    {
      OnDevice on(Device::cuda);
      flag_not_finite(on.exec(), on(x), on(flag));
    }
    x.set(at, 0, 0);
    return flag.get(0, 0);
  };
  EXPECT_EQ(flag_of(0, -3e38), 0);
  for (const int64_t at : {0, 256, 999})
    for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)})
      EXPECT_EQ(flag_of(at, bad), 1) << at;
  Matrix nothing(DType::f32, 0, 1);
  flag.set(0, 0, 0);
  {
    OnDevice on(Device::cuda);
    flag_not_finite(on.exec(), on(nothing), on(flag));
  }
  EXPECT_EQ(flag.get(0, 0), 0);
}

TEST(Clip, Factor) {
  EXPECT_EQ(clip_factor(4, 1), 0.25);
  EXPECT_EQ(clip_factor(0.5, 1), 1);
  EXPECT_EQ(clip_factor(1, 1), 1);
  EXPECT_EQ(clip_factor(0, 1), 1);
  EXPECT_EQ(clip_factor(100, 0), 1);  // 0 turns clipping off
  EXPECT_EQ(clip_factor(100, -1), 1);
  EXPECT_EQ(clip_factor(NAN, 1), 1);
  EXPECT_EQ(clip_factor(INFINITY, 1), 1);
}

}  // namespace
}  // namespace sps::ops
