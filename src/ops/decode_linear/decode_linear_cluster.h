// Products of more rows than a block should read in full, from sm_90 on.
#pragma once

#include "ops/decode_linear/decode_linear_product.cuh"

namespace sps::ops::decode_product {

// The product of a call of up to kFewDecodeRows rows, its norm and its end included; `tiles` and nothing else
// of p is not set. False, and nothing done, where the kernel does not serve it: other GPUs, rows of x that do
// not fit.
bool launch_cluster(const Exec& ex, const Product<bf16>& p);

}  // namespace sps::ops::decode_product
