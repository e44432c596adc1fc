// The implementations behind fold_gain.h; arguments as there, shapes already checked.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void fold_gain_forward_ref(Tensor w, Tensor gain, Tensor y);
void fold_gain_backward_ref(Tensor dy, Tensor w, Tensor gain, Tensor dw, Tensor dgain);

void fold_gain_forward_cpu(Tensor w, Tensor gain, Tensor y);
void fold_gain_backward_cpu(Tensor dy, Tensor w, Tensor gain, Tensor dw, Tensor dgain);

void fold_gain_forward_cuda(const Exec& ex, Tensor w, Tensor gain, Tensor y);
void fold_gain_backward_cuda(const Exec& ex, Tensor dy, Tensor w, Tensor gain, Tensor dw, Tensor dgain);

}  // namespace sps::ops
