// How a step's own rows become operands: rotation and QK-norm in a warp of decode_attention_split.cuh, which
// includes it.
#pragma once

#include "ops/decode_attention/decode_attention_split.cuh"

namespace sps::ops::decode {

// Turns the queries and this step's keys, eight lanes to a row, as rope.cu does. Angles and gains are no
// one's results: they are asked for first.
template <int D, bool kTurns>
template <class Ready>
__device__ void SplitWarp<D, kTurns>::turn_rows(Ready&& ready) {
  constexpr int kLog = 3, kRows = 32 >> kLog;
  static_assert(D <= (2 * kPiece << kLog) && kMaxKeySets <= kRows);
  const int lane = lane_ & ((1 << kLog) - 1), live = live_;
  int turning = 0;  // sets
#pragma unroll
  for (int set = 0; set < kMaxKeySets; ++set)
    if ((run().own >> set & 1) != 0 && p_.set[set].turned != nullptr) turning |= 1 << set;
  const Rotation& r = p_.rotation;
  // What stands in p comes before the rows do.
  const bool norms = r.norm, adjacent = r.adjacent;
  const int head_dim = p_.head_dim;
  const float eps = r.eps;
  const rope::Unit<kPiece> unit({0, p_.heads, head_dim, r.pairs, adjacent}, lane);
  // Rows that stay as they are: values, and keys that have been turned already.
  const int copied = lane_ >> kLog;
  const bool copies = (run().own >> copied & 1) != 0, copies_keys = copies && (turning >> copied & 1) == 0;
  uint4 kept[2][2];
#pragma unroll 1
  for (int first = 0; first == 0 || first < live + __popc(turning); first += kRows) {
    const int vector = first + (lane_ >> kLog), set = vector < live ? -1 : nth_set(turning, vector - live);
    const bool is_query = vector < live, on = (is_query || set >= 0) && lane < r.units,
               second = on && unit.second < head_dim;
    const int stream = is_query ? query(vector).stream : set >= 0 ? p_.set[set].stream : 0;
    const rope::Turn<kPiece> turn(Rows<const float>{r.cos, r.cos_stride},
                                  Rows<const float>{r.sin, r.sin_stride}, 1, run().begin[stream], unit, on);
    float gains[2][kPiece], v[2][kPiece];
    uint4 fresh[2];
    if (norms)
      rope::load_unit(is_query ? p_.stream[stream].gain : p_.set[max(set, 0)].gain, unit, head_dim, on,
                      gains);
    const bf16* const from = !on ? nullptr : is_query ? query_row(vector) : own_row(false, set);
    bf16* const to = is_query ? shared_.query + vector * Shared::kQueryRow : shared_.own[max(set, 0)][0];
    if (first == 0) {
      const bf16* const own_keys = copies_keys ? own_row(false, copied) : nullptr;
      const bf16* const own_values = copies ? own_row(true, copied) : nullptr;
      ready(run().run, item_.key_head);
      fetch(ready, [&](auto&& load) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = (lane + (half << kLog)) * kPiece;
          load(kept[0][half], copies_keys && column < head_dim, own_keys + column);
          load(kept[1][half], copies && column < head_dim, own_values + column);
        }
        load(fresh[0], on, from + unit.first);
        load(fresh[1], second, from + unit.second);
      });
    } else {
      fetch(ready, [&](auto&& load) {
        load(fresh[0], on, from + unit.first);
        load(fresh[1], second, from + unit.second);
      });
    }
    if (first == 0 && copies)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = (lane + (half << kLog)) * kPiece;
        if (column >= D) continue;
        *reinterpret_cast<uint4*>(&shared_.own[copied][1][column]) = kept[1][half];
        if (copies_keys || column >= head_dim)
          *reinterpret_cast<uint4*>(&shared_.own[copied][0][column]) = kept[0][half];
      }
    widen(fresh[0], v[0]);
    widen(fresh[1], v[1]);
    if (norms) rope::scale_unit(v, rope::norm_factor(v, kLog, head_dim, eps), gains);
    adjacent ? turn.template apply<false>(v) : turn.template apply<true>(v);
    if (on) put_piece(to + unit.first, v[0]);
    if (second) put_piece(to + unit.second, v[1]);
  }
}

}  // namespace sps::ops::decode
