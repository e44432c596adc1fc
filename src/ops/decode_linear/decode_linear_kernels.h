// The code behind decode_linear.h; all shapes positive.
#pragma once

#include "ops/amx.h"
#include "ops/decode_linear/decode_linear.h"

namespace sps::ops {

// Dot products in vectors of floats.
void decode_linear_cpu(Tensor x, Tensor w, Tensor y);
#ifdef SPS_AMX
// bf16 on tiles. Uses ScratchSlot::gemm of every thread.
void decode_linear_on_tiles(Tensor x, Tensor w, Tensor y);
#endif

}  // namespace sps::ops
