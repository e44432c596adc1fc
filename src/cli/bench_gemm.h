// The matrix-product ceiling of this machine: on the CPU oneDNN's own matmul, threads left to the library; on
// a GPU cuBLASLt's as the linear operation calls it.
#pragma once

#include "tensor/tensor.h"

namespace sps {

// FLOP/s of the fastest of several products C = A B with n = 1024, 2048 and 4096 rows and columns (f32 or
// bf16).
double gemm_flops_per_second(DType dtype);

// The same on the GPU, with n = 8192: single products in a row for about a quarter of a second. `best`
// flatters: the clock falls as the chip warms up, so hold a step of many milliseconds against the median.
struct GemmRate {
  double median = 0, best = 0;
};
GemmRate gpu_gemm_flops_per_second(DType dtype);

}  // namespace sps
