// The implementations behind adamw.h; arguments as there, shapes already checked.
#pragma once

#include <cmath>

#include "ops/adamw/adamw.h"

namespace sps::ops {

void adamw_ref(const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act);
void adamw_cpu(const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act);
void adamw_cuda(const Exec& ex, std::span<const AdamWUpdate> updates);

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

// Moments below this are zero. A weight whose gradient stays zero would otherwise drag its moments through
// the denormal numbers for good (0.9 times the smallest one rounds to itself), which processors compute
// ten times as slowly. Neither moment is visible next to eps at that size.
constexpr float kVanished = 1e-36F;

}  // namespace sps::ops
