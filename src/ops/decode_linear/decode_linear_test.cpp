#include "ops/decode_linear/decode_linear.h"

#include <gtest/gtest.h>

#include "ops/check.h"
#include "ops/decode_linear/decode_linear_kernels.h"
#include "ops/linear/gemm.h"

namespace sps::ops {
namespace {

struct Shape {
  int64_t rows, in, out;
};
const Shape kShapes[] = {{1, 1, 1},    {1, 16, 29},    {2, 24, 48},    {3, 7, 5},
                         {5, 100, 33}, {16, 64, 64},   {17, 96, 31},   {33, 40, 70},
                         {70, 33, 95}, {300, 160, 40}, {4, 2304, 200}, {2, 5000, 37}};

struct Numbers {
  Matrix x, w;
  Numbers(DType dtype, const Shape& s) : x(dtype, s.rows, s.in, s.in + 3), w(dtype, s.out, s.in, s.in + 5) {
    x.randomise(1, "x"), w.randomise(1, "w");
  }
};

void compare(DType act, DType out, const Shape& s) {
  const Numbers n(act, s);
  Matrix y(out, s.rows, s.out, s.out + 1), truth(DType::f64, s.rows, s.out);
  decode_linear({}, n.x, n.w, y);
  decode_linear({}, n.x.to(DType::f64), n.w.to(DType::f64), truth);
  // Each addition rounds by 2^-25 of a partial sum of up to 4 sqrt(in), and the errors of `in` additions
  // wander like sqrt(in), in the worst of some thousand sums four times as far. bf16 then rounds the result.
  const double sum = double(s.in + 4) * 0x1p-21, rounding = out == DType::bf16 ? 1.0 / 256 : 0;
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.out; ++c)
      ASSERT_NEAR(y.get(r, c), truth.get(r, c), sum + rounding * std::abs(truth.get(r, c)))
          << dtype_name(act) << " " << s.rows << "x" << s.in << "x" << s.out << " at " << r << "," << c;
}

TEST(DecodeLinear, IsTheProduct) {
  for (const Shape& s : kShapes) {
    compare(DType::f32, DType::f32, s);
    compare(DType::bf16, DType::bf16, s);
    compare(DType::bf16, DType::f32, s);
    const ForceBf16Fallback no_tiles;
    compare(DType::bf16, DType::bf16, s);
    compare(DType::bf16, DType::f32, s);
  }
}

// Any part of the rows, on any number of threads, gives the same rows.
void parts_are_the_whole(DType act) {
  const int before = thread_count();
  for (const Shape& s : kShapes) {
    const Numbers n(act, s);
    Matrix whole(DType::f32, s.rows, s.out);
    decode_linear({}, n.x, n.w, whole);
    for (const int64_t part : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{16}, int64_t{37}}) {
      set_thread_count(part % 2 == 0 ? 2 : 1);
      for (int64_t row = 0; row < s.rows; row += part) {
        const int64_t rows = std::min(part, s.rows - row);
        Matrix y(DType::f32, rows, s.out);
        decode_linear({}, n.x->rows_from(row, rows), n.w, y);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < s.out; ++c)
            ASSERT_EQ(y.get(r, c), whole.get(row + r, c)) << part << " " << row + r;
      }
    }
  }
  set_thread_count(before);
}

TEST(DecodeLinear, ARowDoesNotDependOnTheOthers) {
  parts_are_the_whole(DType::f32);
  parts_are_the_whole(DType::bf16);
  const ForceBf16Fallback no_tiles;
  parts_are_the_whole(DType::bf16);
}

TEST(DecodeLinear, NothingInNothingOut) {
  Matrix w(DType::f32, 4, 3);
  Tensor x{nullptr, 0, 3, 3, DType::f32, Device::cpu}, y{nullptr, 0, 4, 4, DType::f32, Device::cpu};
  decode_linear({}, x, w, y);
}

}  // namespace
}  // namespace sps::ops
