// What the CUDA kernels share: 16-byte vectors of numbers in any dtype, sums over warps and blocks, and how
// rows are handed to blocks.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "base/bf16.h"
#include "tensor/cuda.h"

namespace sps::ops {

constexpr int kWarp = 32;

// bf16 as the device's conversion instructions see it. Rounds to nearest even, NaN stays NaN.
__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(bf16 x) {
  return __uint_as_float(uint32_t{x.bits} << 16);
}
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  bf16 y;
  y.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
  return y;
}

// N consecutive numbers, moved in accesses of up to 16 bytes. The address is aligned to the whole if N
// numbers are 16 bytes or fewer, else to 16.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
  T at[N];
};

// Reads N numbers as floats; zeros, without looking at p, if not `live`. bf16 stays in pairs until it is
// converted: half the registers for what is in flight.
template <int N, class T>
__device__ inline void load_if(bool live, const T* p, float (&x)[N]) {
  if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
    Pack<uint32_t, N / 2> pairs{};
    if (live) pairs = *reinterpret_cast<const Pack<uint32_t, N / 2>*>(p);
#pragma unroll
    for (int i = 0; i < N; ++i)
      x[i] = __uint_as_float(i % 2 == 0 ? pairs.at[i / 2] << 16 : pairs.at[i / 2] & 0xFFFF0000U);
  } else {
    Pack<T, N> pack{};
    if (live) pack = *reinterpret_cast<const Pack<T, N>*>(p);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = to_float(pack.at[i]);
  }
}
template <int N, class T>
__device__ inline void load(const T* p, float (&x)[N]) {
  load_if(true, p, x);
}
// 16 bytes in one access, to global or shared memory. Said in PTX because the compiler takes the store of a
// struct apart and does not always put it together again.
__device__ inline void store_16_bytes(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
template <int N, class T>
__device__ inline void store(T* p, const float (&x)[N]) {
  if constexpr (std::is_same_v<T, float> && N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
      store_16_bytes(p + i, __float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                     __float_as_uint(x[i + 3]));
  } else if constexpr (std::is_same_v<T, bf16> && N % 8 == 0) {
    const auto pair = [&](int i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(x[i], x[i + 1]);
      return uint32_t{__bfloat16_as_ushort(two.y)} << 16 | __bfloat16_as_ushort(two.x);
    };
#pragma unroll
    for (int i = 0; i < N; i += 8) store_16_bytes(p + i, pair(i), pair(i + 2), pair(i + 4), pair(i + 6));
  } else {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = from_float<T>(x[i]);
    *reinterpret_cast<Pack<T, N>*>(p) = pack;
  }
}

// The same sum in every lane; the order of additions is fixed.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFU, x, step);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, step));
  return x;
}

// Over a block of Threads; the same in every thread. Ends with a barrier, so it can be called again at once.
template <int Threads>
__device__ inline float block_sum(float x) {
  static_assert(Threads % kWarp == 0 && Threads <= 1024);
  constexpr int kWarps = Threads / kWarp;
  __shared__ float parts[kWarps];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += parts[i];
  __syncthreads();
  return sum;
}

// Whether every row of these tensors can be moved `bytes` at a time (cols must be whole in that unit too).
template <class... Tensors>
bool rows_aligned(size_t bytes, const Tensors&... tensors) {
  const auto aligned = [&](const Tensor& t) {
    const size_t size = dtype_size(t.dtype);
    return reinterpret_cast<uintptr_t>(t.data) % bytes == 0 &&
           (t.rows <= 1 || size_t(t.stride) * size % bytes == 0) && size_t(t.cols) * size % bytes == 0;
  };
  return (aligned(tensors) && ...);
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Blocks for `work` pieces that a loop with stride gridDim.x walks over: all at once, or as many as keep the
// GPU full. Depends on the GPU only in how the work is shared out: kernels whose sums depend on it must not
// use it.
inline unsigned grid_for(int64_t work, int per_multiprocessor) {
  const int64_t most = int64_t(gpu_info().multiprocessors) * per_multiprocessor;
  return unsigned(work < 1 ? 1 : work < most ? work : most);
}

// Calls f with a zero of the C++ type behind f32 or bf16.
template <class F>
void with_device_type(DType dtype, F&& f) {
  SPS_CHECK(dtype == DType::f32 || dtype == DType::bf16);
  if (dtype == DType::f32)
    f(float{});
  else
    f(bf16{});
}

}  // namespace sps::ops
