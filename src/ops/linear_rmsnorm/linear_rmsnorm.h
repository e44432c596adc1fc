// RMSNorm together with the matrix product before it: on a CPU with tiles the norm reads rows that are still
// in cache, and the product's result never goes to memory.
//
//   forward    delta = x w^T        s, y, rstd = norm of residual + delta      x [rows, in]; w [d, in]
//   backward   dn = dy w            ds, ds_act, dgain = the norm's gradient    dy [rows, out]; w [out, d]
// Exactly what linear.h and rmsnorm.h (without pick) give one after the other, the same bits for any shape
// and number of threads; types, views and empty tensors as there. delta and dn [rows, d] are scratch of the
// act dtype: their contents afterwards are undefined. s may be residual, ds may be dres; nothing that is
// written may overlap x or dy.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void linear_rmsnorm_forward(const Exec& ex, Tensor x, Tensor w, Tensor residual, Tensor gain, float eps,
                            Tensor delta, Tensor s, Tensor y, Tensor rstd);
void linear_rmsnorm_backward(const Exec& ex, Tensor dy, Tensor w, Tensor dn, Tensor s, Tensor gain,
                             Tensor rstd, Tensor dres, Tensor ds, Tensor ds_act, Tensor dgain);

}  // namespace sps::ops
