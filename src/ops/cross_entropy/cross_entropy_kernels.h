// The code behind cross_entropy.h.
#pragma once

#include "ops/cross_entropy/cross_entropy.h"

namespace sps::ops {

struct HeadLoss {
  Tensor x, w;
  std::span<const int32_t> targets;
  Tensor nll;
  Tensor scale, dx, dw;
  bool train = false;  // whether dx and dw are wanted
};

void head_loss_ref(const HeadLoss& loss);
void head_loss_cpu(const HeadLoss& loss);
void head_loss_cuda(const Exec& ex, const HeadLoss& loss);

}  // namespace sps::ops
