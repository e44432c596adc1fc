// The GPU's code behind decode_linear.h; all shapes positive. (Apart from decode_linear_kernels.h, which CUDA
// sources cannot include.)
#pragma once

#include "ops/decode_linear/decode_linear.h"

namespace sps::ops {

enum class DecodeEnd : int { store, swiglu, add };  // what becomes of the sums

struct DecodeCall {
  DecodeRows x;
  Tensor w, y, rest;  // y is h, s
  DecodeEnd end = DecodeEnd::store;
};

// Rows up to which every block reads all of x; with more of bf16, from sm_90 on, clusters share it. No bit
// depends on it: tests and benchmarks change it.
extern int most_direct_rows;

// The norm, the product and its end for at most kFewDecodeRows rows. False, and nothing done, where the
// kernels do not serve the shapes: operands that cannot be read 16 bytes at a time, very long rows.
bool decode_linear_cuda(const Exec& ex, const DecodeCall& call);

}  // namespace sps::ops
