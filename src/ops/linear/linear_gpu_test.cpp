// What only the code for GPUs has: the mapping to cuBLASLt's column-major matrices, which runs here on the
// CPU, and the choice of algorithms.
#include "ops/check.h"
#include "ops/linear/cublas.h"
#include "ops/linear/linear.h"

namespace sps::ops {
namespace {

Matrix make(DType type, int64_t rows, int64_t cols, const char* name, int64_t pad = 0) {
  Matrix m(type, rows, cols, cols + pad);
  m.randomise(12, name);
  return m;
}

// The product as cuBLASLt's documentation defines it.
void column_major_product(const CublasCall& call) {
  const CublasShape& s = call.shape;
  const auto* first = static_cast<const float*>(call.first);
  const auto* second = static_cast<const float*>(call.second);
  auto* result = static_cast<float*>(call.result);
  for (int64_t i = 0; i < s.m; ++i)
    for (int64_t j = 0; j < s.n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < s.k; ++l)
        sum += double(first[s.first_transposed ? l + i * s.first_ld : i + l * s.first_ld]) *
               double(second[s.second_transposed ? j + l * s.second_ld : l + j * s.second_ld]);
      float& to = result[i + j * s.result_ld];
      to = float(s.accumulate ? to + sum : sum);
    }
}

void expect_cublas_call(Tensor a, Transposed at, Tensor b, Transposed bt, Tensor c, Accumulate acc) {
  const CublasCall call = cublas_call(a, at, b, bt, c, acc);
  const CublasShape& s = call.shape;
  // What cuBLASLt demands of leading dimensions.
  EXPECT_GE(s.first_ld, s.first_transposed ? s.k : s.m);
  EXPECT_GE(s.second_ld, s.second_transposed ? s.n : s.k);
  EXPECT_GE(s.result_ld, s.m);
  column_major_product(call);
}

TEST(CublasCall, MeansTheProductsOfALinearLayer) {
  struct Case {
    int64_t rows, in, out;
  };
  for (const Case& s : {Case{3, 5, 7}, {1, 6, 4}, {5, 1, 3}, {4, 3, 1}, {17, 9, 12}})
    for (const int64_t pad : {0, 2})
      for (const Accumulate acc : {Accumulate::no, Accumulate::yes}) {
        SCOPED_TRACE(fmt::format("rows {} in {} out {} pad {}", s.rows, s.in, s.out, pad));
        const Matrix x = make(DType::f32, s.rows, s.in, "x", pad),
                     w = make(DType::f32, s.out, s.in, "w", pad);
        const Matrix dy = make(DType::f32, s.rows, s.out, "dy", pad);
        const Matrix y = make(DType::f32, s.rows, s.out, "y", pad),
                     dx = make(DType::f32, s.rows, s.in, "dx", pad);
        const Matrix dw = make(DType::f32, s.out, s.in, "dw", pad);
        const Matrix x64 = x.to(DType::f64), w64 = w.to(DType::f64), dy64 = dy.to(DType::f64);
        const Matrix y64 = y.to(DType::f64), dx64 = dx.to(DType::f64), dw64 = dw.to(DType::f64);
        linear_forward({}, x64, w64, y64, acc);
        linear_backward_input({}, dy64, w64, dx64, acc);
        linear_backward_weight({}, dy64, x64, dw64);
        expect_cublas_call(x, Transposed::no, w, Transposed::yes, y, acc);
        expect_cublas_call(dy, Transposed::no, w, Transposed::no, dx, acc);
        expect_cublas_call(dy, Transposed::yes, x, Transposed::no, dw, Accumulate::yes);
        SPS_EXPECT_CLOSE(y, y64, tolerance(DType::f32));
        SPS_EXPECT_CLOSE(dx, dx64, tolerance(DType::f32));
        SPS_EXPECT_CLOSE(dw, dw64, tolerance(DType::f32));
      }
}

TEST(CublasCall, OneRowNeedsNoStride) {
  const Matrix x = make(DType::f32, 1, 5, "x"), w = make(DType::f32, 3, 5, "w");
  Matrix y(DType::f32, 1, 3);
  Tensor row = x;
  row.stride = 0;
  EXPECT_EQ(cublas_call(row, Transposed::no, w, Transposed::yes, y, Accumulate::no).shape.second_ld, 5);
}

TEST(CublasCall, KnowsAlignmentUpToTheWidestAccess) {
  alignas(64) float memory[64] = {};
  const auto alignment = [&](int64_t offset) {
    const Tensor t = view(memory + offset, 2, 2);
    return cublas_call(t, Transposed::no, t, Transposed::yes, t, Accumulate::no).shape;
  };
  for (const auto& [offset, bytes] : {std::pair{0, 16}, {1, 4}, {2, 8}, {3, 4}, {4, 16}, {8, 16}}) {
    EXPECT_EQ(alignment(offset).first_alignment, bytes) << offset;
    EXPECT_EQ(alignment(offset).second_alignment, bytes) << offset;
    EXPECT_EQ(alignment(offset).result_alignment, bytes) << offset;
  }
}

class LinearOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

#ifdef SPS_HAS_CUDA

TEST_F(LinearOnGpu, ProductsWithoutCublas) {
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 1, 1}, {3, 70, 5}, {65, 64, 17}, {130, 7, 200}})
    for (const int64_t pad : {0, 3})
      for (const auto at : {Transposed::no, Transposed::yes})
        for (const auto bt : {Transposed::no, Transposed::yes})
          for (const auto acc : {Accumulate::no, Accumulate::yes})
            for (const auto& [act, out] :
                 {std::pair{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}}) {
              SCOPED_TRACE(fmt::format("{}x{}x{} pad {} {}{} {} {}->{}", m, n, k, pad, int(at), int(bt),
                                       int(acc), dtype_name(act), dtype_name(out)));
              const Matrix a = at == Transposed::yes ? make(act, k, m, "a", pad) : make(act, m, k, "a", pad);
              const Matrix b = bt == Transposed::yes ? make(act, n, k, "b", pad) : make(act, k, n, "b", pad);
              const Matrix c = make(out, m, n, "c", pad), want = c.to(DType::f64);
              for (int64_t i = 0; i < m; ++i)
                for (int64_t j = 0; j < n; ++j) {
                  double sum = acc == Accumulate::yes ? want.get(i, j) : 0;
                  for (int64_t l = 0; l < k; ++l)
                    sum += (at == Transposed::yes ? a.get(l, i) : a.get(i, l)) *
                           (bt == Transposed::yes ? b.get(j, l) : b.get(l, j));
                  want.set(i, j, sum);
                }
              {
                OnDevice on(Device::cuda);
                any_product_cuda(on.exec(), on(a), at, on(b), bt, on(c), acc);
              }
              SPS_EXPECT_CLOSE(c, want, tolerance(out));
            }
}

// Sizes at which sums are cut into parts that several blocks work on.
std::string products_on_gpu(int64_t rows, int64_t in, int64_t out, DType act) {
  const Matrix x = make(act, rows, in, "x"), w = make(act, out, in, "w"), dy = make(act, rows, out, "dy");
  const Matrix y = make(act, rows, out, "y"), dx = make(act, rows, in, "dx");
  const Matrix dw = make(DType::f32, out, in, "dw");
  {
    OnDevice on(Device::cuda);
    linear_forward(on.exec(), on(x), on(w), on(y));
    linear_backward_input(on.exec(), on(dy), on(w), on(dx), Accumulate::yes);
    linear_backward_weight(on.exec(), on(dy), on(x), on(dw));
  }
  return bits(y) + bits(dx) + bits(dw);
}

TEST_F(LinearOnGpu, SameBitsInEveryCall) {
  for (const DType act : {DType::f32, DType::bf16})
    for (const auto& [rows, in, out] :
         {std::array<int64_t, 3>{1, 256, 512}, {8192, 128, 128}, {8192, 384, 100}, {2048, 768, 2304}}) {
      SCOPED_TRACE(fmt::format("rows {} in {} out {} {}", rows, in, out, dtype_name(act)));
      const std::string once = products_on_gpu(rows, in, out, act);
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(once == products_on_gpu(rows, in, out, act));
    }
}

TEST_F(LinearOnGpu, TuningDisturbsNoResultAndHoldsForTheProcess) {
  const size_t before = cublas_plans().size();
  tune_cublas(true);
  const std::string tuned = products_on_gpu(4096, 264, 520, DType::bf16);
  tune_cublas(false);
  EXPECT_EQ(cublas_plans().size(), before + 3);
  EXPECT_TRUE(tuned == products_on_gpu(4096, 264, 520, DType::bf16));
  EXPECT_EQ(cublas_plans().size(), before + 3);
}

TEST_F(LinearOnGpu, SecondCallAllocatesNoScratch) {
  products_on_gpu(700, 296, 200, DType::bf16);
  const size_t growths = device_scratch_growths();
  products_on_gpu(700, 296, 200, DType::bf16);
  EXPECT_EQ(device_scratch_growths(), growths);
}

#endif

}  // namespace
}  // namespace sps::ops
