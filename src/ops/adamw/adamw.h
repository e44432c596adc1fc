// AdamW with decoupled weight decay (Loshchilov & Hutter 2019), the update of both papers (training spec,
// section 4):
//   g = scale * grad;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w -= lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * w)
// Shapes   w, grad, m, v: one row of n numbers, f32 (f64 in the reference), all dense; w_act, if not empty,
// receives
//          the new weights rounded to bf16.  t counts from 1. `scale` carries gradient clipping.
#pragma once

#include <cmath>
#include <span>

#include "tensor/exec.h"

namespace sps::ops {

struct AdamW {
  double lr = 6e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1;
  int64_t t = 1;
  double scale = 1;
};

void adamw(const Exec& ex, const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act);

// The same for many tensors, each with settings of its own; on a GPU dozens of them in one launch.
struct AdamWUpdate {
  AdamW settings;
  Tensor w, grad, m, v, w_act;
};
void adamw(const Exec& ex, std::span<const AdamWUpdate> updates);

// The scalars of a step in f32, folded in double and rounded once.
struct AdamWStep {
  float scale, beta1, grad1, beta2, grad2, rate, correct, eps, decay;

  AdamWStep() = default;
  explicit AdamWStep(const AdamW& p)
      : scale(float(p.scale)),
        beta1(float(p.beta1)),
        grad1(float(1 - p.beta1)),
        beta2(float(p.beta2)),
        grad2(float(1 - p.beta2)),
        rate(float(p.lr / (1 - std::pow(p.beta1, double(p.t))))),
        correct(float(1 / std::sqrt(1 - std::pow(p.beta2, double(p.t))))),
        eps(float(p.eps)),
        decay(float(p.lr * p.decay)) {}
};

// On a GPU, for steps that are recorded: the settings, one for each update, and what stands in place of their
// `scale` ([1, 1] f32) are read there when the step runs. A scale below 0 leaves everything as it is.
void adamw(const Exec& ex, std::span<const AdamWUpdate> updates, std::span<const AdamWStep> steps,
           Tensor scale);

}  // namespace sps::ops
