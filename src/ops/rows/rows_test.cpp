#include "ops/rows/rows.h"

#include "ops/check.h"

namespace sps::ops {
namespace {

struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1}, {3, 8}, {100, 48}, {257, 200}, {5, 513}, {300, 192}, {1030, 40}};
constexpr DType kActs[] = {DType::f32, DType::bf16};

// The operations under test, on operands in host memory.
void copy_on(Device device, const Matrix& x, const Matrix& y) {
  OnDevice on(device);
  copy_rows(on.exec(), on(x), on(y));
}
void add_on(Device device, const Matrix& a, const Matrix& b, const Matrix& y) {
  OnDevice on(device);
  add_rows(on.exec(), on(a), on(b), on(y));
}
void sum_on(Device device, const Matrix& x, const Matrix& y) {
  OnDevice on(device);
  sum_rows(on.exec(), on(x), on(y));
}

TEST(Rows, CopyConvertsExactlyAndRepeatsOneRow) {
  for (const Device device : test_devices())
    for (const Shape shape : kShapes)
      for (const int64_t padding : {8, 3})  // rows that can be moved in wide accesses, and rows that cannot
        for (const DType from : kActs)
          for (const DType to : kActs)
            for (const int64_t x_rows : {shape.rows, int64_t{1}}) {
              Matrix x(from, x_rows, shape.cols, shape.cols + padding);
              Matrix y(to, shape.rows, shape.cols, shape.cols + 2 * padding);
              x.randomise(1, "x");
              copy_on(device, x, y);
              Matrix x64 = x.to(DType::f64), want(DType::f64, shape.rows, shape.cols);
              copy_rows({}, x64, want);
              for (int64_t r = 0; r < shape.rows; ++r)
                EXPECT_EQ(want.get(r, shape.cols - 1), x.get(x_rows == 1 ? 0 : r, shape.cols - 1));
              EXPECT_EQ(relative_error(y, want.to(to)), 0);  // one rounding and nothing else
            }
}

TEST(Rows, AddInEveryMixOfTypes) {
  for (const Device device : test_devices())
    for (const Shape shape : kShapes)
      for (const int64_t padding : {8, 1})
        for (const DType ta : kActs)
          for (const DType tb : kActs)
            for (const DType ty : kActs)
              for (const int64_t a_rows : {shape.rows, int64_t{1}}) {
                Matrix a(ta, a_rows, shape.cols, shape.cols + padding);
                Matrix b(tb, shape.rows, shape.cols, shape.cols + 2 * padding);
                Matrix y(ty, shape.rows, shape.cols, shape.cols + 3 * padding);
                Matrix want(DType::f64, shape.rows, shape.cols);
                a.randomise(2, "a");
                b.randomise(2, "b");
                add_on(device, a, b, y);
                add_rows({}, a.to(DType::f64), b.to(DType::f64), want);
                EXPECT_DOUBLE_EQ(want.get(shape.rows - 1, 0),
                                 a.get(a_rows - 1, 0) + b.get(shape.rows - 1, 0));
                SPS_EXPECT_CLOSE(y, want, tolerance(ty));
              }
}

TEST(Rows, AddMayBeInPlace) {
  for (const Device device : test_devices())
    for (const DType dtype : kActs) {
      Matrix a(dtype, 130, 72), b(dtype, 130, 72), y(dtype, 130, 72), one(dtype, 1, 72);
      a.randomise(3, "a");
      b.randomise(3, "b");
      one.randomise(3, "one");
      add_on(device, a, b, y);
      Matrix into_a = a.to(dtype), into_b = b.to(dtype), onto_one = b.to(dtype), want(dtype, 130, 72);
      add_on(device, into_a, b, into_a);
      add_on(device, a, into_b, into_b);
      add_on(device, one, b, want);
      add_on(device, one, onto_one, onto_one);
      EXPECT_EQ(bits(into_a), bits(y));
      EXPECT_EQ(bits(into_b), bits(y));
      EXPECT_EQ(bits(onto_one), bits(want));
    }
}

TEST(Rows, SumAddsToWhatIsThere) {
  for (const Device device : test_devices())
    for (const Shape shape : kShapes)
      for (const DType tx : kActs)
        for (const DType ty : kActs) {
          Matrix x(tx, shape.rows, shape.cols, shape.cols + 9), y(ty, 1, shape.cols);
          x.randomise(4, "x");
          y.randomise(4, "y");
          Matrix want = y.to(DType::f64);
          sum_on(device, x, y);
          double first = want.get(0, 0);
          for (int64_t r = 0; r < shape.rows; ++r) first += x.get(r, 0);
          sum_rows({}, x.to(DType::f64), want);
          EXPECT_NEAR(want.get(0, 0), first, 1e-12);
          SPS_EXPECT_CLOSE(y, want, tolerance(ty));
        }
}

TEST(Rows, SumOfNoRowsChangesNothing) {
  Matrix y(DType::f32, 1, 8);
  y.fill(3);
  sum_rows({}, Tensor{nullptr, 0, 8, 8}, y);
  for (int64_t c = 0; c < 8; ++c) EXPECT_EQ(y.get(0, c), 3);
}

TEST(Rows, FillLeavesThePaddingAlone) {
  for (const Device device : test_devices())
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
      for (const float value : {-1.5F, 0.0F})
        for (const int64_t from : {4, 8}) {
          if (device == Device::cuda && dtype == DType::f64) continue;
          Matrix whole(dtype, 133, 40);
          whole.fill(7);
          {
            OnDevice on(device);
            fill(on.exec(), on(whole).cols_from(from, 24), value);
          }
          for (int64_t r = 0; r < 133; ++r)
            for (int64_t c = 0; c < 40; ++c)
              ASSERT_EQ(whole.get(r, c), c >= from && c < from + 24 ? double(value) : 7);
        }
}

TEST(Rows, SameBitsEveryTime) {
  for (const Device device : test_devices()) {
    Matrix x(DType::bf16, 5000, 96);
    x.randomise(6, "x");
    const auto sum = [&] {
      Matrix y(DType::f32, 1, 96);
      sum_on(device, x, y);
      return bits(y);
    };
    const std::string once = sum();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(sum() == once);
  }
}

TEST(Rows, SameBitsForAnyThreads) {
  for (const Shape shape : {Shape{1000, 192}, Shape{700, 513}}) {
    Matrix x(DType::f32, shape.rows, shape.cols), b(DType::bf16, shape.rows, shape.cols);
    x.randomise(5, "x");
    b.randomise(5, "b");
    expect_same_bits_for_any_threads([&] {
      Matrix sum(DType::f32, 1, shape.cols), y(DType::bf16, shape.rows, shape.cols);
      sum_rows({}, x, sum);
      add_rows({}, x, b, y);
      return bits(sum) + bits(y);
    });
  }
}

}  // namespace
}  // namespace sps::ops
