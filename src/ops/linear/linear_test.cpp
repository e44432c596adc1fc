#include "ops/linear/linear.h"

#include <cstring>

#include "base/error.h"
#include "base/threads.h"
#include "ops/check.h"
#include "ops/linear/cublas.h"
#include "ops/linear/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/transpose.h"
#include "tensor/arena.h"

namespace sps::ops {
namespace {

struct Case {
  int64_t rows, in, out;
};

// Awkward sizes, sizes with several chunks and a tail, and sizes that cut k (in, out or rows) into several
// spans.
const Case kCases[] = {{1, 1, 1},      {1, 48, 193},   {3, 5, 1},      {17, 193, 48},  {129, 48, 193},
                       {129, 1, 5},    {33, 193, 1},   {300, 96, 288}, {65, 1100, 70}, {40, 70, 1100},
                       {1100, 70, 40}, {2100, 33, 65}, {7, 2100, 130}, {40, 4200, 33}, {1, 256, 100},
                       {2, 40, 264},   {4, 1032, 65},  {5, 256, 96},   {520, 128, 264}};

// Padding of rows. With 8 they can still be moved 16 bytes at a time.
constexpr int64_t kPads[] = {0, 7, 8};

Matrix make(DType t, int64_t rows, int64_t cols, const char* name, int64_t pad) {
  Matrix m(t, rows, cols, cols + pad);
  m.randomise(11, name);
  return m;
}

const char* device_name(Device device) {
  return device == Device::cpu ? "cpu" : "cuda";
}

// The three products of a case.
struct Products {
  Matrix x, w, dy, y, dx, dw;
  Products(const Case& s, DType act, DType out, int64_t pad)
      : x(make(act, s.rows, s.in, "x", pad)),
        w(make(act, s.out, s.in, "w", pad)),
        dy(make(act, s.rows, s.out, "dy", pad)),
        y(make(out, s.rows, s.out, "y", pad)),
        dx(make(out, s.rows, s.in, "dx", pad)),
        dw(make(DType::f32, s.out, s.in, "dw", pad)) {}
  void to_f64() {
    for (Matrix* m : {&x, &w, &dy, &y, &dx, &dw}) *m = m->to(DType::f64);
  }
  void run(Device device, Accumulate acc) {
    OnDevice on(device);
    linear_forward(on.exec(), on(x), on(w), on(y), acc);
    linear_backward_input(on.exec(), on(dy), on(w), on(dx), acc);
    linear_backward_weight(on.exec(), on(dy), on(x), on(dw));
  }
  std::string results() const { return bits(y) + bits(dx) + bits(dw); }
};

void expect_close(const Products& got, const Products& want, double roundings = 1) {
  SPS_EXPECT_CLOSE(got.y, want.y, tolerance(got.y->dtype, roundings));
  SPS_EXPECT_CLOSE(got.dx, want.dx, tolerance(got.dx->dtype, roundings));
  SPS_EXPECT_CLOSE(got.dw, want.dw, tolerance(DType::f32));
}

void expect_all_close(const std::vector<Device>& devices, const Case& s, DType act, DType out, int64_t pad,
                      Accumulate acc) {
  Products want(s, act, out, pad);
  want.to_f64();
  want.run(Device::cpu, acc);
  for (const Device device : devices) {
    SCOPED_TRACE(fmt::format("{}: rows {} in {} out {}, {} -> {}, pad {}, accumulate {}", device_name(device),
                             s.rows, s.in, s.out, dtype_name(act), dtype_name(out), pad,
                             acc == Accumulate::yes));
    Products got(s, act, out, pad);
    got.run(device, acc);
    // What cuBLASLt adds to a bf16 result can be off by two roundings: the product seems to be rounded by
    // itself.
    expect_close(got, want, device == Device::cuda && acc == Accumulate::yes ? 2 : 1);
  }
}

TEST(Linear, MatchesReference) {
  for (const Case& s : kCases)
    for (const Accumulate acc : {Accumulate::no, Accumulate::yes})
      for (const int64_t pad : kPads) {
        expect_all_close(test_devices(), s, DType::f32, DType::f32, pad, acc);
        expect_all_close(test_devices(), s, DType::bf16, DType::bf16, pad, acc);
        expect_all_close(test_devices(), s, DType::bf16, DType::f32, pad, acc);
      }
}

TEST(Linear, MatchesReferenceWithoutBf16Instructions) {
  const ForceBf16Fallback forced;
  EXPECT_FALSE(bf16_is_fast());
  for (const Case& s : kCases)
    for (const Accumulate acc : {Accumulate::no, Accumulate::yes})
      for (const int64_t pad : {0, 7})
        expect_all_close({Device::cpu}, s, DType::bf16, pad > 0 ? DType::f32 : DType::bf16, pad, acc);
}

TEST(Linear, ReferenceGradients) {
  const Exec ex;
  const Matrix x = make(DType::f64, 5, 7, "x", 7), w = make(DType::f64, 4, 7, "w", 7);
  const Matrix weight = make(DType::f64, 5, 4, "weight", 0);
  Matrix y(DType::f64, 5, 4), dx(DType::f64, 5, 7), dw(DType::f64, 4, 7);
  const auto loss = [&] {
    linear_forward(ex, x, w, y);
    double sum = 0;
    for (int64_t r = 0; r < 5; ++r)
      for (int64_t o = 0; o < 4; ++o) sum += weight.get(r, o) * y.get(r, o) * y.get(r, o);
    return sum;
  };
  loss();
  Matrix dy(DType::f64, 5, 4);
  for (int64_t r = 0; r < 5; ++r)
    for (int64_t o = 0; o < 4; ++o) dy.set(r, o, 2 * weight.get(r, o) * y.get(r, o));
  linear_backward_input(ex, dy, w, dx);
  linear_backward_weight(ex, dy, x, dw);
  expect_gradient(loss, x, dx, "dx");
  expect_gradient(loss, w, dw, "dw");
}

// All three products of one shape, as bytes.
std::vector<std::byte> result_bytes(const Case& s, DType act) {
  const Exec ex;
  const Matrix x = make(act, s.rows, s.in, "x", 7), w = make(act, s.out, s.in, "w", 7);
  const Matrix dy = make(act, s.rows, s.out, "dy", 7);
  Matrix y(act, s.rows, s.out), dx(act, s.rows, s.in), dw(DType::f32, s.out, s.in);
  linear_forward(ex, x, w, y);
  linear_backward_input(ex, dy, w, dx, Accumulate::yes);
  linear_backward_weight(ex, dy, x, dw);
  std::vector<std::byte> bytes;
  for (const Tensor& t : {*y, *dx, *dw}) {
    const auto* from = static_cast<const std::byte*>(t.data);
    bytes.insert(bytes.end(), from, from + size_t(t.count()) * dtype_size(t.dtype));
  }
  return bytes;
}

TEST(Linear, SameBitsForAnyThreadCountAndEveryCall) {
  const int before = thread_count();
  for (const bool fallback : {false, true}) {
    std::unique_ptr<ForceBf16Fallback> forced;
    if (fallback) forced = std::make_unique<ForceBf16Fallback>();
    for (const Case& s :
         {Case{1, 300, 200}, {17, 193, 48}, {40, 1152, 200}, {300, 1152, 200}, {2100, 64, 96}})
      for (const DType act : {DType::f32, DType::bf16}) {
        set_thread_count(2);
        const auto two = result_bytes(s, act), again = result_bytes(s, act);
        set_thread_count(1);
        const auto one = result_bytes(s, act);
        set_thread_count(before);
        SCOPED_TRACE(fmt::format("rows {} in {} out {} {}", s.rows, s.in, s.out, dtype_name(act)));
        EXPECT_EQ(std::memcmp(two.data(), again.data(), two.size()), 0);
        EXPECT_EQ(std::memcmp(two.data(), one.data(), two.size()), 0);
      }
  }
}

// Shapes that cut the sum into several blocks along either side, the rows into several ranges, and leave
// rests everywhere; with dy wider than x and the other way round.
const Case kWeightCases[] = {{4200, 40, 100}, {5000, 100, 37}, {300, 450, 900},
                             {300, 900, 450}, {35, 1400, 20},  {257, 32, 2900}};

Matrix weight_gradient(const Case& s, DType act, int64_t pad, Device device = Device::cpu) {
  const Matrix x = make(act, s.rows, s.in, "x", pad), dy = make(act, s.rows, s.out, "dy", pad);
  Matrix dw = make(DType::f32, s.out, s.in, "dw", pad);
  OnDevice on(device);
  linear_backward_weight(on.exec(), on(dy), on(x), on(dw));
  return dw;
}

TEST(Linear, WeightGradientsOfManyPieces) {
  for (const Case& s : kWeightCases) {
    SCOPED_TRACE(fmt::format("rows {} in {} out {}", s.rows, s.in, s.out));
    const Matrix x = make(DType::bf16, s.rows, s.in, "x", 0).to(DType::f64);
    const Matrix dy = make(DType::bf16, s.rows, s.out, "dy", 0).to(DType::f64);
    const Matrix want = make(DType::f32, s.out, s.in, "dw", 0).to(DType::f64);
    linear_backward_weight({}, dy, x, want);
    for (const Device device : test_devices())
      for (const int64_t pad : kPads)
        SPS_EXPECT_CLOSE(weight_gradient(s, DType::bf16, pad, device), want, tolerance(DType::f32));
    expect_same_bits_for_any_threads([&] { return bits(weight_gradient(s, DType::bf16, 7)); });
  }
}

TEST(Linear, WeightGradientWritesItsViewOnly) {
  const Matrix x = make(DType::bf16, 300, 40, "x", 0), dy = make(DType::bf16, 300, 70, "dy", 0);
  for (const Device device : test_devices()) {
    Matrix wide(DType::f32, 72, 50);
    wide.fill(7);
    {
      OnDevice on(device);
      linear_backward_weight(on.exec(), on(dy), on(x),
                             on(wide->rows_from(1, 70).cols_from(3, 40), wide.whole()));
    }
    for (int64_t r = 0; r < 72; ++r)
      for (int64_t c = 0; c < 50; ++c)
        if (r == 0 || r == 71 || c < 3 || c >= 43) {
          ASSERT_EQ(wide.get(r, c), 7) << r << ", " << c;
        }
  }
}

TEST(Linear, NanReachesTheWeightsOfItsColumnOnly) {
  for (const DType act : {DType::f32, DType::bf16})
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{40, 50}, {50, 40}}) {
      const Matrix x = make(act, 70, in, "x", 0), dy = make(act, 70, out, "dy", 0);
      dy.set(69, 33, NAN);
      for (const Device device : test_devices()) {
        Matrix dw(DType::f32, out, in);
        {
          OnDevice on(device);
          linear_backward_weight(on.exec(), on(dy), on(x), on(dw));
        }
        for (int64_t r = 0; r < out; ++r)
          for (int64_t c = 0; c < in; ++c) ASSERT_EQ(std::isnan(dw.get(r, c)), r == 33) << r << ", " << c;
      }
    }
}

TEST(Linear, WorksInsideAParallelRegion) {
  const Exec ex;
  const Matrix x = make(DType::f32, 70, 40, "x", 0), w = make(DType::f32, 30, 40, "w", 0);
  Matrix want(DType::f32, 70, 30);
  linear_forward(ex, x, w, want);
  std::vector<Matrix> got;
  for (int i = 0; i < 4; ++i) got.emplace_back(DType::f32, 70, 30);
  parallel_for(4, [&](int64_t i) { linear_forward(ex, x, w, got[size_t(i)]); });
  for (const Matrix& y : got) EXPECT_EQ(std::memcmp(y->data, want->data, 70 * 30 * sizeof(float)), 0);
}

TEST(Linear, NothingOutsideTheViewIsWritten) {
  for (const Device device : test_devices())
    for (const DType act : {DType::f32, DType::bf16}) {
      const Matrix x = make(act, 300, 40, "x", 0), w = make(act, 50, 40, "w", 0);
      Matrix wide(act, 302, 60);
      wide.fill(7);
      {
        OnDevice on(device);
        linear_forward(on.exec(), on(x), on(w), on(wide->rows_from(1, 300).cols_from(5, 50), wide.whole()));
      }
      for (int64_t r = 0; r < 302; ++r)
        for (int64_t c = 0; c < 60; ++c)
          if (r == 0 || r == 301 || c < 5 || c >= 55) {
            ASSERT_EQ(wide.get(r, c), 7) << r << ", " << c;
          }
    }
}

TEST(Linear, EmptySums) {
  for (const Device device : test_devices()) {
    const Matrix x(DType::f32, 0, 8), dy(DType::f32, 0, 4), w = make(DType::f32, 4, 8, "w", 0);
    Matrix y(DType::f32, 0, 4), dw(DType::f32, 4, 8);
    dw.fill(3);
    const Matrix narrow(DType::f32, 2, 0), no_weights(DType::f32, 4, 0);
    Matrix zero(DType::f32, 2, 4), kept(DType::f32, 2, 4);
    zero.fill(5), kept.fill(5);
    {
      OnDevice on(device);
      linear_forward(on.exec(), on(x), on(w), on(y));
      linear_backward_weight(on.exec(), on(dy), on(x), on(dw));
      linear_forward(on.exec(), on(narrow), on(no_weights), on(kept), Accumulate::yes);
      linear_forward(on.exec(), on(narrow), on(no_weights), on(zero));
    }
    EXPECT_EQ(dw.get(3, 7), 3);
    EXPECT_EQ(kept.get(1, 3), 5);
    EXPECT_EQ(zero.get(1, 3), 0);
  }
}

TEST(Linear, NanReachesItsRowOnly) {
  for (const Device device : test_devices())
    for (const DType act : {DType::f32, DType::bf16})
      for (const int64_t rows : {2, 70}) {
        const Matrix x = make(act, rows, 40, "x", 0), w = make(act, 50, 40, "w", 0);
        x.set(rows / 2, 7, NAN);
        Matrix y(act, rows, 50);
        {
          OnDevice on(device);
          linear_forward(on.exec(), on(x), on(w), on(y));
        }
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < 50; ++c)
            ASSERT_EQ(std::isnan(y.get(r, c)), r == rows / 2) << r << ", " << c;
      }
}

TEST(Linear, SecondCallAllocatesNoScratch) {
  result_bytes({700, 300, 200}, DType::bf16);
  const int before = thread_count();
  set_thread_count(1);
  result_bytes({700, 300, 200}, DType::bf16);
  const size_t growths = thread_scratch_growths();
  result_bytes({700, 300, 200}, DType::bf16);
  EXPECT_EQ(thread_scratch_growths(), growths);
  set_thread_count(before);
}

template <class T>
void expect_transposed(int64_t rows, int64_t cols) {
  std::vector<T> from(size_t(rows * (cols + 3))), to(size_t(cols * (rows + 5)), T(77));
  for (size_t i = 0; i < from.size(); ++i) from[i] = T(i * 2654435761U >> 7);
  transpose(from.data(), cols + 3, to.data(), rows + 5, rows, cols);
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = 0; r < rows + 5; ++r) {
      const T want = r < rows ? from[size_t(r * (cols + 3) + c)] : T(77);
      ASSERT_EQ(to[size_t(c * (rows + 5) + r)], want) << rows << "x" << cols << " [" << c << ", " << r << "]";
    }
}

TEST(Transpose, AllSizes) {
  for (const int64_t rows : {1, 7, 16, 31, 32, 33, 65, 96})
    for (const int64_t cols : {1, 7, 16, 31, 32, 33, 65, 96}) {
      expect_transposed<uint16_t>(rows, cols);
      expect_transposed<uint32_t>(rows, cols);
    }
}

}  // namespace
}  // namespace sps::ops
