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

// Joins the chunks of one of the tile's queries and writes its row. A lane has every 32nd column; a chunk's
// factors are made by one lane. What many chunks have left is asked for at once.
template <int D, bool kTurns>
template <class Ready>
__device__ void SplitWarp<D, kTurns>::join_chunks(const Ready& ready, int query) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  constexpr int kAtOnce = 8;  // for more, ptxas (CUDA 13.0, sm_100) finds no predicates
#else
  constexpr int kAtOnce = D <= 64 ? 24 : 16;
#endif
  constexpr int kColumns = D / 32;
  const int chunks = run().all_chunks();
  const auto* const softmax = reinterpret_cast<const float2*>(partials_.softmax(item_.tile, query));
  const float* const sums = partials_.sums(item_.tile, query) + lane_;
  Softmax state;
  float total[kColumns] = {};
#pragma unroll 1
  for (int base = 0; base < chunks; base += kAtOnce) {
    const int here = min(chunks - base, kAtOnce), mine = base + min(lane_, here - 1);
    float2 fresh;
    float sum[kAtOnce][kColumns];
    const auto each = [&](auto&& f) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) f(i, c, i < here, sums + (base + i) * D + 32 * c);
    };
    if constexpr (kMails<Ready>) {
      const auto written = [&](int c) { return lane_ + 32 * c < p_.head_dim; };
      bool come;
      do {
        fresh = ready.read(softmax + mine);
        each([&](int i, int c, bool there, const float* from) {
          sum[i][c] = there && written(c) ? ready.read(from) : 0;
        });
        come = ready.has_come(fresh);
        each([&](int i, int c, bool, const float*) { come &= ready.has_come(sum[i][c]); });
      } while (__any_sync(~0U, int(!come)) != 0);
    } else {
      fresh = __ldcg(softmax + mine);
      each([&](int i, int c, bool there, const float* from) { sum[i][c] = there ? __ldcg(from) : 0; });
    }
    const Item item = run().item(mine);
    const bool touches = lane_ < here && seen(item.set, query).touches(item.chunk * kChunk, kChunk);
    const unsigned sees = __ballot_sync(~0U, int(touches));
    float top = touches ? fresh.x : -INFINITY;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float below = __shfl_up_sync(~0U, top, step);
      if (lane_ >= step) top = fmaxf(top, below);
    }
    top = fmaxf(state.top, top);
    const float above = __shfl_up_sync(~0U, top, 1);
    const Factors mine_f = factors_of(lane_ == 0 ? state.top : above, fresh.x, top);
    state.top = __shfl_sync(~0U, top, 31);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i % 4 == 0 && i >= here) break;  // none sees a chunk that is not there
      const Factors f{__shfl_sync(~0U, mine_f.old, i), __shfl_sync(~0U, mine_f.now, i)};
      const float of_chunk = __shfl_sync(~0U, fresh.y, i);
      const bool seen_by = (sees >> i & 1) != 0;
      const float weights = f.join(state.sum, of_chunk);
      state.sum = seen_by ? weights : state.sum;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float joined = f.join(total[c], sum[i][c]);
        total[c] = seen_by ? joined : total[c];
      }
    }
  }
  bf16* const o = output_row(query);
  const float share = share_of(state.sum);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (lane_ + 32 * c >= p_.head_dim) continue;
    const bf16 x = from_float<bf16>(__fmul_rn(total[c], share));
    if constexpr (kMails<Ready>)
      ready.put(o + lane_ + 32 * c, x);
    else
      o[lane_ + 32 * c] = x;
  }
  if constexpr (kMails<Ready>) {
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
      if (i % 32 == lane_) ready.forget(softmax + i);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (lane_ + 32 * c < p_.head_dim) ready.forget(sums + i * D + 32 * c);
    }
  }
}

}  // namespace sps::ops::decode
