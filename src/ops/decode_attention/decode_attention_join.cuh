// How what warps have left of a tile's chunks becomes rows (the end of decode_attention_split.cuh, which
// includes it).
#pragma once

#include "ops/decode_attention/decode_attention_split.cuh"

namespace sps::ops::decode {

// After `in_tile` of the tile's items, which this warp has worked on: whether all are there.
template <int D, bool kTurns>
__device__ bool SplitWarp<D, kTurns>::is_last(int in_tile) const {
  const int items = item_.items;
  __syncwarp();
  if (in_tile == items) return true;
  int there = 0;
  if (lane_ == 0) {
    unsigned* const done = &partials_.done[item_.tile];
    there = in_tile + int(add_in_order(done, unsigned(in_tile)));
    if (there == items) *done = 0;
  }
  return __shfl_sync(~0U, there, 0) == items;
}

// Partial sums of chunks, `bytes` of them, when they have come.
template <int D, bool kTurns>
template <class Ready>
__device__ __forceinline__ void SplitWarp<D, kTurns>::take(const Ready& ready, const char* from, char* to,
                                                           int bytes) const {
  constexpr int kVectors = 8, kRow = D * int(sizeof(float));
#pragma unroll 1
  for (int base = 0; base < bytes; base += kVectors * 32 * 16) {
    const int first = base + lane_ * 16;
    uint4 x[kVectors];
    const auto wanted = [&](int i) {
      const int at = first + i * 32 * 16;
      return at < bytes && at % kRow < p_.head_dim * int(sizeof(float));
    };
    bool come;
    do {
      come = true;
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        x[i] = wanted(i) ? ready.read(from + first + i * 32 * 16) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) come &= ready.sums_have_come(x[i]);
    } while (__any_sync(~0U, int(!come)) != 0);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!wanted(i)) continue;
      *reinterpret_cast<uint4*>(to + first + i * 32 * 16) = x[i];
      ready.forget(from + first + i * 32 * 16, 16);
    }
  }
  __syncwarp();
}

template <int D, bool kTurns>
template <class Ready>
__device__ __forceinline__ float2 SplitWarp<D, kTurns>::take(const Ready& ready, const float2* from) {
  float2 x;
  do {
    x = ready.read_pair(from);
  } while (!ready.sums_have_come(make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), 0, 0)));
  ready.forget(from, 8);
  return x;
}

// Joins the tile's chunks and writes its rows, query by query, 32 chunks at a time: their sums come where
// keys, or values, were, the next ones meanwhile. A lane makes one chunk's factors and joins every 32nd
// column.
template <int D, bool kTurns>
template <class Ready>
__device__ void SplitWarp<D, kTurns>::join_chunks(const Ready& ready) {
  constexpr int kColumns = D / 32, kAtOnce = 32;
  static_assert(kAtOnce * D * sizeof(float) == sizeof(shared_.k));
  static_assert(kAtOnce * sizeof(float4) <= sizeof(shared_.query));
  const int chunks = run().all_chunks();
  const auto fetch = [&](int query, int base, bool odd) {
    const auto* const from = reinterpret_cast<const char*>(partials_.sums(item_.tile, query) + base * D);
    char* const to = odd ? shared_.v : shared_.k;
    const int bytes = min(chunks - base, kAtOnce) * D * int(sizeof(float));
    if constexpr (kMails<Ready>) {
      take(ready, from, to, bytes);
    } else {
#pragma unroll 1
      for (int i = lane_ * 16; i < bytes; i += 32 * 16) copy_async_16(to + i, from + i, true);
    }
  };
  auto* const factors = reinterpret_cast<float4*>(shared_.query);
  Softmax state;
  float total[kColumns] = {};
  if (live_ > 0) fetch(0, 0, false);
  copy_async_group();
  bool odd = false;
#pragma unroll 1
  for (int query = 0, base = 0; query < live_; odd = !odd) {
    const int here = min(chunks - base, kAtOnce), now = query, first = base;
    const bool ends = first + kAtOnce >= chunks;
    const auto* const softmax = reinterpret_cast<const float2*>(partials_.softmax(item_.tile, now)) + first;
    float2 fresh = make_float2(-INFINITY, 0);
    if constexpr (kMails<Ready>) {
      if (lane_ < here) fresh = take(ready, softmax + lane_);
      __syncwarp();
    } else if (lane_ < here) {
      fresh = __ldcg(softmax + lane_);
    }
    ends ? (++query, base = 0) : base += kAtOnce;
    if (query < live_) fetch(query, base, !odd);
    copy_async_group();
    const Item item = run().item(first + lane_);
    const bool touches = lane_ < here && seen(item.set, now).touches(item.chunk * kChunk, kChunk);
    float top = touches ? fresh.x : -INFINITY;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float below = __shfl_up_sync(~0U, top, step);
      if (lane_ >= step) top = fmaxf(top, below);
    }
    top = fmaxf(state.top, top);
    const float above = __shfl_up_sync(~0U, top, 1);
    const Factors mine = factors_of(lane_ == 0 ? state.top : above, fresh.x, top);
    state.top = __shfl_sync(~0U, top, 31);
    factors[lane_] = {mine.old, mine.now, fresh.y, touches ? 1.0F : 0.0F};
    copy_async_wait_groups<1>();
    __syncwarp();
    const float* sums = reinterpret_cast<const float*>(odd ? shared_.v : shared_.k) + lane_;
#pragma unroll 4
    for (int i = 0; i < here; ++i, sums += D) {
      const float4 of_chunk = factors[i];
      if (of_chunk.w == 0) continue;  // the query sees none of its keys
      const Factors f{of_chunk.x, of_chunk.y};
      state.sum = f.join(state.sum, of_chunk.z);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) total[c] = f.join(total[c], sums[32 * c]);
    }
    __syncwarp();  // all of it has been read
    if (!ends) continue;
    bf16* const o = output_row(now);
    const float share = share_of(state.sum);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (lane_ + 32 * c < p_.head_dim) {
        const bf16 x = from_float<bf16>(__fmul_rn(total[c], share));
        if constexpr (kMails<Ready>)
          ready.put(o + lane_ + 32 * c, x);
        else
          o[lane_ + 32 * c] = x;
      }
      total[c] = 0;
    }
    state = {};
  }
}

}  // namespace sps::ops::decode
