// One optimizer step: passes over the micro-batches, the norm of the gradients, clipping, the update.
#pragma once

#include <functional>
#include <span>

#include "data/batch.h"
#include "model/model.h"
#include "optim/adamw_optimizer.h"

namespace sps {

struct StepResult {
  int64_t scored = 0;
  double loss = 0;  // nats per scored token before the update
  GradientNorm gradient;
  bool finite() const;  // loss and norm; else neither weights nor moments have been touched
};

// The loss is the mean over the scored positions of all batches; a step in which nothing is scored updates
// nothing. `settings` but for t, scale; `clip`: limit of the norm, 0 = none.
//
// On a GPU all of it is issued without a look at what it gives: `meanwhile` is called when it is under way
// (the batches may change from then on), and the host waits once, at the end. As graphs where the model's
// options say so. On the CPU `meanwhile` is not called.
StepResult train_step(Model& model, AdamWOptimizer& optimizer, std::span<const Batch> batches,
                      const ops::AdamW& settings, double clip, const std::function<void()>& meanwhile = {});

}  // namespace sps
