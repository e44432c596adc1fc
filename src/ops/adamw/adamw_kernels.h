// The implementations behind adamw.h; arguments as there, shapes already checked.
#pragma once

#include "ops/adamw/adamw.h"

namespace sps::ops {

void adamw_ref(const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act);
void adamw_cpu(const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act);

}  // namespace sps::ops
