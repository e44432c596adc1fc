// Squares in double: half the rate of f32 on a data-centre GPU, still far above what memory delivers.
#include <algorithm>
#include <vector>

#include "ops/clip/clip_kernels.h"
#include "ops/cuda.cuh"

namespace sps::ops {

namespace {

constexpr int kThreads = 256, kWidth = 4, kAtOnce = 4;
constexpr int64_t kBlockNumbers = 1 << 14;

// As on the CPU, a block is a piece of a row, or several rows where they are short.
struct Matrix {
  const float* x;
  int64_t rows, cols, stride;
  int64_t first_block, per_row, rows_at_once;
  bool wide;
};

// What one launch has room for: its arguments go up to 4 KB.
struct Matrices {
  static constexpr int kMost = 60;
  Matrix at[kMost];
  int count = 0;
};
static_assert(sizeof(Matrices) <= 4000);

// The same in every thread.
__device__ double block_sum(double v) {
  __shared__ double parts[kThreads / kWarp];
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFU, v, step);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = v;
  __syncthreads();
  v = 0;
  for (const double part : parts) v += part;
  return v;
}

__device__ double square_sum(const float* x, int64_t n, bool wide) {
  double sums[kWidth] = {};
  int64_t i = int64_t(threadIdx.x) * kWidth;
  if (wide) {
    constexpr int64_t kStep = int64_t{kThreads} * kWidth;
    for (; i + (kAtOnce - 1) * kStep + kWidth <= n; i += kAtOnce * kStep) {
      float v[kAtOnce][kWidth];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) load(x + i + k * kStep, v[k]);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j] += double(v[k][j]) * double(v[k][j]);
    }
    for (; i + kWidth <= n; i += kStep) {
      float v[kWidth];
      load(x + i, v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sums[j] += double(v[j]) * double(v[j]);
    }
    for (; i < n; ++i) sums[0] += double(x[i]) * double(x[i]);  // less than kWidth, one thread's
  } else {
    for (i = threadIdx.x; i < n; i += kThreads) sums[0] += double(x[i]) * double(x[i]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__global__ void __launch_bounds__(kThreads)
    square_kernel(const __grid_constant__ Matrices matrices, double* partials) {
  int which = 0;
  while (which + 1 < matrices.count && matrices.at[which + 1].first_block <= blockIdx.x) ++which;
  const Matrix& m = matrices.at[which];
  const int64_t block = blockIdx.x - m.first_block;
  const int64_t first = block / m.per_row * m.rows_at_once, from = block % m.per_row * kBlockNumbers;
  const int64_t end = first + m.rows_at_once < m.rows ? first + m.rows_at_once : m.rows;
  const int64_t n = m.cols - from < kBlockNumbers ? m.cols - from : kBlockNumbers;
  double sum = 0;
  for (int64_t r = first; r < end; ++r) sum += square_sum(m.x + r * m.stride + from, n, m.wide);
  sum = block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// A block for each matrix adds what its blocks have found.
__global__ void __launch_bounds__(kThreads)
    total_kernel(const __grid_constant__ Matrices matrices, int64_t blocks, const double* partials,
                 double* totals) {
  const int which = int(blockIdx.x);
  const int64_t end = which + 1 < matrices.count ? matrices.at[which + 1].first_block : blocks;
  double sum = 0;
  for (int64_t i = matrices.at[which].first_block + threadIdx.x; i < end; i += kThreads) sum += partials[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) totals[which] = sum;
}

// Nobody minds who writes the one.
__global__ void __launch_bounds__(kThreads) flag_kernel(const float* x, int64_t count, float* flag) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count && !isfinite(x[i])) *flag = 1;
}

// One thread adds, in the order and with the roundings of a host that is given the sums.
__global__ void __launch_bounds__(kThreads)
    factor_kernel(const double* sums, int64_t count, const float* flag, double limit, float* factor) {
  __shared__ double some[kThreads];
  double squares = 0;
  for (int64_t first = 0; first < count; first += kThreads) {
    const int64_t n = count - first < kThreads ? count - first : kThreads;
    if (threadIdx.x < n) some[threadIdx.x] = sums[first + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0)
      for (int64_t i = 0; i < n; ++i) squares += some[i];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const double norm = sqrt(squares);
  const bool skip = !isfinite(norm) || *flag != 0;
  *factor = skip ? -1.0F : limit > 0 && norm > limit ? float(limit / norm) : 1.0F;
}

struct Batch {
  Matrices matrices{};
  int64_t blocks = 0;

  void add(Tensor x) {
    if (x.dense()) x = x.reshaped(1, x.count());
    Matrix& m = matrices.at[matrices.count++];
    m = {x.as<float>(), x.rows, x.cols, x.stride, blocks, 1, 1, rows_aligned(16, x.cols_from(0, 0))};
    if (x.empty()) return;  // no blocks: a sum of zero
    m.per_row = ceil_div(x.cols, kBlockNumbers);
    m.rows_at_once = std::max<int64_t>(1, kBlockNumbers / x.cols);
    blocks += ceil_div(x.rows, m.rows_at_once) * m.per_row;
  }
};

}  // namespace

void sums_of_squares_cuda(const Exec& ex, std::span<const Tensor> xs, Tensor sums) {
  if (xs.empty()) return;
  std::vector<Batch> batches(1);
  int64_t most = 0;
  for (const Tensor& x : xs) {
    if (batches.back().matrices.count == Matrices::kMost) batches.emplace_back();
    batches.back().add(x);
    most = std::max(most, batches.back().blocks);
  }
  auto* totals = sums.as<double>();
  auto* partials =
      reinterpret_cast<double*>(device_scratch(ex, DeviceSlot::partial, size_t(most) * sizeof(double)));
  int64_t done = 0;
  for (const Batch& batch : batches) {
    if (batch.blocks > 0) {
      square_kernel<<<unsigned(batch.blocks), kThreads, 0, stream_of(ex)>>>(batch.matrices, partials);
      SPS_LAUNCHED();
    }
    total_kernel<<<unsigned(batch.matrices.count), kThreads, 0, stream_of(ex)>>>(batch.matrices, batch.blocks,
                                                                                 partials, totals + done);
    SPS_LAUNCHED();
    done += batch.matrices.count;
  }
}

void flag_not_finite_cuda(const Exec& ex, Tensor x, Tensor flag) {
  flag_kernel<<<unsigned(ceil_div(x.count(), kThreads)), kThreads, 0, stream_of(ex)>>>(
      x.as<float>(), x.count(), flag.as<float>());
  SPS_LAUNCHED();
}

void clip_factor_cuda(const Exec& ex, Tensor sums, Tensor flag, double limit, Tensor factor) {
  factor_kernel<<<1, kThreads, 0, stream_of(ex)>>>(sums.as<double>(), sums.count(), flag.as<float>(), limit,
                                                   factor.as<float>());
  SPS_LAUNCHED();
}

}  // namespace sps::ops
