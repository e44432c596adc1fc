// dw += dy^T x on AMX tiles. oneDNN needs dy transposed in memory first and then reaches a quarter of what
// the tile unit can do on the narrow matrices of small models.
#pragma once

#include "ops/amx.h"
#include "tensor/tensor.h"

#ifdef SPS_AMX

namespace sps::ops {

// dy [rows, out], x [rows, in] bf16; dw [out, in] f32; none empty. Call only if amx_permitted(). Uses
// ScratchSlot::gemm of every thread. Same bits whatever the number of threads.
void weight_gradient_on_tiles(Tensor dy, Tensor x, Tensor dw);

}  // namespace sps::ops

#endif
