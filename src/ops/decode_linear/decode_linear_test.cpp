#include "ops/decode_linear/decode_linear.h"

#include <gtest/gtest.h>

#include "ops/check.h"
#include "ops/decode_linear/decode_linear_cuda.h"
#include "ops/linear/gemm.h"

namespace sps::ops {
namespace {

struct Shape {
  int64_t rows, in, out;
};
std::string name_of(const testing::TestParamInfo<Shape>& info) {
  const Shape& s = info.param;
  return fmt::format("{}x{}x{}", s.rows, s.in, s.out);
}
// The last ones as models have them: on a GPU other cuts of the rows of w and of k.
const Shape kShapes[] = {{1, 1, 1},      {1, 16, 29},    {2, 24, 48},     {3, 7, 5},       {5, 100, 33},
                         {16, 64, 64},   {17, 96, 31},   {33, 40, 70},    {70, 33, 95},    {300, 160, 40},
                         {4, 2304, 200}, {2, 5000, 37},  {64, 264, 1100}, {9, 2400, 72},   {1, 512, 4600},
                         {3, 64, 9000},  {17, 64, 9000}, {19, 4104, 40},  {2, 2056, 4300}, {64, 1600, 40},
                         {33, 3072, 24}};

// The same numbers in rows of any stride.
Matrix padded(const Matrix& m, int64_t padding) {
  Matrix copy(m->dtype, m->rows, m->cols, m->cols + padding);
  copy_tensor(m, copy);
  return copy;
}
struct Numbers {
  Matrix x, w;
  Numbers(DType dtype, const Shape& s) : x(dtype, s.rows, s.in), w(dtype, s.out, s.in) {
    x.randomise(1, "x"), w.randomise(1, "w");
  }
  Numbers(const Numbers& n, int64_t x_padding, int64_t w_padding)
      : x(padded(n.x, x_padding)), w(padded(n.w, w_padding)) {}
};

// Each addition rounds by 2^-25 of a partial sum of up to 4 sqrt(in), and the errors of `in` additions wander
// like sqrt(in), in the worst of some thousand sums four times as far. bf16 then rounds the result.
void expect_product(const Matrix& y, const Matrix& truth, int64_t in, const std::string& name) {
  const double sum = double(in + 4) * 0x1p-21, rounding = y->dtype == DType::bf16 ? 1.0 / 256 : 0;
  for (int64_t r = 0; r < y->rows; ++r)
    for (int64_t c = 0; c < y->cols; ++c)
      ASSERT_NEAR(y.get(r, c), truth.get(r, c), sum + rounding * std::abs(truth.get(r, c)))
          << name << " at " << r << "," << c;
}

void compare(const Backend& b, DType out, const Shape& s, const Numbers& dense, int64_t x_padding,
             int64_t w_padding, const Matrix& truth) {
  const Numbers n(dense, x_padding, w_padding);
  const std::string name = fmt::format("{} -> {} {}x{}x{} padding {},{}", b.name(), dtype_name(out), s.rows,
                                       s.in, s.out, x_padding, w_padding);
  Matrix y(out, s.rows, s.out, s.out + 1);
  {
    OnDevice on(b.device);
    decode_linear(on.exec(), on(n.x), on(n.w), on(y));
  }
  expect_product(y, truth, s.in, name);
  // The same in two pieces.
  if (s.out == 1) return;
  const int64_t first = (s.out + 1) / 2;
  Matrix head(out, s.rows, first), rest(out, s.rows, s.out - first, s.out);
  {
    OnDevice on(b.device);
    decode_linear(on.exec(), on(n.x), on(n.w), on(head), on(rest));
  }
  Matrix pieces(out, s.rows, s.out);
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.out; ++c) pieces.set(r, c, c < first ? head.get(r, c) : rest.get(r, c - first));
  expect_product(pieces, truth, s.in, name + " in two pieces");
  if (b.device == Device::cuda && s.rows > kFewDecodeRows) return;  // bits are the library's
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t c = 0; c < s.out; ++c) ASSERT_EQ(pieces.get(r, c), y.get(r, c)) << name;
}

class DecodeLinearOfShapes : public testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, DecodeLinearOfShapes, testing::ValuesIn(kShapes), name_of);

TEST_P(DecodeLinearOfShapes, IsTheProduct) {
  const Shape& s = GetParam();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Matrix truth(DType::f64, s.rows, s.out);
    const Numbers n(dtype, s);
    decode_linear({}, *n.x.to(DType::f64), n.w.to(DType::f64), truth);
    for (const Device device : test_devices())
      // With 3 and 5 rows do not begin where 16 bytes do.
      for (const auto& [x_padding, w_padding] : {std::pair{0, 0}, {8, 16}, {3, 5}})
        for (const DType out : {dtype, DType::f32}) {
          compare({device, dtype}, out, s, n, x_padding, w_padding, truth);
          if (device == Device::cuda) continue;
          const ForceBf16Fallback no_tiles;
          compare({device, dtype}, out, s, n, x_padding, w_padding, truth);
        }
  }
}

// Any part of the rows, on any number of threads, gives the same rows.
void parts_are_the_whole(const Backend& b, const Shape& s) {
  const int before = thread_count();
  for (const int64_t padding : {0, 3}) {
    const Numbers n(Numbers(b.dtype, s), padding, padding);
    const int64_t most = b.device == Device::cuda ? std::min(s.rows, kFewDecodeRows) : s.rows;
    const auto product = [&](int64_t row, int64_t rows) {
      Matrix y(DType::f32, rows, s.out);
      OnDevice on(b.device);
      decode_linear(on.exec(), on(n.x->rows_from(row, rows), n.x.whole()), on(n.w), on(y));
      return y;
    };
    Matrix whole = product(0, most);
    for (const int64_t part : {1, 2, 3, 8, 9, 16, 17, 32, 33, 37}) {
      if (part >= most && part > 1) continue;
      set_thread_count(part % 2 == 0 ? 2 : 1);
      for (int64_t row = 0; row < most; row += part) {
        const int64_t rows = std::min(part, most - row);
        const Matrix y = product(row, rows);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < s.out; ++c)
            ASSERT_EQ(y.get(r, c), whole.get(row + r, c))
                << b.name() << " " << s.rows << "x" << s.in << "x" << s.out << " " << part << " " << row + r;
      }
    }
  }
  set_thread_count(before);
}

// f(backend) for all of them; on a GPU also with one kernel for all calls of few bf16 rows, and with the
// other.
template <class F>
void with_every_kernel(F&& f) {
  for (const Backend& b : fast_backends()) f(b);
#ifdef SPS_HAS_CUDA
  const int before = most_direct_rows;
  for (const int rows : {1, 8}) {
    most_direct_rows = rows;
    for (const Backend& b : fast_backends())
      if (b.device == Device::cuda && b.dtype == DType::bf16) f(b);
  }
  most_direct_rows = before;
#endif
}

TEST_P(DecodeLinearOfShapes, ARowDoesNotDependOnTheOthers) {
  with_every_kernel([&](const Backend& b) { parts_are_the_whole(b, GetParam()); });
  const ForceBf16Fallback no_tiles;
  parts_are_the_whole({Device::cpu, DType::bf16}, GetParam());
}

TEST(DecodeLinear, NothingInNothingOut) {
  for (const Device device : test_devices()) {
    Matrix w(DType::f32, 4, 3);
    Tensor x{nullptr, 0, 3, 3, DType::f32, device}, y{nullptr, 0, 4, 4, DType::f32, device};
    OnDevice on(device);
    decode_linear(on.exec(), x, on(w), y);
  }
}

// ---- with a norm before the product, SwiGLU or an addition behind it

struct Block {
  Shape shape;
  DType act;
  Matrix residual, gain, w, pair, h;  // pair: gate and up
  std::vector<int32_t> pick;

  Block(DType dtype, const Shape& s) : shape(s), act(dtype) {
    const DType wide = DType::f32;
    residual = Matrix(wide, s.rows, s.in, s.in + 4), gain = Matrix(wide, 1, s.in);
    w = Matrix(dtype, s.out, s.in), pair = Matrix(dtype, 2 * s.out, s.in);
    h = Matrix(dtype, s.rows, s.in, s.in + 8);
    residual.randomise(1, "residual", 3, 0.1), gain.randomise(1, "gain", 0.2, 1);
    // Sums of about one, where SwiGLU bends.
    const double spread = 1 / std::sqrt(double(s.in));
    w.randomise(1, "w", spread), pair.randomise(1, "pair", spread), h.randomise(1, "h");
    for (int64_t r = 0; r < s.rows; ++r)
      if (r % 3 != 1) pick.push_back(int32_t(r));
  }
  Block to(DType dtype) const {
    Block b = *this;
    b.act = dtype;
    for (Matrix* m : {&b.residual, &b.gain, &b.w, &b.pair, &b.h}) *m = m->to(dtype);
    return b;
  }
};

struct Results {
  Matrix normed, rest, picked, swiglu, swiglu_plain, sum;
};

// rows [begin, begin + count) of the block.
Results results(Device device, const Block& b, int64_t begin, int64_t count) {
  const Shape& s = b.shape;
  const DType wide = b.act == DType::f64 ? DType::f64 : DType::f32;
  const int64_t split = (s.out + 2) / 3;
  std::vector<int32_t> pick;
  for (const int32_t r : b.pick)
    if (r >= begin && r < begin + count) pick.push_back(int32_t(r - begin));
  const auto picked = int64_t(pick.size());
  Results all{Matrix(b.act, count, split, split + 3),
              Matrix(b.act, count, s.out - split),
              Matrix(wide, picked, s.out),
              Matrix(b.act, count, s.out, s.out + 1),
              Matrix(b.act, count, s.out),
              Matrix(wide, count, s.out, s.out + 5)};
  // The numbers of a row are the same wherever the pieces begin.
  const Rng rng(7, "sum of all");
  for (int64_t r = 0; r < count; ++r)
    for (int64_t c = 0; c < s.out; ++c)
      all.sum.set(r, c, double(float(rng.normal(uint64_t((begin + r) * s.out + c)))));
  Matrix n(b.act, count, s.in), rstd(wide, count, 1), picked_s(wide, picked, s.in),
      gate_up(b.act, count, 2 * s.out), delta(b.act, count, s.out);
  OnDevice on(device);
  const Tensor x = on(b.residual->rows_from(begin, count), b.residual.whole()),
               h = on(b.h->rows_from(begin, count), b.h.whole());
  const DecodeRows rows(x, on(b.gain), 1e-5F, on(n), on(rstd));
  decode_linear(on.exec(), rows, on(b.w), on(all.normed), on(all.rest));
  if (picked > 0) {
    DecodeRows some(x, on(b.gain), 1e-5F, on(n).rows_from(0, picked), on(rstd).rows_from(0, picked));
    some.pick = on.ids(pick), some.s = on(picked_s);
    decode_linear(on.exec(), some, on(b.w), on(all.picked));
  }
  decode_linear_swiglu(on.exec(), rows, on(b.pair), on(gate_up), on(all.swiglu));
  decode_linear_swiglu(on.exec(), h, on(b.pair), on(gate_up), on(all.swiglu_plain));
  decode_linear_add(on.exec(), h, on(b.w), on(delta), on(all.sum));
  return all;
}

const Shape kBlocks[] = {{1, 1, 3},     {2, 24, 40},     {3, 7, 5},      {1, 1024, 130},  {7, 200, 64},
                         {8, 1600, 48}, {12, 96, 300},   {33, 1024, 40}, {64, 2304, 200}, {70, 64, 96},
                         {2, 64, 9000}, {20, 1600, 120}, {24, 1800, 72}, {40, 128, 5000}, {64, 1032, 24}};

class DecodeLinearInBlocks : public testing::TestWithParam<Shape> {};
INSTANTIATE_TEST_SUITE_P(Blocks, DecodeLinearInBlocks, testing::ValuesIn(kBlocks), name_of);

TEST_P(DecodeLinearInBlocks, WithWhatStandsBesideIt) {
  const Shape& s = GetParam();
  for (const Backend& backend : fast_backends()) {
    const Block block(backend.dtype, s);
    const Results truth = results(Device::cpu, block.to(DType::f64), 0, s.rows),
                  got = results(backend.device, block, 0, s.rows);
    SCOPED_TRACE(fmt::format("{} {}x{}x{}", backend.name(), s.rows, s.in, s.out));
    // Normed rows are rounded, the pair that SwiGLU takes (both numbers of it), and the result.
    const auto tol = [&](double roundings) { return tolerance(backend.dtype, roundings); };
    SPS_EXPECT_CLOSE(got.normed, truth.normed, tol(2));
    SPS_EXPECT_CLOSE(got.rest, truth.rest, tol(2));
    SPS_EXPECT_CLOSE(got.picked, truth.picked, tol(1));
    SPS_EXPECT_CLOSE(got.swiglu, truth.swiglu, tol(4));
    SPS_EXPECT_CLOSE(got.swiglu_plain, truth.swiglu_plain, tol(3));
    SPS_EXPECT_CLOSE(got.sum, truth.sum, tol(1));
  }
}

void blocks_are_cut(const Backend& backend, const Shape& s) {
  const Block block(backend.dtype, s);
  const int64_t most = backend.device == Device::cuda ? std::min(s.rows, kFewDecodeRows) : s.rows;
  const Results whole = results(backend.device, block, 0, most);
  for (const int64_t part : {1, 5, 8, 9, 16, 17, 32, 33})
    for (int64_t row = 0, picked = 0; row < most; row += part) {
      const Results some = results(backend.device, block, row, std::min(part, most - row));
      const auto equal = [&](const Matrix& a, const Matrix& b, int64_t from) {
        for (int64_t r = 0; r < a->rows; ++r)
          for (int64_t c = 0; c < a->cols; ++c)
            ASSERT_EQ(a.get(r, c), b.get(from + r, c))
                << backend.name() << " " << s.rows << "x" << s.in << "x" << s.out << " part " << part;
      };
      equal(some.normed, whole.normed, row), equal(some.rest, whole.rest, row);
      equal(some.picked, whole.picked, picked), picked += some.picked->rows;
      equal(some.swiglu, whole.swiglu, row), equal(some.swiglu_plain, whole.swiglu_plain, row);
      equal(some.sum, whole.sum, row);
    }
}

TEST_P(DecodeLinearInBlocks, WhatStandsBesideItChangesNothingOfThat) {
  with_every_kernel([&](const Backend& b) { blocks_are_cut(b, GetParam()); });
}

// Numbers that are none in one row, or in rows of w that are not asked for, stay there.
TEST(DecodeLinear, NanStaysInItsRow) {
  for (const Backend& b : fast_backends())
    for (const int64_t rows : {3, 20}) {
      const int64_t in = 96, out = 40;
      Matrix x(b.dtype, rows, in), w(b.dtype, out + 8, in), clean(b.dtype, rows, out), y(b.dtype, rows, out);
      x.randomise(1, "x"), w.randomise(1, "w");
      for (int64_t r = out; r < out + 8; ++r)
        for (int64_t c = 0; c < in; ++c) w.set(r, c, NAN);
      const auto run = [&](const Matrix& to) {
        OnDevice on(b.device);
        decode_linear(on.exec(), on(x), on(w).rows_from(0, out), on(to));
      };
      run(clean);
      x.set(1, 5, NAN);
      run(y);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < out; ++c)
          if (r == 1)
            EXPECT_TRUE(std::isnan(y.get(r, c)));
          else
            EXPECT_EQ(y.get(r, c), clean.get(r, c)) << b.name() << " " << r << "," << c;
    }
}

}  // namespace
}  // namespace sps::ops
