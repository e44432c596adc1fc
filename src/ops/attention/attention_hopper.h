// bf16 attention with Hopper's instructions (sm_90a).
#pragma once

#include "ops/attention/attention_cuda.h"

namespace sps::ops::attention {

// Head dimension, alignment and GPU are right for these kernels.
bool hopper_serves(const Problem& problem);
void forward_hopper(const Exec& ex, const Problem& problem);
void backward_hopper(const Exec& ex, const Problem& problem);

}  // namespace sps::ops::attention
