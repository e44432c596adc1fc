// Band attention: grouped-query attention of one or two query streams over up to three sets of keys, with one
// softmax over the union of what a query may read. Row i of a stream is position i of its sequence.
//
//   key j of set s is visible to query i of stream q  iff  lo <= i - j <= hi  and  both lie in one document
//   o_i = sum_{s, j visible} softmax(scale * q_i . k_sj) v_sj       lse_i = log sum exp(scale * q_i . k_sj)
//
// Every family of the project is a choice of bands (design, section 1; model spec, section 3). Documents are
// contiguous, so the visible keys of a row are one interval per set, [max(document start, i - hi), i - lo],
// and tiles outside it are never touched. `window w` means i - j = 0..w: the edge is included. A row that
// sees nothing gets o = 0, lse = -inf and zero gradients. Keys outside the interval are never read: NaN there
// changes nothing.
//
// Shapes   rows = batch * length; q, o, dq, d_o [rows, heads*head_dim]; k, v, dk, dv [rows,
// kv_heads*head_dim];
//          lse [rows, heads] f32; document_start [rows]: index in 0..length-1 of the first position of the
//          row's document within its own sequence, in the device's memory. Query head h reads key head h /
//          (heads / kv_heads).
// Types    q, k, v, o act dtype (f32, bf16; f64 in the reference); dq, dk, dv act dtype or f32. Softmax in
// f32. Errors   shapes are SPS_CHECKed.
//
// Gradient With p_ij the probabilities and delta_i = sum(d_o_i * o_i):
//   dv_j = sum_i p_ij d_o_i     ds_ij = p_ij (d_o_i . v_j - delta_i)     dq_i = scale sum_j ds_ij k_j dk_j
//   likewise
// summed over the streams and query heads that read key j, always in the same order.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include "tensor/exec.h"

namespace sps::ops {

// Visible steps back, both edges included. `none()` shows nothing.
struct Band {
  static constexpr int64_t kInf = std::numeric_limits<int64_t>::max();
  int64_t lo = 1, hi = 0;
  bool empty() const { return hi < lo; }
  static constexpr Band none() { return {1, 0}; }
  static constexpr Band causal() { return {0, kInf}; }
  Band intersect(Band other) const { return {lo > other.lo ? lo : other.lo, hi < other.hi ? hi : other.hi}; }
  bool operator==(const Band&) const = default;
};

// Visible (query, key) pairs of one band over one document of `length` positions.
int64_t band_area(Band band, int64_t length);

constexpr int kMaxQueryStreams = 2, kMaxKeySets = 3;

struct AttentionShape {
  int64_t batch = 1, length = 0, heads = 1, kv_heads = 1, head_dim = 1;
  float scale = 1;
  std::span<const int32_t> document_start;
  bool skip_tiles = true;  // false: visit every tile and mask it (to test that skipping changes nothing)
};

struct QueryStream {  // q empty: the stream is absent
  Tensor q, o, lse;
  std::array<Band, kMaxKeySets> band{Band::none(), Band::none(), Band::none()};  // per key set
};
struct KeySet {  // k empty: the set is absent, no band may ask for it
  Tensor k, v;
};
struct QueryGrad {
  Tensor d_o, dq;
};
struct KeyGrad {  // both empty: nobody wants them, and they are not computed
  Tensor dk, dv;
  bool accumulate = false;  // add to what dk and dv hold (f32 only)
};

void attention_forward(const Exec& ex, const AttentionShape& shape,
                       const std::array<QueryStream, kMaxQueryStreams>& queries,
                       const std::array<KeySet, kMaxKeySets>& keys);

// Writes dq of every present stream and dk, dv of every present set that has them (zero where nothing reads a
// key).
void attention_backward(const Exec& ex, const AttentionShape& shape,
                        const std::array<QueryStream, kMaxQueryStreams>& queries,
                        const std::array<KeySet, kMaxKeySets>& keys,
                        const std::array<QueryGrad, kMaxQueryStreams>& query_grads,
                        const std::array<KeyGrad, kMaxKeySets>& key_grads);

}  // namespace sps::ops
