// Output head and cross-entropy in one: logits = x w^T are made for a chunk of rows at a time and never
// stored whole.
//   nll_r = log sum_v exp(logits_rv) - logits_r,target        natural logarithm, over all rows of w (model
//   spec, 4)
// A row with target < 0 carries no loss: nll 0, zero gradient. On a GPU targets cannot be looked at
// beforehand: one that is not below vocab makes nll NaN.
//
// Shapes   x [rows, d]; w [vocab, d]; targets [rows]; nll [rows, 1] f32; scale [1, 1] f32
// Types    x, w, dx act dtype (f32, bf16; f64 in the reference); dw f32; logits, softmax and loss f32
//
// head_loss_train does forward and backward in one pass, for the loss  scale * sum_r nll_r  (scale = 1 /
// number of counted positions of the whole global batch; it lies on the device, so that a recorded pass
// serves any):
//   d_logits = scale * (softmax(logits) - onehot(target))      dx = d_logits w      dw += d_logits^T x
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

void head_loss_forward(const Exec& ex, Tensor x, Tensor w, std::span<const int32_t> targets, Tensor nll);
void head_loss_train(const Exec& ex, Tensor x, Tensor w, std::span<const int32_t> targets, Tensor scale,
                     Tensor nll, Tensor dx, Tensor dw);

}  // namespace sps::ops
