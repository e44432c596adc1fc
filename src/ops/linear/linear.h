// Linear: y = x w^T, without bias (model spec, "Common backbone"). Matrix products come from oneDNN on the
// CPU, and from our own kernels where it has AMX; from cuBLASLt on a GPU, f32 ones in plain f32 arithmetic.
//
// Shapes   x [rows, in]; w [out, in]; y [rows, out]; rows may be strided views (stride >= cols)
// Types    x, w, dy of one act dtype (f32 or bf16); y and dx act dtype or f32; dw f32. Accumulation in f32.
//          f64 throughout in the reference. A bf16 y or dx that is added to may be rounded twice on a GPU.
// Gradient dx = dy w (or dx += dy w)          dw += dy^T x
// Same bits whatever the number of threads, and in every run of a build on the same kind of GPU: all cuts
// depend on the shape only, and sums over parts of the rows are added in order.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

enum class Accumulate : bool { no, yes };

void linear_forward(const Exec& ex, Tensor x, Tensor w, Tensor y, Accumulate acc = Accumulate::no);
void linear_backward_input(const Exec& ex, Tensor dy, Tensor w, Tensor dx, Accumulate acc = Accumulate::no);
void linear_backward_weight(const Exec& ex, Tensor dy, Tensor x, Tensor dw);

// Whether this CPU has instructions for bf16 products (AVX-512 bf16 or AMX). Without them bf16 products still
// work: operands are converted and multiplied in f32, so bf16 saves memory there but no time.
bool bf16_is_fast();

}  // namespace sps::ops
