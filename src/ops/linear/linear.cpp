#include "ops/linear/linear.h"

#include "ops/linear/gemm.h"
#include "ops/linear/linear_kernels.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

bool is_matrix(const Tensor& t, int64_t rows, int64_t cols) {
  return t.rows == rows && t.cols == cols && (t.stride >= t.cols || t.rows <= 1);
}

void check_places(const Exec& ex, const Tensor& a, const Tensor& b, const Tensor& c) {
  SPS_CHECK(a.device == ex.device && b.device == ex.device && c.device == ex.device);
  SPS_CHECK(ex.device == Device::cpu || a.dtype != DType::f64);
}

void product(const Exec& ex, Tensor a, Tensor b, Transposed b_transposed, Tensor c, Accumulate acc) {
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return product_cuda(ex, a, Transposed::no, b, b_transposed, c, acc);
  SPS_CHECK(ex.device == Device::cpu);
  product_cpu(a, Transposed::no, b, b_transposed, c, acc);
}

bool is_result_of(DType out, DType act) {
  return out == act || (out == DType::f32 && act == DType::bf16);
}

}  // namespace

void linear_forward(const Exec& ex, Tensor x, Tensor w, Tensor y, Accumulate acc) {
  SPS_CHECK(is_matrix(x, y.rows, w.cols) && is_matrix(w, y.cols, x.cols) && is_matrix(y, x.rows, w.rows));
  SPS_CHECK(x.dtype == w.dtype && is_result_of(y.dtype, x.dtype));
  check_places(ex, x, w, y);
  if (x.dtype == DType::f64) return linear_forward_ref(x, w, y, acc);
  product(ex, x, w, Transposed::yes, y, acc);
}

void linear_backward_input(const Exec& ex, Tensor dy, Tensor w, Tensor dx, Accumulate acc) {
  SPS_CHECK(is_matrix(dy, dx.rows, w.rows) && is_matrix(w, dy.cols, dx.cols) &&
            is_matrix(dx, dy.rows, w.cols));
  SPS_CHECK(dy.dtype == w.dtype && is_result_of(dx.dtype, dy.dtype));
  check_places(ex, dy, w, dx);
  if (dy.dtype == DType::f64) return linear_backward_input_ref(dy, w, dx, acc);
  product(ex, dy, w, Transposed::no, dx, acc);
}

void linear_backward_weight(const Exec& ex, Tensor dy, Tensor x, Tensor dw) {
  SPS_CHECK(is_matrix(dy, x.rows, dw.rows) && is_matrix(x, dy.rows, dw.cols) &&
            is_matrix(dw, dy.cols, x.cols));
  check_places(ex, dy, x, dw);
  SPS_CHECK(dy.dtype == x.dtype && dw.dtype == (x.dtype == DType::f64 ? DType::f64 : DType::f32));
  if (dy.dtype == DType::f64) return linear_backward_weight_ref(dy, x, dw);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda)
      return product_cuda(ex, dy, Transposed::yes, x, Transposed::no, dw, Accumulate::yes);
  SPS_CHECK(ex.device == Device::cpu);
  weight_gradient_cpu(dy, x, dw);
}

bool bf16_is_fast() {
  return cpu_multiplies_bf16();
}

}  // namespace sps::ops
