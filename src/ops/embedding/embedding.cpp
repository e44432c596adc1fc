#include "ops/embedding/embedding.h"

#include "ops/embedding/embedding_kernels.h"
#include "ops/rowwise.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

void check(const Exec& ex, std::span<const int32_t> ids, Tensor table, Tensor vector, Tensor rows) {
  SPS_CHECK(table.dtype == DType::f32 || (table.dtype == DType::f64 && ex.device == Device::cpu));
  SPS_CHECK(rows.dtype == table.dtype && is_shape(rows, int64_t(ids.size()), table.cols));
  if (vector) SPS_CHECK(vector.dtype == table.dtype && is_shape(vector, 1, table.cols));
  if (ex.device == Device::cuda) return;  // the kernels look at the ids
  for (const int32_t id : ids) SPS_CHECK(id >= 0 && id < table.rows);
}

}  // namespace

void embedding_forward(const Exec& ex, std::span<const int32_t> ids, Tensor table, Tensor vector, Tensor y) {
  check(ex, ids, table, vector, y);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return embedding_forward_cuda(ex, ids, table, vector, y);
  (table.dtype == DType::f64 ? embedding_forward_ref : embedding_forward_cpu)(ids, table, vector, y);
}

void embedding_backward(const Exec& ex, std::span<const int32_t> ids, Tensor dy, Tensor dtable,
                        Tensor dvector) {
  check(ex, ids, dtable, dvector, dy);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return embedding_backward_cuda(ex, ids, dy, dtable, dvector);
  (dtable.dtype == DType::f64 ? embedding_backward_ref : embedding_backward_cpu)(ids, dy, dtable, dvector);
}

}  // namespace sps::ops
