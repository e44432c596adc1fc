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
// Returns how many tiles, one or none, it has completed; with mail, of how many queries it was the joining
// warp, whether they are there or not.
template <int D, bool kTurns>
template <class Ready>
__device__ int SplitWarp<D, kTurns>::end_tile(Ready& ready, int nth, int of_tile, JoinPlace& first) {
  const int end = nth + of_tile;
  int done = 1;
  if constexpr (kMails<Ready>) {
    const int items = item_.items, queries = partials_.queries;
    done = 0;
#pragma unroll 1
    for (int base = 0, query = items - end; query < queries;) {
      if (query < live_) {
        if (done > 0) first = join_place(query);
        join_mail(ready, first, query);
      }
      ++done;
      if (++query >= base + items - nth) base += items, query = base + items - end;
    }
    if (end < items) return done;
  } else {
    if (!is_last(of_tile)) return 0;
    join_chunks(0, live_);
  }
  if constexpr (kTurns) {
    if constexpr (kMails<Ready>) ready.before_keys();
    hand_on_keys();
  }
  return done;
}

// Of the chunk that this lane makes factors of, from the chunk `first` on: whether a query sees some of it.
template <int D, bool kTurns>
__device__ bool SplitWarp<D, kTurns>::touches(int query, int first) const {
  const int chunk = first + lane_;
  if (chunk >= run().all_chunks()) return false;
  const Item item = run().item(chunk);
  return seen(item.set, query).touches(item.chunk * kChunk, kChunk);
}

template <int D, bool kTurns>
__device__ auto SplitWarp<D, kTurns>::join_place(int query) const -> JoinPlace {
  return {reinterpret_cast<const float2*>(partials_.softmax(item_.tile, query)) + lane_,
          partials_.sums(item_.tile, query) + 2 * lane_, output_row(query) + 2 * lane_, touches(query, 0)};
}

// A lane's chunk as it changes the running softmax: what it multiplies the sums before with, and its own.
template <int D, bool kTurns>
__device__ __forceinline__ float4 SplitWarp<D, kTurns>::chunk_factors(Softmax& state, float2 fresh,
                                                                      bool touches) const {
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
  return {mine.old, mine.now, fresh.y, touches ? 1.0F : 0.0F};
}

// A chunk's sums to those before it, as its factors say.
template <int D, bool kTurns>
template <int kPairs>
__device__ __forceinline__ void SplitWarp<D, kTurns>::add_chunk(const float4& of_chunk,
                                                                const float2 (&x)[kPairs], float& weights,
                                                                float (&total)[kPairs][2]) {
  const Factors f{of_chunk.x, of_chunk.y};
  const bool sees = of_chunk.w != 0;
  const float joined_weights = f.join(weights, of_chunk.z);
  weights = sees ? joined_weights : weights;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const float joined[2] = {f.join(total[pair][0], x[pair].x), f.join(total[pair][1], x[pair].y)};
    total[pair][0] = sees ? joined[0] : total[pair][0];
    total[pair][1] = sees ? joined[1] : total[pair][1];
  }
}

// Two numbers of the row.
template <int D, bool kTurns>
__device__ __forceinline__ uint32_t SplitWarp<D, kTurns>::row_pair(const float (&total)[2], float share) {
  return from_float<bf16>(__fmul_rn(total[0], share)).bits |
         uint32_t{from_float<bf16>(__fmul_rn(total[1], share)).bits} << 16;
}

// Joins the tile's chunks for a query as they come, up to 32 at a time, and writes its row: each lane has the
// softmax of a chunk, and of all chunks two columns side by side, or four. Nothing is found out here that
// could be known before.
template <int D, bool kTurns>
template <class Ready>
__device__ __forceinline__ void SplitWarp<D, kTurns>::join_mail(const Ready& ready, const JoinPlace& at,
                                                                int query) {
  constexpr int kPairs = (D + 63) / 64, kAtOnce = 32 / kPairs, kGroup = 8;
  static_assert(kAtOnce % kGroup == 0 && kAtOnce * sizeof(float4) <= sizeof(shared_.query));
  const int chunks = run().all_chunks();
  auto* const factors = reinterpret_cast<float4*>(shared_.query);
  const auto in_head = [&](int pair) { return 2 * (lane_ + 32 * pair) < p_.head_dim; };
  Softmax state;
  float total[kPairs][2] = {};
  bool ends = false;
#pragma unroll 1
  for (int base = 0; !ends; base += kAtOnce) {
    const int here = min(chunks - base, kAtOnce);
    ends = base + kAtOnce >= chunks;
    const bool sees = base == 0 ? at.sees : touches(query, base);
    int wanted[kPairs];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) wanted[pair] = in_head(pair) ? here : 0;
    const float2* const softmax = at.softmax + base;
    const float* const sums = at.sums + base * D;
    // Chunks in groups: f(chunk, pair).
    const auto each = [&](auto&& f) {
#pragma unroll
      for (int group = 0; group < kAtOnce; group += kGroup) {
        if (group >= here) continue;
#pragma unroll
        for (int i = group; i < group + kGroup; ++i)
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) f(i, pair);
      }
    };
    const auto place = [&](int i, int pair) {
      return reinterpret_cast<const float2*>(sums + i * D + 64 * pair);
    };
    float2 fresh = make_float2(-INFINITY, 0), x[kAtOnce][kPairs];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) x[i][pair] = make_float2(0, 0);
    auto watch = ready.watch();
    uint32_t most[kGroup / 2];
    do {
      ready.read_pair(lane_, here, softmax, fresh);
      each([&](int i, int pair) { ready.read_pair(i, wanted[pair], place(i, pair), x[i][pair]); });
      most[0] = ready.look(0, fresh);
#pragma unroll
      for (int i = 1; i < kGroup / 2; ++i) most[i] = 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
          most[i % (kGroup / 2)] = ready.look(most[i % (kGroup / 2)], x[i][pair]);
#pragma unroll
      for (int i = 1; i < kGroup / 2; ++i) most[0] = max(most[0], most[i]);
      watch.look();
    } while (__any_sync(~0U, int(!ready.have_come(most[0]))) != 0);
    const float4 mine = chunk_factors(state, fresh, sees);
    if (lane_ < kAtOnce) factors[lane_] = mine;
    __syncwarp();
#pragma unroll
    for (int group = 0; group < kAtOnce; group += kGroup) {
      if (group >= here) continue;
#pragma unroll
      for (int i = group; i < group + kGroup; ++i) add_chunk(factors[i], x[i], state.sum, total);
    }
    __syncwarp();  // they have been read
    if (ends) {
      const float share = share_of(state.sum);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair)
        ready.put(in_head(pair), at.o + 64 * pair, row_pair(total[pair], share));
    }
    // The row is on its way.
    ready.forget(lane_, here, softmax);
    each([&](int i, int pair) { ready.forget(i, wanted[pair], place(i, pair)); });
  }
}

// Joins the tile's chunks for some queries and writes their rows, query by query, 32 chunks at a time: their
// sums come where keys, or values, were, the next ones meanwhile. A lane makes one chunk's factors and joins
// two columns side by side, or four.
template <int D, bool kTurns>
__device__ __forceinline__ void SplitWarp<D, kTurns>::join_chunks(int query, int end) {
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
  if (query < end) ask_for(query, 0, false);
  copy_async_group();
#pragma unroll 1
  for (int base = 0; query < end;) {
    const int here = min(chunks - base, kAtOnce), now = query, first = base;
    const bool ends = first + kAtOnce >= chunks;
    float2 fresh = make_float2(-INFINITY, 0);
    if (lane_ < here)
      fresh = __ldcg(reinterpret_cast<const float2*>(partials_.softmax(item_.tile, now)) + first + lane_);
    ends ? (++query, base = 0) : base += kAtOnce;
    if (query < end) ask_for(query, base, !odd);
    copy_async_group();
    factors[lane_] = chunk_factors(state, fresh, touches(now, first));
    copy_async_wait_groups<1>();
    __syncwarp();
    const auto* const sums = reinterpret_cast<const float*>(odd ? shared_.v : shared_.k);
#pragma unroll 1
    for (int some = 0; some < here; some += kUnroll)
#pragma unroll
      for (int i = some; i < some + kUnroll; ++i) {
        float2 x[kPairs];
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
          x[pair] = *reinterpret_cast<const float2*>(sums + i * D + min(column(pair), D - 2));
        add_chunk(factors[i], x, state.sum, total);
      }
    __syncwarp();  // all of it has been read
    odd = !odd;
    if (!ends) continue;
    bf16* const o = output_row(now);
    const float share = share_of(state.sum);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint32_t x = row_pair(total[pair], share);
      if (column(pair) < p_.head_dim) *reinterpret_cast<uint32_t*>(o + column(pair)) = x;
      total[pair][0] = total[pair][1] = 0;
    }
    state = {};
  }
}

}  // namespace sps::ops::decode
