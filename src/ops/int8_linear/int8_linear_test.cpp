#include "ops/int8_linear/int8_linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/check.h"
#include "ops/decode_linear/decode_linear.h"
#include "ops/linear/gemm.h"

namespace sps::ops {
namespace {

// A matrix in 8 bits and its memory.
struct Int8 {
  std::vector<int8_t> values;
  std::vector<bf16> scales;
  Int8Matrix matrix;

  explicit Int8(const Matrix& w)
      : values(Int8Matrix::value_bytes(w->rows, w->cols)),
        scales(Int8Matrix::scale_bytes(w->rows, w->cols) / sizeof(bf16)),
        matrix{values.data(), scales.data(), w->rows, w->cols} {
    quantize_int8(w, matrix);
  }
  Matrix read(DType dtype) const {
    Matrix w(dtype, matrix.rows, matrix.cols, matrix.cols + 1);
    dequantize_int8(matrix, w);
    return w;
  }
};

TEST(Int8, EveryNumberIsWithinHalfAStep) {
  for (const DType dtype : {DType::f32, DType::f64})
    for (const int64_t cols : {1, 63, 64, 65, 200}) {
      Matrix w(dtype, 5, cols, cols + 3);
      w.randomise(1, "w");
      for (int64_t c = 0; c < cols; ++c) w.set(2, c, 1e-3 * w.get(2, c)), w.set(3, c, 1e4 * w.get(3, c));
      const Int8 q(w);
      const Matrix back = q.read(DType::f64);
      for (int64_t r = 0; r < 5; ++r)
        for (int64_t from = 0; from < cols; from += kInt8Group) {
          const int64_t end = std::min(from + kInt8Group, cols);
          double largest = 0;
          for (int64_t c = from; c < end; ++c) largest = std::max(largest, std::abs(w.get(r, c)));
          // The scale is rounded to bf16, so the largest number may lie 2^-9 of itself beyond 127 steps.
          for (int64_t c = from; c < end; ++c) {
            EXPECT_NEAR(back.get(r, c), w.get(r, c), largest * (0.5 / 127 * (1 + 0x1p-8) + 0x1p-9));
            EXPECT_LE(std::abs(int(q.values[size_t(r * cols + c)])), 127);
          }
        }
    }
}

// What 8 bits can hold comes back as it was, and so does what they say a second time.
TEST(Int8, NumbersOnTheGridStay) {
  Matrix w(DType::f32, 3, 130);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t c = 0; c < 130; ++c) w.set(r, c, double((c * 7 + r) % 255 - 127) * (r == 0 ? 0.5 : 0x1p-10));
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t group = 0; group < 3; ++group) w.set(r, group * kInt8Group, r == 0 ? 63.5 : 127 * 0x1p-10);
  const Int8 q(w);
  const Matrix back = q.read(DType::f32);
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t c = 0; c < 130; ++c) EXPECT_EQ(back.get(r, c), w.get(r, c)) << r << "," << c;
  EXPECT_EQ(Int8(back).values, q.values);
}

TEST(Int8, ZerosAndNumbersThatAreNone) {
  Matrix w(DType::f32, 3, 128);
  w.randomise(1, "w");
  for (int64_t c = 64; c < 128; ++c) w.set(0, c, c % 2 == 0 ? 0.0 : -0.0);
  w.set(1, 70, NAN), w.set(2, 3, INFINITY);
  const Matrix back = Int8(w).read(DType::bf16);
  for (int64_t c = 0; c < 128; ++c) {
    EXPECT_EQ(back.get(0, c) == 0, c >= 64 || std::abs(w.get(0, c)) < 0.004) << c;
    EXPECT_EQ(std::isnan(back.get(1, c)), c >= 64);
    EXPECT_EQ(std::isnan(back.get(2, c)), c < 64);
  }
}

// The product is decode_linear's on the weights as they are read, to the bit, on any number of threads.
void is_the_product(DType act) {
  struct Shape {
    int64_t rows, in, out;
  };
  const int before = thread_count();
  for (const Shape s : {Shape{1, 1, 1},
                        {1, 64, 70},
                        {3, 65, 33},
                        {16, 130, 64},
                        {17, 200, 40},
                        {5, 640, 1100},
                        {40, 96, 1100}}) {
    Matrix x(act, s.rows, s.in, s.in + 3), w(DType::f32, s.out, s.in);
    x.randomise(1, "x"), w.randomise(1, "w");
    const Int8 q(w);
    for (const DType out : {DType::f32, act}) {
      if (act == DType::f64 && out != act) continue;
      Matrix want(out, s.rows, s.out);
      decode_linear({}, Tensor(x), q.read(act), want);
      for (const int threads : {1, 2}) {
        set_thread_count(threads);
        Matrix y(out, s.rows, s.out, s.out + 2);
        int8_linear({}, x, q.matrix, y);
        for (int64_t r = 0; r < s.rows; ++r)
          for (int64_t c = 0; c < s.out; ++c)
            ASSERT_EQ(y.get(r, c), want.get(r, c))
                << dtype_name(act) << " " << s.rows << "x" << s.in << "x" << s.out;
      }
    }
  }
  set_thread_count(before);
}

TEST(Int8, TheProductIsThatOfTheWeightsAsTheyAreRead) {
  for (const DType act : {DType::f64, DType::f32, DType::bf16}) is_the_product(act);
  const ForceBf16Fallback no_tiles;
  is_the_product(DType::bf16);
}

// With what stands beside a product in a block: the bits of decode_linear on the weights as they are read.
void is_all_of_the_product(DType act) {
  const DType wide = act == DType::f64 ? DType::f64 : DType::f32;
  for (const int64_t rows : {1, 5, 20}) {
    constexpr int64_t kIn = 130, kOut = 70, kRest = 44;
    Matrix s(wide, rows + 2, kIn), x(act, rows, kIn, kIn + 1), gain(wide, 1, kIn), w(DType::f32, kOut, kIn);
    s.randomise(1, "s"), x.randomise(1, "x"), gain.randomise(1, "gain"), w.randomise(1, "w");
    const Int8 q(w);
    const Matrix read = q.read(act);
    Matrix n(act, rows, kIn), rstd(wide, rows, 1), picked(wide, rows, kIn);
    std::vector<int32_t> pick;
    for (int64_t r = 0; r < rows; ++r) pick.push_back(int32_t(r == 0 ? 0 : r + 1));
    const DecodeRows normed(s->rows_from(1, rows), gain, 1e-5F, n, rstd);
    DecodeRows some(s, gain, 1e-5F, n, rstd);
    some.pick = pick, some.s = picked;
    const auto equal = [&](const Matrix& a, const Matrix& b, const char* what) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < b->cols; ++c)
          ASSERT_EQ(a.get(r, c), b.get(r, c)) << what << " " << dtype_name(act) << " " << rows;
    };
    for (const DecodeRows& from : {DecodeRows(x), normed, some}) {
      Matrix y(act, rows, kOut - kRest), rest(act, rows, kRest), y2(act, rows, kOut - kRest),
          rest2(act, rows, kRest);
      decode_linear({}, from, read, y, rest);
      decode_linear({}, from, q.matrix, y2, rest2);
      equal(y2, y, "y"), equal(rest2, rest, "rest");
      Matrix gate_up(act, rows, kOut), h(act, rows, kOut / 2), h2(act, rows, kOut / 2);
      decode_linear_swiglu({}, from, read, gate_up, h);
      decode_linear_swiglu({}, from, q.matrix, gate_up, h2);
      equal(h2, h, "h");
    }
    Matrix delta(act, rows, kOut), sum(wide, rows, kOut), sum2(wide, rows, kOut);
    sum.randomise(2, "sum"), sum2.randomise(2, "sum");
    decode_linear_add({}, x, read, delta, sum);
    decode_linear_add({}, x, q.matrix, delta, sum2);
    equal(sum2, sum, "sum");
  }
}

TEST(Int8, SoIsWhatStandsBesideIt) {
  for (const DType act : {DType::f64, DType::f32, DType::bf16}) is_all_of_the_product(act);
  const ForceBf16Fallback no_tiles;
  is_all_of_the_product(DType::bf16);
}

TEST(Int8DeathTest, ShapesThatDoNotFitAbort) {
  Matrix w(DType::f32, 4, 8), narrow(DType::f32, 4, 7), x(DType::f32, 2, 8), y(DType::f32, 2, 4);
  const Int8 q(w);
  EXPECT_DEATH(quantize_int8(narrow, q.matrix), "to.cols");
  EXPECT_DEATH(dequantize_int8(q.matrix, narrow), "w.cols");
  EXPECT_DEATH(int8_linear({}, narrow->rows_from(0, 2), q.matrix, y), "x.cols == w.cols");
  EXPECT_DEATH(int8_linear({}, x, q.matrix, y->cols_from(0, 3)), "w.rows");
  EXPECT_DEATH(decode_linear({}, Tensor(x), q.matrix, y->cols_from(0, 3)), "w.rows");
  EXPECT_DEATH(q.matrix.rows_from(2, 3), "count <= rows");
}

}  // namespace
}  // namespace sps::ops
