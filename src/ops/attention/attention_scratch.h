// Bytes of device scratch (tensor/device.h) that attention takes on a GPU: the kernels ask for them, and a
// forecast of memory counts them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/tensor.h"

namespace sps::ops {

// The backward pass's statistics of a row (DeviceSlot::rows): two f32 numbers, sequences padded.
constexpr int64_t kStatisticsPad = 128;
constexpr int64_t padded_length(int64_t length) {
  return (length + kStatisticsPad - 1) / kStatisticsPad * kStatisticsPad;
}
constexpr size_t statistics_bytes(int64_t batch, int64_t length, int64_t heads, int64_t streams) {
  return size_t(2 * padded_length(length) * batch * heads * streams) * sizeof(float);
}

// Hopper's backward pass (DeviceSlot::workspace): a ticket, the turns and the f32 sums of dq of every tile of
// queries, document starts.
struct HopperBackwardScratch {
  static constexpr int64_t kGroups = 2, kQueryGradient = 2 * 64 * 64;
  static constexpr int64_t queries(int64_t head_dim) { return head_dim == 64 ? 128 : 64; }

  int64_t query_tiles, counters, starts, documents;
  constexpr HopperBackwardScratch(int64_t batch, int64_t length, int64_t heads, int64_t streams,
                                  int64_t head_dim)
      : query_tiles((length + queries(head_dim) - 1) / queries(head_dim) * streams * batch * heads),
        counters(kGroups * query_tiles + 1),
        starts(batch * padded_length(length)),
        documents(batch) {}
  // In numbers of four bytes, from the beginning.
  constexpr int64_t starts_at() const { return rounded(counters); }
  constexpr int64_t documents_at() const { return starts_at() + rounded(starts); }
  constexpr int64_t dq_at() const { return documents_at() + rounded(documents); }
  constexpr size_t bytes() const { return size_t(dq_at() + query_tiles * kQueryGradient) * 4; }

 private:
  static constexpr int64_t rounded(int64_t numbers) { return (numbers + 31) / 32 * 32; }
};

// Of one call, as far as the shape tells which kernels serve it: those for Hopper are assumed to.
struct AttentionScratch {
  size_t rows = 0, workspace = 0;
};
inline AttentionScratch attention_backward_scratch(int64_t batch, int64_t length, int64_t heads,
                                                   int64_t head_dim, int64_t streams, DType act) {
  AttentionScratch s{statistics_bytes(batch, length, heads, streams), 0};
  if (act == DType::bf16 && (head_dim == 64 || head_dim == 96 || head_dim == 128))
    s.workspace = HopperBackwardScratch(batch, length, heads, streams, head_dim).bytes();
  return s;
}

}  // namespace sps::ops
