// What the kernel of sample.h looks at: rows of logits, and sums over a block of threads.
#pragma once

#include "ops/launch.cuh"
#include "ops/ptx.cuh"
#include "ops/sample/sample_kernels.h"

namespace sps::ops::draws {

// Two blocks have room on a multiprocessor, or one beside the end of the product before.
constexpr int kThreads = 512, kWarps = kThreads / kWarp;
// Fixed: the order in which the softmax is summed follows from it. (racecheck takes hours over eight.)
#ifdef SPS_RACECHECK
constexpr unsigned kCluster = 2;
#else
constexpr unsigned kCluster = 8;
#endif

// Whole numbers in the order of floats; none is 0. -0 is 0.
__device__ __forceinline__ uint32_t order_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
__device__ __forceinline__ float float_of(uint32_t order) {
  return __uint_as_float((order & 0x80000000U) != 0 ? order & 0x7FFFFFFFU : ~order);
}

template <class T, class Combine>
__device__ __forceinline__ T over_warp(T x, Combine&& combine) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(0xFFFFFFFFU, x, step));
  return x;
}
// The same in every thread: over the lanes of each warp, then over the warps, in a fixed order.
// over_lanes(x) combines one of every lane; T{} adds nothing.
template <class T, class OverLanes>
__device__ __forceinline__ T over_block(T x, OverLanes&& over_lanes) {
  static_assert(kWarps <= kWarp);  // a lane for each
  __shared__ T parts[kWarps];
  x = over_lanes(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  const int lane = int(threadIdx.x) % kWarp;
  return over_lanes(lane < kWarps ? parts[lane] : T{});
}
template <class T>
__device__ __forceinline__ T warp_total(T x) {
  return over_warp(x, [](T a, T b) { return a + b; });
}
template <class T>
__device__ __forceinline__ T block_total(T x) {
  return over_block(x, [](T own) { return warp_total(own); });
}

struct Logit {
  float raw, value;  // as the model gave it; after the penalty
  bool allowed;
};

// The row that a block works on.
struct Row {
  const float* logits;
  const int32_t *forbidden, *seen;
  float penalty;
  int vocab;

  static __device__ bool holds(const int32_t* set, int id) {
    return (uint32_t(set[id / 32]) >> (id % 32) & 1U) != 0;
  }
  __device__ Logit at(int id) const { return of(id, __ldcg(logits + id), holds(forbidden, id)); }
  __device__ Logit of(int id, float raw, bool is_forbidden) const {
    Logit l{raw, raw, !is_forbidden};
    if (penalty != 1 && seen != nullptr && holds(seen, id))
      l.value = l.raw > 0 ? l.raw / penalty : l.raw * penalty;
    return l;
  }
};

// What a block finds in its part of the row, as words that other blocks can read.
struct Summary {
  uint64_t best;          // order of the largest allowed value, and the lowest id that has it; 0: none
  uint32_t raw_largest;   // order of the largest logit; 0: none is a number
  uint32_t count;         // of candidates
  uint32_t not_a_number;  // complement of the lowest allowed id whose logit is NaN; 0: none
  uint32_t raw_nan;       // 1: some logit is NaN
  double sum;             // of exp(logit - the largest of the part)
};
constexpr int kSummaryWords = sizeof(Summary) / 4;
static_assert(sizeof(Summary) == 32);

// Differences first: a tiny temperature then gives 0 or 1, and so does an infinite logit; never inf - inf.
__device__ __forceinline__ double exp_apart(float logit, float largest, double temperature = 1) {
  return logit == largest ? 1.0 : exp((double(logit) - double(largest)) / temperature);
}

// One of every lane, without the sum.
__device__ __forceinline__ Summary summary_of_lanes(const Summary& own) {
  constexpr unsigned kAll = 0xFFFFFFFF;
  Summary s{};
  const auto value = uint32_t(own.best >> 32), id = uint32_t(own.best);
  const uint32_t most = __reduce_max_sync(kAll, value);
  s.best = uint64_t{most} << 32 | __reduce_max_sync(kAll, value == most ? id : 0);
  s.raw_largest = __reduce_max_sync(kAll, own.raw_largest);
  s.count = __reduce_add_sync(kAll, own.count);
  s.not_a_number = __reduce_max_sync(kAll, own.not_a_number);
  s.raw_nan = __reduce_max_sync(kAll, own.raw_nan);
  return s;
}

// f(id, logit) for a thread's ids. So many are read before the first is looked at.
template <int kAtOnce, class F>
__device__ __forceinline__ void visit_ids(const Row& row, int begin, int end, F&& f) {
#pragma unroll 1
  for (int first = begin + int(threadIdx.x); first < end; first += kAtOnce * kThreads) {
    float raw[kAtOnce];
    bool is_forbidden[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = first + i * kThreads;
      raw[i] = id < end ? __ldcg(row.logits + id) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = first + i * kThreads;
      is_forbidden[i] = id < end && Row::holds(row.forbidden, id);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int id = first + i * kThreads;
      if (id < end) f(id, row.of(id, raw[i], is_forbidden[i]));
    }
  }
}

}  // namespace sps::ops::draws
