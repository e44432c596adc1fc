// c (+)= a op(b) on AMX tiles for many rows: the forward product of a layer and the gradient of its input.
// Rows of a are read and rows of c written where they lie, whatever their stride; only b is laid out anew.
#pragma once

#include "ops/amx.h"
#include "tensor/tensor.h"

#ifdef SPS_AMX

namespace sps::ops {

// a [m, k] and b ([n, k] if b_transposed, else [k, n]) bf16; c [m, n] f32 or bf16; none empty. Call only if
// amx_permitted(). Uses ScratchSlot::gemm of every thread. Same bits whatever the number of threads, and for
// a row whatever the other rows.
void row_product_on_tiles(Tensor a, Tensor b, bool b_transposed, Tensor c, bool accumulate);

}  // namespace sps::ops

#endif
