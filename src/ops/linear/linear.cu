// Products on the GPU: cuBLASLt's, but for one to four rows, where each weight is read once and one warp a
// column keeps the memory busy, and for what cuBLASLt has no algorithm for.
#include <algorithm>

#include "ops/cuda.cuh"
#include "ops/linear/cublas.h"
#include "ops/linear/linear_kernels.h"

namespace sps::ops {

namespace {

// ---- c [rows, n] (+)= a [rows, k] b^T, b [n, k], of few rows

constexpr int kFewRows = 4;
constexpr int kWarps = 8;  // of a block

template <class T, class Out, int kRows>
__global__ void __launch_bounds__(kWarp* kWarps)
    few_rows(const T* a, int64_t a_stride, const T* b, int64_t b_stride, Out* c, int64_t c_stride, int rows,
             int64_t n, int64_t k, bool accumulate) {
  constexpr int kVector = 16 / sizeof(T);
  const int lane = int(threadIdx.x) % kWarp;
  const int64_t col = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / kWarp;
  if (col >= n) return;
  float sums[kRows] = {};
  const T* b_row = b + col * b_stride;
  for (int64_t i = int64_t(lane) * kVector; i < k; i += kWarp * kVector) {
    float w[kVector];
    load(b_row + i, w);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float x[kVector];
      load(a + min(r, rows - 1) * a_stride + i, x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sums[r] = fmaf(x[j], w[j], sums[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = warp_sum(sums[r]);
    if (lane == 0 && r < rows) {
      Out& to = c[r * c_stride + col];
      to = from_float<Out>(accumulate ? to_float(to) + sum : sum);
    }
  }
}

// ---- c [m, n] (+)= a b of any shape and alignment

constexpr int kSide = 64;   // of a block's tile of c
constexpr int kDepth = 16;  // of k at a time
constexpr int kThreads = 256;
constexpr int kOwn = 4;  // a thread's share of the tile is kOwn x kOwn

// Element k of line i, a row of op(a) or a column of op(b).
template <class T>
struct Lines {
  const T* data;
  int64_t count, line_step, k_step;
  __device__ float at(int64_t line, int64_t k) const { return to_float(data[line * line_step + k * k_step]); }
};

// to[d][i] = element k + d of line first + i; zeros outside. Neighbouring threads take neighbouring elements.
template <class T>
__device__ void load_lines(const Lines<T>& from, int64_t first, int64_t k_begin, int64_t k_end,
                           float (*to)[kSide + 1]) {
  for (int e = int(threadIdx.x); e < kSide * kDepth; e += kThreads) {
    const int i = from.k_step == 1 ? e / kDepth : e % kSide, d = from.k_step == 1 ? e % kDepth : e / kSide;
    const int64_t line = first + i, k = k_begin + d;
    to[d][i] = line < from.count && k < k_end ? from.at(line, k) : 0.0F;
  }
}

template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    any_product(Lines<T> a, Lines<T> b, Out* c, int64_t c_stride, int64_t k, bool accumulate) {
  __shared__ float a_part[kDepth][kSide + 1], b_part[kDepth][kSide + 1];
  const int64_t first_row = int64_t(blockIdx.x) * kSide, first_col = int64_t(blockIdx.y) * kSide;
  // Columns of a thread are 16 apart: neighbouring threads write neighbouring columns.
  const int row = int(threadIdx.x) / 16, col = int(threadIdx.x) % 16;
  float sums[kOwn][kOwn] = {};
  for (int64_t begin = 0; begin < k; begin += kDepth) {
    load_lines(a, first_row, begin, k, a_part);
    load_lines(b, first_col, begin, k, b_part);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int j = 0; j < kOwn; ++j)
          sums[i][j] = fmaf(a_part[d][row + 16 * i], b_part[d][col + 16 * j], sums[i][j]);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int64_t r = first_row + row + 16 * i, o = first_col + col + 16 * j;
      if (r >= a.count || o >= b.count) continue;
      Out& to = c[r * c_stride + o];
      to = from_float<Out>(accumulate ? to_float(to) + sums[i][j] : sums[i][j]);
    }
}

template <class T, class Out>
void any_product_of(const Exec& ex, Tensor a, bool a_transposed, Tensor b, bool b_transposed, Tensor c,
                    bool accumulate) {
  const auto lines = [](const Tensor& t, bool by_row) {
    return by_row ? Lines<T>{t.as<T>(), t.rows, t.stride, 1} : Lines<T>{t.as<T>(), t.cols, 1, t.stride};
  };
  const auto tiles = [](int64_t n) { return unsigned(ceil_div(n, kSide)); };
  any_product<<<dim3(tiles(c.rows), tiles(c.cols)), kThreads, 0, stream_of(ex)>>>(
      lines(a, !a_transposed), lines(b, b_transposed), c.as<Out>(), c.stride, a_transposed ? a.rows : a.cols,
      accumulate);
  SPS_LAUNCHED();
}

template <class T, class Out>
void few_rows_of(const Exec& ex, Tensor a, Tensor b, Tensor c, bool accumulate) {
  const auto run = [&](auto kernel) {
    kernel<<<unsigned(ceil_div(c.cols, kWarps)), kWarp * kWarps, 0, stream_of(ex)>>>(
        a.as<T>(), a.stride, b.as<T>(), b.stride, c.as<Out>(), c.stride, int(c.rows), c.cols, a.cols,
        accumulate);
    SPS_LAUNCHED();
  };
  if (c.rows == 1) return run(few_rows<T, Out, 1>);
  if (c.rows == 2) return run(few_rows<T, Out, 2>);
  run(few_rows<T, Out, kFewRows>);
}

// Calls f with zeros of the C++ types behind the operands' and the result's dtype.
template <class F>
void with_types(DType act, DType out, F&& f) {
  SPS_CHECK(act == DType::bf16 || (act == DType::f32 && out == DType::f32));
  if (act == DType::f32) return f(float{}, float{});
  out == DType::bf16 ? f(bf16{}, bf16{}) : f(bf16{}, float{});
}

}  // namespace

void any_product_cuda(const Exec& ex, Tensor a, Transposed a_transposed, Tensor b, Transposed b_transposed,
                      Tensor c, Accumulate acc) {
  with_types(a.dtype, c.dtype, [&]<class T, class Out>(T, Out) {
    any_product_of<T, Out>(ex, a, a_transposed == Transposed::yes, b, b_transposed == Transposed::yes, c,
                           acc == Accumulate::yes);
  });
}

void product_cuda(const Exec& ex, Tensor a, Transposed a_transposed, Tensor b, Transposed b_transposed,
                  Tensor c, Accumulate acc) {
  if (c.empty()) return;
  const bool a_t = a_transposed == Transposed::yes, b_t = b_transposed == Transposed::yes;
  const int64_t k = a_t ? a.rows : a.cols;
  if (k == 0 && acc == Accumulate::yes) return;
  if (k > 0 && !a_t && b_t && c.rows <= kFewRows && rows_aligned(16, a, b))
    return with_types(a.dtype, c.dtype, [&]<class T, class Out>(T, Out) {
      few_rows_of<T, Out>(ex, a, b, c, acc == Accumulate::yes);
    });
  if (k > 0 && run_cublas(ex, cublas_call(a, a_transposed, b, b_transposed, c, acc))) return;
  any_product_cuda(ex, a, a_transposed, b, b_transposed, c, acc);
}

}  // namespace sps::ops
