// The implementations behind adamw.h; arguments as there, shapes already checked.
#pragma once

#include "ops/adamw/adamw.h"

namespace sps::ops {

void adamw_ref(const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act);
void adamw_cpu(const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act);
// `steps` and `scale` in the GPU's memory, in place of the updates' own settings; null: those.
void adamw_cuda(const Exec& ex, std::span<const AdamWUpdate> updates, const AdamWStep* steps,
                const float* scale);

// Moments below this are zero. A weight whose gradient stays zero would otherwise drag its moments through
// the denormal numbers for good (0.9 times the smallest one rounds to itself), which processors compute
// ten times as slowly. Neither moment is visible next to eps at that size.
constexpr float kVanished = 1e-36F;

}  // namespace sps::ops
