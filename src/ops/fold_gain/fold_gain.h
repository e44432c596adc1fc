// Folding a norm's gain into the product behind it: (xhat * gain) w^T = xhat (w * gain)^T. Several readers of
// one state level share the normalised rows xhat and one wide product, although each has its own gain
// (two-tower spec, section 1.3).
//   forward   y[n, k] = w[n, k] * gain[k]
//   backward  dw[n, k] += dy[n, k] * gain[k]         dgain[k] += sum_n dy[n, k] * w[n, k]
// Shapes   w, y, dy, dw [out, in]; gain, dgain [1, in].  Types: w, gain, dy, dw, dgain f32; y act dtype; f64
// reference.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void fold_gain_forward(const Exec& ex, Tensor w, Tensor gain, Tensor y);
void fold_gain_backward(const Exec& ex, Tensor dy, Tensor w, Tensor gain, Tensor dw, Tensor dgain);

}  // namespace sps::ops
