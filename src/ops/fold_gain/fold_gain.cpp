#include "ops/fold_gain/fold_gain.h"

#include "ops/fold_gain/fold_gain_kernels.h"
#include "ops/rowwise.h"
#include "tensor/device.h"

namespace sps::ops {

void fold_gain_forward(const Exec& ex, Tensor w, Tensor gain, Tensor y) {
  SPS_CHECK(w.dtype == DType::f32 || ex.device == Device::cpu);
  SPS_CHECK(w.dtype == gain.dtype && is_shape(gain, 1, w.cols) && is_shape(y, w.rows, w.cols));
  SPS_CHECK(w.dtype == DType::f64 ? y.dtype == DType::f64 : w.dtype == DType::f32 && is_act(y.dtype));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return fold_gain_forward_cuda(ex, w, gain, y);
  w.dtype == DType::f64 ? fold_gain_forward_ref(w, gain, y) : fold_gain_forward_cpu(w, gain, y);
}

void fold_gain_backward(const Exec& ex, Tensor dy, Tensor w, Tensor gain, Tensor dw, Tensor dgain) {
  SPS_CHECK(dy.dtype == DType::f32 || (dy.dtype == DType::f64 && ex.device == Device::cpu));
  SPS_CHECK(w.dtype == dy.dtype && gain.dtype == dy.dtype && dw.dtype == dy.dtype && dgain.dtype == dy.dtype);
  SPS_CHECK(is_shape(w, dy.rows, dy.cols) && is_shape(dw, dy.rows, dy.cols));
  SPS_CHECK(is_shape(gain, 1, dy.cols) && is_shape(dgain, 1, dy.cols));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return fold_gain_backward_cuda(ex, dy, w, gain, dw, dgain);
  dy.dtype == DType::f64 ? fold_gain_backward_ref(dy, w, gain, dw, dgain)
                         : fold_gain_backward_cpu(dy, w, gain, dw, dgain);
}

}  // namespace sps::ops
