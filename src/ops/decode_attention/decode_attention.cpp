#include "ops/decode_attention/decode_attention.h"

#include <algorithm>

#include "ops/decode_attention/decode_attention_kernels.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

bool is_matrix(const Tensor& t, int64_t cols, DType dtype) {
  return t.cols == cols && t.dtype == dtype && t.data != nullptr;
}

void check_cache(const KeyCache& cache, const DecodeShape& shape, const PageTable& table, DType act) {
  if (!cache.k) return;
  SPS_CHECK(is_matrix(cache.k, shape.head_dim, act) && is_matrix(cache.v, shape.head_dim, act));
  SPS_CHECK(cache.rows > 0 && cache.k.rows == cache.v.rows &&
            cache.k.rows % (shape.kv_heads * cache.rows) == 0);
  SPS_CHECK(cache.k.dense() && cache.v.dense());
  SPS_CHECK(!cache.paged || table.per_slot > 0);
}

void check_step(const DecodeShape& shape, const DecodeStep& step) {
  SPS_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 && shape.head_dim > 0);
  const auto runs = size_t(step.runs);
  SPS_CHECK(step.runs >= 0 && step.slot.size() >= runs);
  SPS_CHECK(step.schedules == nullptr || step.number.size() == 1);
  for (const StepRows& s : step.stream)
    SPS_CHECK(s.row.size() >= runs && s.count.size() >= runs && s.begin.size() >= runs &&
              s.first.size() >= runs);
}

void check_keys(const DecodeShape& shape, const DecodeStep& step, const DecodeKeys& set, DType act) {
  const int64_t narrow = shape.kv_heads * shape.head_dim;
  SPS_CHECK(set.stream >= 0 && set.stream < kMaxQueryStreams);
  SPS_CHECK(is_matrix(set.k, narrow, act) && is_matrix(set.v, narrow, act) && set.k.rows == set.v.rows);
  check_cache(set.cache, shape, step.table, act);
}

// Returns the act dtype.
DType check_call(const DecodeShape& shape, const DecodeStep& step, const DecodeQuerySet& queries,
                 const DecodeKeySets& keys) {
  check_step(shape, step);
  const DType act = queries[0].q ? queries[0].q.dtype : queries[1].q.dtype;
  for (size_t s = 0; s < queries.size(); ++s) {
    const DecodeQueries& stream = queries[s];
    if (!stream.q) continue;
    const int64_t wide = shape.heads * shape.head_dim;
    SPS_CHECK(is_matrix(stream.q, wide, act) && is_matrix(stream.o, wide, act) &&
              stream.q.rows == stream.o.rows);
    SPS_CHECK(int64_t(step.stream[s].document_start.size()) >= stream.q.rows);
    for (size_t k = 0; k < keys.size(); ++k) {
      const Band band = stream.band[k];
      const KeyCache& cache = keys[k].cache;
      SPS_CHECK(band.empty() || (band.lo >= 0 && keys[k].k));
      SPS_CHECK(band.empty() || band.hi == 0 || (cache.k && (cache.paged || band.hi <= cache.rows)));
    }
  }
  for (const DecodeKeys& set : keys)
    if (set.k) check_keys(shape, step, set, act);
  return act;
}

}  // namespace

DecodeSchedules::DecodeSchedules(const Exec& ex) {
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) memory_ = Bytes(kMostKinds * schedule_bytes_cuda(), Memory::device);
}

std::byte* DecodeSchedules::place(const Key& kind) {
  if (bytes() == 0) return nullptr;
  const auto found = std::ranges::find(kinds_, kind);
  const auto at = size_t(found - kinds_.begin());
  if (at == kMostKinds) return nullptr;
  if (found == kinds_.end()) kinds_.push_back(kind);
  return memory_.data() + at * (bytes() / kMostKinds);
}

void decode_attention(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                      const std::array<DecodeQueries, kMaxQueryStreams>& queries,
                      const std::array<DecodeKeys, kMaxKeySets>& keys) {
  const DType act = check_call(shape, step, queries, keys);
  if constexpr (kCudaBuilt) {
    if (ex.device == Device::cuda) return decode_attention_cuda(ex, shape, step, queries, keys);
  }
  (act == DType::f64 ? decode_attention_ref : decode_attention_cpu)(shape, step, queries, keys);
}

bool decode_attention_rotates(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                              const std::array<DecodeQueries, kMaxQueryStreams>& queries,
                              const std::array<DecodeKeys, kMaxKeySets>& keys,
                              const DecodeRotation& rotation) {
  if constexpr (kCudaBuilt) {
    if (ex.device == Device::cuda) return decode_attention_rotates_cuda(shape, step, queries, keys, rotation);
  }
  return false;
}

void decode_attention(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                      const std::array<DecodeQueries, kMaxQueryStreams>& queries,
                      const std::array<DecodeKeys, kMaxKeySets>& keys, const DecodeRotation& with_rotation) {
  check_call(shape, step, queries, keys);
  SPS_CHECK(decode_attention_rotates(ex, shape, step, queries, keys, with_rotation));
  if constexpr (kCudaBuilt) decode_attention_rotated_cuda(ex, shape, step, queries, keys, with_rotation);
}

void keep_keys(const Exec& ex, int64_t head_dim, const DecodeStep& step, std::span<const DecodeKeys> keys) {
  for (const DecodeKeys& set : keys) {
    if (!set.cache.k) continue;
    const int64_t kv_heads = set.k.cols / head_dim;
    const DecodeShape shape{kv_heads, kv_heads, head_dim, 1};
    check_step(shape, step);
    check_keys(shape, step, set, set.k.dtype);
  }
  if constexpr (kCudaBuilt) {
    if (ex.device == Device::cuda) return keep_keys_cuda(ex, head_dim, step, keys);
  }
  for (const DecodeKeys& set : keys)
    if (set.cache.k) keep_keys_cpu(head_dim, step, set);
}

}  // namespace sps::ops
