#include "ops/attention/attention.h"

#include <algorithm>

#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_kernels.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

void check_tensor(const Tensor& t, int64_t rows, int64_t cols, DType dtype) {
  SPS_CHECK(t.rows == rows && t.cols == cols && t.dtype == dtype && t.data != nullptr);
}

void check_gradient(const Tensor& t, int64_t rows, int64_t cols, DType act) {
  check_tensor(t, rows, cols, t.dtype);
  SPS_CHECK(t.dtype == act || t.dtype == DType::f32);
}

// Checks what forward and backward share; returns the act dtype.
DType check_inputs(const Exec& ex, const AttentionShape& shape, const QueryStreams& queries,
                   const KeySets& keys) {
  SPS_CHECK(shape.batch >= 0 && shape.length >= 0 && shape.length < (int64_t{1} << 30));
  SPS_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 && shape.head_dim > 0);
  const int64_t rows = shape.batch * shape.length;
  SPS_CHECK(int64_t(shape.document_start.size()) == rows);
  for (int64_t r = 0; r < rows && ex.device == Device::cpu; ++r) {
    const int64_t i = r % shape.length, start = shape.document_start[size_t(r)];
    SPS_CHECK(start == i || (i > 0 && start == shape.document_start[size_t(r - 1)]));
  }
  const auto present = std::find_if(queries.begin(), queries.end(), [](const auto& s) { return bool(s.q); });
  if (present == queries.end()) {
    for (const KeySet& set : keys)
      if (set.k) return set.k.dtype;
    return DType::f32;
  }
  const DType act = present->q.dtype;
  SPS_CHECK(act == DType::f32 || act == DType::bf16 || (act == DType::f64 && ex.device == Device::cpu));
  for (const QueryStream& s : queries) {
    if (!s.q) continue;
    check_tensor(s.q, rows, shape.heads * shape.head_dim, act);
    check_tensor(s.o, rows, shape.heads * shape.head_dim, act);
    check_tensor(s.lse, rows, shape.heads, s.lse.dtype);
    SPS_CHECK(s.lse.dtype == DType::f32 || (s.lse.dtype == DType::f64 && act == DType::f64));
    for (int k = 0; k < kMaxKeySets; ++k) {
      const Band band = s.band[size_t(k)];
      SPS_CHECK(band.empty() || (band.lo >= 0 && keys[size_t(k)].k));
    }
  }
  for (const KeySet& set : keys) {
    if (!set.k) continue;
    check_tensor(set.k, rows, shape.kv_heads * shape.head_dim, act);
    check_tensor(set.v, rows, shape.kv_heads * shape.head_dim, act);
  }
  return act;
}

}  // namespace

int64_t band_area(Band band, int64_t length) {
  const int64_t last = std::min(band.hi, length - 1);
  if (last < band.lo) return 0;
  SPS_CHECK(band.lo >= 0);
  const int64_t steps = last - band.lo + 1;  // `d` steps back are possible for length - d queries
  return steps * length - steps * (band.lo + last) / 2;
}

void attention_forward(const Exec& ex, const AttentionShape& shape,
                       const std::array<QueryStream, kMaxQueryStreams>& queries,
                       const std::array<KeySet, kMaxKeySets>& keys) {
  const DType act = check_inputs(ex, shape, queries, keys);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return attention_forward_cuda(ex, shape, queries, keys);
  if (act == DType::f64) return attention_forward_ref(shape, queries, keys);
  attention_forward_cpu(shape, queries, keys);
}

void attention_backward(const Exec& ex, const AttentionShape& shape,
                        const std::array<QueryStream, kMaxQueryStreams>& queries,
                        const std::array<KeySet, kMaxKeySets>& keys,
                        const std::array<QueryGrad, kMaxQueryStreams>& query_grads,
                        const std::array<KeyGrad, kMaxKeySets>& key_grads) {
  const DType act = check_inputs(ex, shape, queries, keys);
  const int64_t rows = shape.batch * shape.length;
  for (size_t s = 0; s < queries.size(); ++s) {
    if (!queries[s].q) continue;
    check_tensor(query_grads[s].d_o, rows, shape.heads * shape.head_dim, act);
    check_gradient(query_grads[s].dq, rows, shape.heads * shape.head_dim, act);
  }
  for (size_t k = 0; k < keys.size(); ++k) {
    if (!keys[k].k || (!key_grads[k].dk && !key_grads[k].dv)) continue;
    check_gradient(key_grads[k].dk, rows, shape.kv_heads * shape.head_dim, act);
    check_gradient(key_grads[k].dv, rows, shape.kv_heads * shape.head_dim, act);
    SPS_CHECK(!key_grads[k].accumulate ||
              (key_grads[k].dk.dtype != DType::bf16 && key_grads[k].dv.dtype != DType::bf16));
  }
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda)
      return attention_backward_cuda(ex, shape, queries, keys, query_grads, key_grads);
  if (act == DType::f64) return attention_backward_ref(shape, queries, keys, query_grads, key_grads);
  attention_backward_cpu(shape, queries, keys, query_grads, key_grads);
}

}  // namespace sps::ops
