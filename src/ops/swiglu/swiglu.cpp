#include "ops/swiglu/swiglu.h"

#include "ops/rowwise.h"
#include "ops/swiglu/swiglu_kernels.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

void check(const Exec& ex, const Tensor& gate_up, const Tensor& h) {
  SPS_CHECK(is_act(h.dtype) || (h.dtype == DType::f64 && ex.device == Device::cpu));
  SPS_CHECK(gate_up.dtype == h.dtype && is_shape(gate_up, h.rows, 2 * h.cols));
}

}  // namespace

void swiglu_forward(const Exec& ex, Tensor gate_up, Tensor h) {
  check(ex, gate_up, h);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return swiglu_forward_cuda(ex, gate_up, h);
  h.dtype == DType::f64 ? swiglu_forward_ref(gate_up, h) : swiglu_forward_cpu(gate_up, h);
}

void swiglu_backward(const Exec& ex, Tensor gate_up, Tensor dh, Tensor d_gate_up, Tensor h) {
  check(ex, gate_up, dh);
  SPS_CHECK(d_gate_up.dtype == dh.dtype && is_shape(d_gate_up, gate_up.rows, gate_up.cols));
  SPS_CHECK(d_gate_up.data != gate_up.data || d_gate_up.stride == gate_up.stride || gate_up.rows <= 1);
  SPS_CHECK(h.empty() || (h.dtype == dh.dtype && is_shape(h, dh.rows, dh.cols)));
  SPS_CHECK(h.data != dh.data || h.stride == dh.stride || h.rows <= 1);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return swiglu_backward_cuda(ex, gate_up, dh, d_gate_up, h);
  dh.dtype == DType::f64 ? swiglu_backward_ref(gate_up, dh, d_gate_up, h)
                         : swiglu_backward_cpu(gate_up, dh, d_gate_up, h);
}

}  // namespace sps::ops
