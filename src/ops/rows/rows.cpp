#include "ops/rows/rows.h"

#include "ops/rows/rows_kernels.h"
#include "ops/rowwise.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

// True if all are f64; f64 mixed with another dtype is a mistake.
bool reference(const Exec& ex, std::initializer_list<DType> dtypes) {
  const bool f64 = *dtypes.begin() == DType::f64;
  for (const DType dtype : dtypes) SPS_CHECK(f64 ? dtype == DType::f64 : is_act(dtype));
  SPS_CHECK(ex.device == Device::cpu || !f64);
  return f64;
}

bool broadcasts_to(const Tensor& x, const Tensor& y) {
  return x.cols == y.cols && (x.rows == y.rows || x.rows == 1);
}

}  // namespace

void copy_rows(const Exec& ex, Tensor x, Tensor y) {
  const bool ref = reference(ex, {x.dtype, y.dtype});
  SPS_CHECK(broadcasts_to(x, y));
  if (!y) return;
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return copy_rows_cuda(ex, x, y);
  (ref ? copy_rows_ref : copy_rows_cpu)(x, y);
}

void add_rows(const Exec& ex, Tensor a, Tensor b, Tensor y) {
  const bool ref = reference(ex, {a.dtype, b.dtype, y.dtype});
  SPS_CHECK(broadcasts_to(a, y) && is_shape(b, y.rows, y.cols));
  // In place, each row must be read for the last time when it is written.
  SPS_CHECK(y.data != a.data || (a.rows == y.rows && a.dtype == y.dtype));
  SPS_CHECK(y.data != b.data || b.dtype == y.dtype);
  if (!y) return;
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return add_rows_cuda(ex, a, b, y);
  (ref ? add_rows_ref : add_rows_cpu)(a, b, y);
}

void sum_rows(const Exec& ex, Tensor x, Tensor y) {
  const bool ref = reference(ex, {x.dtype, y.dtype});
  SPS_CHECK(is_shape(y, 1, x.cols));
  if (!x) return;
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return sum_rows_cuda(ex, x, y);
  (ref ? sum_rows_ref : sum_rows_cpu)(x, y);
}

void fill(const Exec& ex, Tensor y, float value) {
  const bool ref = reference(ex, {y.dtype});
  if (!y) return;
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return fill_cuda(ex, y, value);
  ref ? fill_ref(y, double(value)) : fill_cpu(y, value);
}

}  // namespace sps::ops
