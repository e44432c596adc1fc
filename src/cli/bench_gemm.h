// The matrix-product ceiling of this machine: oneDNN's own matmul, threads left to the library.
#pragma once

#include "tensor/tensor.h"

namespace sps {

// FLOP/s of the fastest of several products C = A B with n = 1024, 2048 and 4096 rows and columns (f32 or bf16).
double gemm_flops_per_second(DType dtype);

}  // namespace sps
