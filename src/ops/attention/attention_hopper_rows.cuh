// Rows of results computed one pair at a time, from what is visible alone.
//
// The tiles multiply what a row does not see by a probability of exactly 0, which is nothing unless it is NaN
// or infinite. A result that comes out so is therefore computed again here: one that sees such a value is NaN
// again, the others get their numbers. Slow, and not run while numbers are finite.
#pragma once

#include <cuda_bf16.h>

#include "ops/attention/attention_cuda.cuh"
#include "ops/attention/attention_hopper_tiles.cuh"
#include "ops/cuda.cuh"

namespace sps::ops::attention {

// A head's part of a row, spread over a warp: value n of a lane is column lane + 32 n.
template <int kHeadDim>
struct WarpRow {
  static constexpr int kCount = kHeadDim / 32;
  float x[kCount] = {};

  __device__ __forceinline__ void read(const DeviceRows& rows, int64_t row, int head) {
    const auto* from = static_cast<const __nv_bfloat16*>(rows.data) + row * rows.stride + head * kHeadDim;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      x[n] = __bfloat162float(from[hopper::in_place(int(threadIdx.x) % 32) + 32 * n]);
  }
  __device__ __forceinline__ void write(const DeviceRows& rows, int64_t row, int head,
                                        bool accumulate) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int64_t at =
          row * rows.stride + head * kHeadDim + hopper::in_place(int(threadIdx.x) % 32) + 32 * n;
      if (rows.dtype == DType::bf16)
        static_cast<__nv_bfloat16*>(rows.data)[at] = __float2bfloat16_rn(x[n]);
      else
        static_cast<float*>(rows.data)[at] = accumulate ? static_cast<float*>(rows.data)[at] + x[n] : x[n];
    }
  }
  __device__ __forceinline__ float dot(const WarpRow& other) const {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) sum += x[n] * other.x[n];
    return warp_sum(sum);
  }
  __device__ __forceinline__ void add(float weight, const WarpRow& other) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] += weight * other.x[n];
  }
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] *= factor;
  }
};

// o and lse of query i, by one warp. The keys go in the tiles that the row's tile of queries walks through,
// and weights are rounded as they are there, so that a row is what it would be if the tile were finite.
template <int kHeadDim>
__device__ __forceinline__ void row_of_o(const Problem& p, int stream, int sequence, int head, int i,
                                         TileWalk walk) {
  const DeviceQueries& queries = p.queries[stream];
  const int64_t first = int64_t(sequence) * p.length;
  const int lane = hopper::in_place(int(threadIdx.x) % 32);
  WarpRow<kHeadDim> q, k, v, o;
  q.read(queries.q, first + i, head);
  float top = -INFINITY, sum = 0;
  const auto block = [&](int set, Interval keys, int from) {
    float scores[4] = {}, most = top;  // score n of a lane: key from + 32 n + lane
    for (int j = keys.begin; j < keys.end; ++j) {
      k.read(p.keys[set].k, first + j, head / p.group);
      const float score = q.dot(k);
      most = fmaxf(most, score);
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if (j - from == 32 * n + lane) scores[n] = score;
    }
    const float base = most == -INFINITY ? 0 : most, keep = hopper::exp2_fast((top - base) * p.scale_log2);
    top = most;
    sum *= keep;
    o.scale(keep);
    for (int j = keys.begin; j < keys.end; ++j) {
      float score = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n)
        if ((j - from) / 32 == n) score = __shfl_sync(0xFFFFFFFF, scores[n], (j - from) % 32);
      const float weight = hopper::exp2_fast(score * p.scale_log2 - base * p.scale_log2);
      v.read(p.keys[set].v, first + j, head / p.group);
      sum += weight;
      o.add(__bfloat162float(__float2bfloat16_rn(weight)), v);
    }
  };
  for (; walk.more(); walk.next()) {
    const Interval keys = visible_keys(queries.band[walk.set()], i, p.document_start[first + i]);
    const Interval own{max(keys.begin, walk.key()), min(keys.end, walk.key() + kTileKeys)};
    if (own.begin < own.end) block(walk.set(), own, walk.key());
  }
  o.scale(sum == 0 ? 0 : 1 / sum);
  o.write(queries.o, first + i, head, false);
  if (lane == 0)
    static_cast<float*>(queries.lse.data)[(first + i) * queries.lse.stride + head] =
        sum == 0 ? -INFINITY : (top * p.scale_log2 + log2f(sum)) * 0.693147181F;
}

// What query i and key j of a set add to gradients: probability and gradient of the score but for the scale,
// rounded as operands of the products are.
struct PairGradient {
  float probability, score;
};
template <int kHeadDim>
__device__ __forceinline__ PairGradient pair_gradient(const Problem& p, int64_t statistics,
                                                      const WarpRow<kHeadDim>& q,
                                                      const WarpRow<kHeadDim>& d_o,
                                                      const WarpRow<kHeadDim>& k,
                                                      const WarpRow<kHeadDim>& v) {
  const float probability = hopper::exp2_fast(q.dot(k) * p.scale_log2 - p.statistics.lse2[statistics]);
  const float score = probability * (d_o.dot(v) - p.statistics.delta[statistics]);
  return {__bfloat162float(__float2bfloat16_rn(probability)), __bfloat162float(__float2bfloat16_rn(score))};
}
// dq of query i, by one warp.
template <int kHeadDim>
__device__ __forceinline__ void row_of_dq(const Problem& p, int stream, int sequence, int head, int i) {
  const DeviceQueries& queries = p.queries[stream];
  const int64_t first = int64_t(sequence) * p.length, at = p.statistics_of(stream, sequence, head) + i;
  WarpRow<kHeadDim> q, d_o, k, v, dq;
  q.read(queries.q, first + i, head), d_o.read(queries.d_o, first + i, head);
  for (int set = 0; set < p.sets; ++set) {
    const Interval keys = visible_keys(queries.band[set], i, p.document_start[first + i]);
    for (int j = keys.begin; j < keys.end; ++j) {
      k.read(p.keys[set].k, first + j, head / p.group), v.read(p.keys[set].v, first + j, head / p.group);
      dq.add(pair_gradient(p, at, q, d_o, k, v).score, k);
    }
  }
  dq.scale(p.scale);
  dq.write(queries.dq, first + i, head, false);
}

// dk and dv of key j, by one warp.
template <int kHeadDim>
__device__ __forceinline__ void row_of_dk(const Problem& p, int set, int sequence, int kv_head, int j) {
  const DeviceKeys& keys = p.keys[set];
  const int64_t first = int64_t(sequence) * p.length;
  WarpRow<kHeadDim> q, d_o, k, v, dk, dv;
  k.read(keys.k, first + j, kv_head), v.read(keys.v, first + j, kv_head);
  for (int stream = 0; stream < p.streams; ++stream) {
    const DeviceQueries& queries = p.queries[stream];
    const DeviceBand band = queries.band[set];
    for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
      const int64_t at = p.statistics_of(stream, sequence, head);
      for (int i = j + band.lo; i < p.length && i - j <= band.hi && p.document_start[first + i] <= j; ++i) {
        q.read(queries.q, first + i, head), d_o.read(queries.d_o, first + i, head);
        const PairGradient pair = pair_gradient(p, at + i, q, d_o, k, v);
        dk.add(pair.score, q), dv.add(pair.probability, d_o);
      }
    }
  }
  dk.scale(p.scale);
  if (keys.dk.data) dk.write(keys.dk, first + j, kv_head, keys.accumulate);
  if (keys.dv.data) dv.write(keys.dv, first + j, kv_head, keys.accumulate);
}

}  // namespace sps::ops::attention
