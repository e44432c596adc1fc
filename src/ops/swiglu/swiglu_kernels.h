// The implementations behind swiglu.h; arguments as there, shapes already checked.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void swiglu_forward_ref(Tensor gate_up, Tensor h);
void swiglu_backward_ref(Tensor gate_up, Tensor dh, Tensor d_gate_up, Tensor h);

void swiglu_forward_cpu(Tensor gate_up, Tensor h);
void swiglu_backward_cpu(Tensor gate_up, Tensor dh, Tensor d_gate_up, Tensor h);

void swiglu_forward_cuda(const Exec& ex, Tensor gate_up, Tensor h);
void swiglu_backward_cuda(const Exec& ex, Tensor gate_up, Tensor dh, Tensor d_gate_up, Tensor h);

}  // namespace sps::ops
