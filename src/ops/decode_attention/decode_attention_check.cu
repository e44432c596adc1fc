// Any shape, in plain f32 arithmetic: a block for each query and head. A thread has one key of a chunk (of
// its own size) while scores are made, and columns of the values while they are added up.
#include <cmath>

#include "ops/decode_attention/decode_attention_cuda.cuh"

namespace sps::ops::decode {

namespace {

constexpr int kThreads = 128;

template <class T>
__device__ float dot(const float* q, const T* k, int n) {
  float sum = 0;
  for (int d = 0; d < n; ++d) sum = __fmaf_rn(q[d], to_float(k[d]), sum);
  return sum;
}

// The same in every thread of the block; of numbers that are not NaN.
__device__ float block_max(float x, float* of_warps) {
  x = warp_max(x);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  float top = of_warps[0];
#pragma unroll
  for (int w = 1; w < kThreads / kWarp; ++w) top = fmaxf(top, of_warps[w]);
  return top;
}

template <class T>
__global__ void __launch_bounds__(kThreads) check_kernel(const __grid_constant__ Problem p) {
  const int run = int(blockIdx.z), key_head = int(blockIdx.y), me = int(threadIdx.x);
  const Query query(p, run, key_head, int(blockIdx.x));
  if (!query.live) return;
  __shared__ float weight[kThreads], tops[kThreads / kWarp];
  __shared__ const T* value[kThreads];
  extern __shared__ float vectors[];  // the query, the sum of the values
  float *q = vectors, *total = vectors + p.head_dim;
  for (int d = me; d < p.head_dim; d += kThreads) q[d] = to_float(query.q<T>(p)[d]), total[d] = 0;

  Softmax state;
  for (int set = 0; set < kMaxKeySets; ++set) {
    const Interval seen = query.keys(p, run, set);
    if (seen.end <= seen.begin) continue;
    const RowSource<T> keys = keys_of<T>(p, set, key_head), values = values_of<T>(p, set, key_head);
    for (int first = seen.begin / kThreads * kThreads; first < seen.end; first += kThreads) {
      __syncthreads();  // the chunk before has been added up, the query is there
      const int position = first + me;
      float score = -INFINITY;
      if (seen.has(position)) {
        const int where = locate(p, set, run, key_head, position);
        value[me] = values.row(where);
        score = __fmul_rn(dot(q, keys.row(where), p.head_dim), p.scale_log2);
      }
      const float top = block_max(fmaxf(-INFINITY, score), tops);
      weight[me] = exp2f(__fsub_rn(score, base_of(top)));
      const float sum = block_sum<kThreads>(weight[me]);  // ends with a barrier
      const Factors f = join(state, {top, sum});
      const int begin = max(seen.begin - first, 0), end = min(seen.end - first, kThreads);
      for (int d = me; d < p.head_dim; d += kThreads) {
        float fresh = 0;
#pragma unroll 4
        for (int j = begin; j < end; ++j) fresh = __fmaf_rn(weight[j], to_float(value[j][d]), fresh);
        total[d] = f.join(total[d], fresh);
      }
    }
  }
  const float share = share_of(state.sum);
  for (int d = me; d < p.head_dim; d += kThreads)
    query.o<T>(p)[d] = from_float<T>(__fmul_rn(total[d], share));
}

}  // namespace

void attend_check(const Exec& ex, const Problem& p) {
  const int64_t most = int64_t{p.longest} * p.streams * p.group;
  SPS_CHECK(p.kv_heads <= 65535 && p.runs <= 65535 && most < INT32_MAX);
  const dim3 grid(unsigned(most), unsigned(p.kv_heads), unsigned(p.runs));
  const size_t shared = 2 * size_t(p.head_dim) * sizeof(float);
  with_device_type(p.dtype, [&](auto zero) {
    check_kernel<decltype(zero)><<<grid, kThreads, shared, stream_of(ex)>>>(p);
    SPS_LAUNCHED();
  });
}

}  // namespace sps::ops::decode
