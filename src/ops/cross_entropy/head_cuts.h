// How a GPU cuts the rows of the output head. A chunk's logits are made and turned into d_logits while no
// others are kept; d_logits of a group of chunks are kept for its dx and dw, two products. Groups are large:
// each reads and writes all of dw (f32 [vocab, d]), which costs as much as the logits of several hundred
// rows. Sizes depend on the shape alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor/tensor.h"

namespace sps::ops {

struct HeadCuts {
  int64_t stride;  // of logits and d_logits: rows begin on 16 bytes
  int64_t chunk;   // rows of logits that are there at a time
  int64_t group;   // rows of d_logits that are there at a time
};

inline HeadCuts head_cuts(int64_t rows, int64_t vocab, DType act, bool train) {
  constexpr int64_t kLogitsBytes = int64_t{256} << 20, kGroupBytes = int64_t{1} << 30;
  constexpr int64_t kMostRows = 16384, kStep = 128;  // of a tile of the products
  const int64_t stride = (vocab + 7) / 8 * 8;
  const auto fitting = [&](int64_t bytes, int64_t element) {
    const int64_t fit = std::clamp<int64_t>(bytes / (stride * element), 1, kMostRows);
    return fit < kStep ? fit : fit / kStep * kStep;
  };
  // As equal as whole tiles allow.
  const auto even = [](int64_t n, int64_t most) {
    const int64_t pieces = (n + most - 1) / most, size = (n + pieces - 1) / pieces;
    return std::min({(size + kStep - 1) / kStep * kStep, most, n});
  };
  const int64_t logits = fitting(kLogitsBytes, int64_t(sizeof(float)));
  if (!train) {
    const int64_t chunk = even(rows, logits);
    return {stride, chunk, chunk};
  }
  const int64_t group = even(rows, fitting(kGroupBytes, int64_t(dtype_size(act))));
  return {stride, even(group, logits), group};
}

// A chunk's logits in f32 and, to train, a group's d_logits behind them.
inline size_t head_logits_bytes(const HeadCuts& cuts) {
  return (size_t(cuts.chunk * cuts.stride) * sizeof(float) + 255) / 256 * 256;
}
inline size_t head_scratch_bytes(const HeadCuts& cuts, DType act, bool train) {
  return head_logits_bytes(cuts) + (train ? size_t(cuts.group * cuts.stride) * dtype_size(act) : 0);
}

}  // namespace sps::ops
