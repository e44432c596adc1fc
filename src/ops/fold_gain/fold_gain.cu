#include "ops/fold_gain/fold_gain_kernels.h"
#include "ops/rowwise.cuh"

namespace sps::ops {

namespace {

template <class Act>
struct Forward {
  Rows<const float> w;
  const float* gain;
  Rows<Act> y;

  template <int kWidth>
  struct Loaded {
    float w[kWidth], gain[kWidth];
  };
  template <int kWidth>
  __device__ void read(int64_t n, int64_t k, bool live, Loaded<kWidth>& in) const {
    load_if(live, w[n] + k, in.w);
    load_if(live, gain + k, in.gain);
  }
  template <int kWidth>
  __device__ void write(int64_t n, int64_t k, Loaded<kWidth>& in) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) in.w[j] *= in.gain[j];
    store(y[n] + k, in.w);
  }
};

struct Backward {
  Rows<const float> dy, w;
  const float* gain;
  Rows<float> dw;
  float* partials;  // [row blocks, cols] of dgain
  int64_t rows, cols;
};

// A thread stays in its columns, a block takes every gridDim.x-th set of 8 rows.
template <int kWidth>
__global__ void __launch_bounds__(256) backward_kernel(const Backward p) {
  const int64_t k = (int64_t(blockIdx.y) * 32 + threadIdx.x) * kWidth;
  float gain[kWidth], dgain[kWidth] = {};
  load_if(k < p.cols, p.gain + k, gain);
  for (int64_t n = int64_t(blockIdx.x) * 8 + threadIdx.y; n < p.rows && k < p.cols;
       n += int64_t(gridDim.x) * 8) {
    float dy[kWidth], w[kWidth], dw[kWidth];
    load(p.dy[n] + k, dy);
    load(p.w[n] + k, w);
    load(p.dw[n] + k, dw);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      dw[j] += dy[j] * gain[j];
      dgain[j] += dy[j] * w[j];
    }
    store(p.dw[n] + k, dw);
  }
  __shared__ alignas(16) float sums[8][32 * kWidth];
  store(&sums[threadIdx.y][threadIdx.x * kWidth], dgain);
  __syncthreads();
  const int64_t first = int64_t(blockIdx.y) * 32 * kWidth;
  for (int c = int(threadIdx.y * 32 + threadIdx.x); c < 32 * kWidth && first + c < p.cols; c += 256) {
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += sums[i][c];
    p.partials[blockIdx.x * p.cols + first + c] = sum;
  }
}

}  // namespace

void fold_gain_forward_cuda(const Exec& ex, Tensor w, Tensor gain, Tensor y) {
  with_device_type(y.dtype, [&](auto zero) {
    using Act = decltype(zero);
    elementwise(ex, Forward<Act>{rows_of<const float>(w), gain.as<float>(), rows_of<Act>(y)}, w.rows, w.cols,
                in_pieces({w, gain, y}));
  });
}

void fold_gain_backward_cuda(const Exec& ex, Tensor dy, Tensor w, Tensor gain, Tensor dw, Tensor dgain) {
  if (w.empty()) return;
  const bool pieces = in_pieces({dy, w, gain, dw});
  const int64_t blocks = summing_blocks(w.rows, 32, 1), across = 32 * (pieces ? kPiece : 1);
  auto* partials = reinterpret_cast<float*>(
      device_scratch(ex, DeviceSlot::partial, size_t(blocks * w.cols) * sizeof(float)));
  const Backward p{rows_of<const float>(dy),
                   rows_of<const float>(w),
                   gain.as<float>(),
                   rows_of<float>(dw),
                   partials,
                   w.rows,
                   w.cols};
  const dim3 grid(unsigned(blocks), unsigned((w.cols + across - 1) / across)), block(32, 8);
  if (pieces)
    backward_kernel<kPiece><<<grid, block, 0, stream_of(ex)>>>(p);
  else
    backward_kernel<1><<<grid, block, 0, stream_of(ex)>>>(p);
  SPS_LAUNCHED();
  add_partials(ex, partials, blocks, w.cols, dgain.as<float>());
}

}  // namespace sps::ops
