// SwiGLU's product: h = silu(gate) * up, silu(z) = z / (1 + exp(-z)) (model spec, "Common backbone", row
// mlp).
//
// Shapes   gate_up [rows, 2*width]: gate in the first `width` columns, up in the rest; h [rows, width]
// Gradient s = sigmoid(gate):  dup = dh * gate * s      dgate = dh * up * s * (1 + gate * (1 - s))
//          d_gate_up may be gate_up itself. `h`, if not empty, is made again, the bits of the forward pass:
//          nobody need keep it. It may be dh itself.
// Types    act dtype (f32, bf16; f64 in the reference), evaluated in f32
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void swiglu_forward(const Exec& ex, Tensor gate_up, Tensor h);
void swiglu_backward(const Exec& ex, Tensor gate_up, Tensor dh, Tensor d_gate_up, Tensor h = {});

}  // namespace sps::ops
