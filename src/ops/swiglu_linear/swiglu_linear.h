// SwiGLU together with the matrix product before it: on a CPU with tiles the gate's values are computed from
// sums that are still in cache, and the widest tensors of a layer are passed over once less in each
// direction.
//
//   forward    gate_up = x w^T            h = silu(gate) * up              x [rows, in]; w [2*width, in];
//                                                                          gate_up [rows, 2*width]; h [rows,
//                                                                          width]
//   backward   dh = dy w                  d_gate_up = SwiGLU's gradient    dy [rows, out]; w [out, width];
//                                                                          dh [rows, width]: scratch, its
//                                                                          contents afterwards are undefined,
//                                                                          unless they are h
// Exactly what linear.h and swiglu.h give one after the other, the same bits for any shape and number of
// threads; types and views as there. d_gate_up may be gate_up itself. `h`, if not empty, is made again for
// the gradient of the product behind it; it may be dh.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void swiglu_linear_forward(const Exec& ex, Tensor x, Tensor w, Tensor gate_up, Tensor h);
void swiglu_linear_backward(const Exec& ex, Tensor dy, Tensor w, Tensor gate_up, Tensor dh, Tensor d_gate_up,
                            Tensor h = {});

}  // namespace sps::ops
