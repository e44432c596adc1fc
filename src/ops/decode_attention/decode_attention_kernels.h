// The code behind decode_attention.h, and how its lists are read.
#pragma once

#include <algorithm>

#include "ops/decode_attention/decode_attention.h"

namespace sps::ops {

using DecodeQuerySet = std::array<DecodeQueries, kMaxQueryStreams>;
using DecodeKeySets = std::array<DecodeKeys, kMaxKeySets>;

// Row of cache.k and cache.v where a head's key of a position lies.
inline int64_t cache_row(const KeyCache& cache, const PageTable& table, int64_t kv_heads, int64_t slot,
                         int64_t head, int64_t position) {
  const int64_t block =
      cache.paged ? table.pages[size_t(slot * table.per_slot + position / cache.rows)] : slot;
  return (block * kv_heads + head) * cache.rows + position % cache.rows;
}

// Positions [begin, end) of a key set that a query sees; empty: end <= begin.
struct KeyInterval {
  int64_t begin = 0, end = 0;
};
inline KeyInterval visible_keys(Band band, int64_t position, int64_t document_start, int64_t first) {
  if (band.empty()) return {};
  int64_t begin = std::max(document_start, first);
  if (band.hi != Band::kInf) begin = std::max(begin, position - band.hi);
  return {begin, position - band.lo + 1};
}

// Calls body(row, position) for the rows of run `run` that `cache` keeps.
template <class Body>
void for_kept_rows(const StepRows& rows, const KeyCache& cache, size_t run, Body&& body) {
  const int64_t count = rows.count[run];
  for (int64_t t = cache.paged ? 0 : std::max<int64_t>(0, count - cache.rows); t < count; ++t)
    body(rows.row[run] + t, rows.begin[run] + t);
}

void decode_attention_ref(const DecodeShape& shape, const DecodeStep& step, const DecodeQuerySet& queries,
                          const DecodeKeySets& keys);
void decode_attention_cpu(const DecodeShape& shape, const DecodeStep& step, const DecodeQuerySet& queries,
                          const DecodeKeySets& keys);
void keep_keys_cpu(int64_t head_dim, const DecodeStep& step, const DecodeKeys& keys);

// On a GPU; decode_attention.cu.
size_t schedule_bytes_cuda();  // of a kind of call
void decode_attention_cuda(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                           const DecodeQuerySet& queries, const DecodeKeySets& keys);
bool decode_attention_rotates_cuda(const DecodeShape& shape, const DecodeStep& step,
                                   const DecodeQuerySet& queries, const DecodeKeySets& keys,
                                   const DecodeRotation& rotation);
void decode_attention_rotated_cuda(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                                   const DecodeQuerySet& queries, const DecodeKeySets& keys,
                                   const DecodeRotation& rotation);
void keep_keys_cuda(const Exec& ex, int64_t head_dim, const DecodeStep& step,
                    std::span<const DecodeKeys> keys);

}  // namespace sps::ops
