#include "ops/rows/rows.h"

#include "ops/check.h"

namespace sps::ops {
namespace {

struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1}, {3, 8}, {100, 48}, {257, 200}, {5, 513}, {300, 192}};
constexpr DType kActs[] = {DType::f32, DType::bf16};

TEST(Rows, CopyConvertsExactlyAndRepeatsOneRow) {
  for (const Shape shape : kShapes)
    for (const DType from : kActs)
      for (const DType to : kActs)
        for (const int64_t x_rows : {shape.rows, int64_t{1}}) {
          Matrix x(from, x_rows, shape.cols, shape.cols + 3), y(to, shape.rows, shape.cols, shape.cols + 5);
          x.randomise(1, "x");
          copy_rows({}, x, y);
          Matrix x64 = x.to(DType::f64), want(DType::f64, shape.rows, shape.cols);
          copy_rows({}, x64, want);
          for (int64_t r = 0; r < shape.rows; ++r)
            EXPECT_EQ(want.get(r, shape.cols - 1), x.get(x_rows == 1 ? 0 : r, shape.cols - 1));
          EXPECT_EQ(relative_error(y, want.to(to)), 0);  // one rounding and nothing else
        }
}

TEST(Rows, AddInEveryMixOfTypes) {
  for (const Shape shape : kShapes)
    for (const DType ta : kActs)
      for (const DType tb : kActs)
        for (const DType ty : kActs)
          for (const int64_t a_rows : {shape.rows, int64_t{1}}) {
            Matrix a(ta, a_rows, shape.cols, shape.cols + 1), b(tb, shape.rows, shape.cols, shape.cols + 2);
            Matrix y(ty, shape.rows, shape.cols, shape.cols + 7), want(DType::f64, shape.rows, shape.cols);
            a.randomise(2, "a");
            b.randomise(2, "b");
            add_rows({}, a, b, y);
            add_rows({}, a.to(DType::f64), b.to(DType::f64), want);
            EXPECT_DOUBLE_EQ(want.get(shape.rows - 1, 0), a.get(a_rows - 1, 0) + b.get(shape.rows - 1, 0));
            SPS_EXPECT_CLOSE(y, want, tolerance(ty));
          }
}

TEST(Rows, AddMayBeInPlace) {
  for (const DType dtype : kActs) {
    Matrix a(dtype, 130, 72), b(dtype, 130, 72), y(dtype, 130, 72), one(dtype, 1, 72);
    a.randomise(3, "a");
    b.randomise(3, "b");
    one.randomise(3, "one");
    add_rows({}, a, b, y);
    Matrix into_a = a.to(dtype), into_b = b.to(dtype), onto_one = b.to(dtype), want(dtype, 130, 72);
    add_rows({}, into_a, b, into_a);
    add_rows({}, a, into_b, into_b);
    add_rows({}, one, b, want);
    add_rows({}, one, onto_one, onto_one);
    EXPECT_EQ(bits(into_a), bits(y));
    EXPECT_EQ(bits(into_b), bits(y));
    EXPECT_EQ(bits(onto_one), bits(want));
  }
}

TEST(Rows, SumAddsToWhatIsThere) {
  for (const Shape shape : kShapes)
    for (const DType tx : kActs)
      for (const DType ty : kActs) {
        Matrix x(tx, shape.rows, shape.cols, shape.cols + 9), y(ty, 1, shape.cols);
        x.randomise(4, "x");
        y.randomise(4, "y");
        Matrix want = y.to(DType::f64);
        sum_rows({}, x, y);
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
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    Matrix whole(dtype, 133, 40);
    whole.fill(7);
    fill({}, whole->cols_from(4, 30), -1.5F);
    for (int64_t r = 0; r < 133; ++r)
      for (int64_t c = 0; c < 40; ++c) ASSERT_EQ(whole.get(r, c), c >= 4 && c < 34 ? -1.5 : 7);
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
