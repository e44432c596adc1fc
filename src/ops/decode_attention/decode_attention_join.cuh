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

// What comes when the warp is through with items of a tile, from `nth` on: joining, and keys are handed on.
// Returns how many tiles, one or none, it has completed.
template <int D, bool kTurns>
template <class Ready>
__device__ int SplitWarp<D, kTurns>::end_tile(Ready& ready, int nth, int of_tile) {
  const int end = nth + of_tile;
  if constexpr (kMails<Ready>) {
    const bool shares = !ready.counts();
#pragma unroll 1
    for (int query = 0; query < live_; ++query) {
      const int by = item_.items - 1 - (shares ? query % item_.items : 0);
      if (by < nth || by >= end) continue;
      join_chunks(ready, query, query + 1);
    }
    if (end < item_.items) return 0;
  } else {
    if (!is_last(of_tile)) return 0;
    join_chunks(ready, 0, live_);
  }
  if constexpr (kTurns) {
    if constexpr (kMails<Ready>) ready.before_keys();
    hand_on_keys();
  }
  return 1;
}

// What `here` chunks, from the first one on, have left of a query when all of it has come: the sums, which go
// where keys were, and for each lane a chunk's softmax.
template <int D, bool kTurns>
template <class Ready>
__device__ __forceinline__ float2 SplitWarp<D, kTurns>::take(const Ready& ready, int query, int first,
                                                             int here) const {
  constexpr int kRow = D * int(sizeof(float)), kVectors = D <= 64 ? 16 : 8, kStep = 32 * int(sizeof(uint4));
  const auto* const softmax =
      reinterpret_cast<const float2*>(partials_.softmax(item_.tile, query)) + first + lane_;
  const auto* const sums = reinterpret_cast<const char*>(partials_.sums(item_.tile, query) + first * D);
  const int bytes = here * kRow, width = p_.head_dim * int(sizeof(float));
  float2 fresh = make_float2(-INFINITY, 0);
#pragma unroll 1
  for (int base = 0; base == 0 || base < bytes; base += kVectors * kStep) {
    const int at = base + lane_ * int(sizeof(uint4));
    const auto wanted = [&](int i) { return at + i * kStep < bytes && (at + i * kStep) % kRow < width; };
    const bool asks = base == 0 && lane_ < here;
    uint4 x[kVectors];
    bool come;
    auto watch = ready.watch();
    do {
      if (asks) fresh = ready.read_pair(softmax);
      come = !asks || ready.pair_has_come(fresh);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) x[i] = ready.read(wanted(i), sums + at + i * kStep);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) come &= ready.sums_have_come(x[i]);
      watch.look();
    } while (__any_sync(~0U, int(!come)) != 0);
    ready.forget(asks, softmax);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (wanted(i)) *reinterpret_cast<uint4*>(shared_.k + at + i * kStep) = x[i];
      ready.forget(wanted(i), reinterpret_cast<const uint4*>(sums + at + i * kStep));
    }
  }
  return fresh;
}

// Joins the tile's chunks for some queries and writes their rows, query by query, 32 chunks at a time: their
// sums come where keys, or values, were, the next ones meanwhile. A lane makes one chunk's factors and joins
// two columns side by side, or four.
template <int D, bool kTurns>
template <class Ready>
__device__ __forceinline__ void SplitWarp<D, kTurns>::join_chunks(const Ready& ready, int query, int end) {
  constexpr int kPairs = (D + 63) / 64, kAtOnce = 32, kUnroll = 8;
  static_assert(kAtOnce * D * sizeof(float) == sizeof(shared_.k));
  static_assert(kAtOnce * sizeof(float4) <= sizeof(shared_.query));
  const int chunks = run().all_chunks();
  const auto column = [&](int pair) { return 2 * (lane_ + 32 * pair); };
  const auto ask_for = [&](int query, int base, bool odd) {
    const auto* const from = reinterpret_cast<const char*>(partials_.sums(item_.tile, query) + base * D);
    char* const to = odd ? shared_.v : shared_.k;
    const int bytes = min(chunks - base, kAtOnce) * D * int(sizeof(float));
#pragma unroll 1
    for (int i = lane_ * 16; i < bytes; i += 32 * 16) copy_async_16(to + i, from + i, true);
  };
  auto* const factors = reinterpret_cast<float4*>(shared_.query);
  Softmax state;
  float total[kPairs][2] = {};
  bool odd = false;
  if constexpr (!kMails<Ready>) {
    if (query < end) ask_for(query, 0, false);
    copy_async_group();
  }
#pragma unroll 1
  for (int base = 0; query < end;) {
    const int here = min(chunks - base, kAtOnce), now = query, first = base;
    const bool ends = first + kAtOnce >= chunks;
    float2 fresh = make_float2(-INFINITY, 0);
    ends ? (++query, base = 0) : base += kAtOnce;
    if constexpr (kMails<Ready>) {
      fresh = take(ready, now, first, here);
    } else {
      if (lane_ < here)
        fresh = __ldcg(reinterpret_cast<const float2*>(partials_.softmax(item_.tile, now)) + first + lane_);
      if (query < end) ask_for(query, base, !odd);
      copy_async_group();
    }
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
    // Nothing of a chunk whose keys the query does not see, or that is not there.
    factors[lane_] = {mine.old, mine.now, fresh.y, touches ? 1.0F : 0.0F};
    if constexpr (!kMails<Ready>) copy_async_wait_groups<1>();
    __syncwarp();
    const auto* const sums = reinterpret_cast<const float*>(odd ? shared_.v : shared_.k);
#pragma unroll 1
    for (int some = 0; some < here; some += kUnroll)
#pragma unroll
      for (int i = some; i < some + kUnroll; ++i) {
        const float4 of_chunk = factors[i];
        const Factors f{of_chunk.x, of_chunk.y};
        const bool sees = of_chunk.w != 0;
        const float weights = f.join(state.sum, of_chunk.z);
        state.sum = sees ? weights : state.sum;
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const float2 x = *reinterpret_cast<const float2*>(sums + i * D + min(column(pair), D - 2));
          const float joined[2] = {f.join(total[pair][0], x.x), f.join(total[pair][1], x.y)};
          total[pair][0] = sees ? joined[0] : total[pair][0];
          total[pair][1] = sees ? joined[1] : total[pair][1];
        }
      }
    __syncwarp();  // all of it has been read
    if constexpr (!kMails<Ready>) odd = !odd;
    if (!ends) continue;
    bf16* const o = output_row(now);
    const float share = share_of(state.sum);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint32_t x = from_float<bf16>(__fmul_rn(total[pair][0], share)).bits |
                         uint32_t{from_float<bf16>(__fmul_rn(total[pair][1], share)).bits} << 16;
      const bool wanted = column(pair) < p_.head_dim;
      if constexpr (kMails<Ready>)
        ready.put(wanted, o + column(pair), x);
      else if (wanted)
        *reinterpret_cast<uint32_t*>(o + column(pair)) = x;
      total[pair][0] = total[pair][1] = 0;
    }
    state = {};
  }
}

}  // namespace sps::ops::decode
