// The code behind linear.h, and the product that linear and cross_entropy share.
#pragma once

#include "ops/linear/linear.h"

namespace sps::ops {

void linear_forward_ref(Tensor x, Tensor w, Tensor y, Accumulate acc);
void linear_backward_input_ref(Tensor dy, Tensor w, Tensor dx, Accumulate acc);
void linear_backward_weight_ref(Tensor dy, Tensor x, Tensor dw);

enum class Transposed : bool { no, yes };

// c (+)= op(a) op(b) on all threads, where op transposes if asked to. a and b of one dtype, f32 or bf16; c
// f32 or that dtype. Uses ScratchSlot::gemm of every thread.
void product_cpu(Tensor a, Transposed a_transposed, Tensor b, Transposed b_transposed, Tensor c,
                 Accumulate acc);

// The same on a GPU.
void product_cuda(const Exec& ex, Tensor a, Transposed a_transposed, Tensor b, Transposed b_transposed,
                  Tensor c, Accumulate acc);
// The same, slowly, for shapes that cuBLASLt has no algorithm for; c not empty.
void any_product_cuda(const Exec& ex, Tensor a, Transposed a_transposed, Tensor b, Transposed b_transposed,
                      Tensor c, Accumulate acc);

// dw += dy^T x; types and scratch as in product_cpu.
void weight_gradient_cpu(Tensor dy, Tensor x, Tensor dw);

}  // namespace sps::ops
