#include "train/train_step.h"

#include <algorithm>
#include <cmath>

#include "ops/clip/clip.h"
#include "score/model_input.h"
#include "tensor/device.h"

namespace sps {

bool StepResult::finite() const {
  return std::isfinite(loss) && std::isfinite(gradient.norm);
}

StepResult train_step(Model& model, AdamWOptimizer& optimizer, std::span<const Batch> batches,
                      const ops::AdamW& settings, double clip, const std::function<void()>& meanwhile) {
  StepResult s;
  for (const Batch& batch : batches) s.scored += batch.scored;
  const double scored = double(std::max<int64_t>(s.scored, 1));
  ParameterStore& store = model.store();
  const Exec ex = exec_on(store.device());
  store.zero_gradients(ex);
  for (const Batch& batch : batches) model.start_train(model_input(batch), 1 / scored);

  if (ex.device == Device::cuda) {
    if (s.scored > 0) optimizer.start(ex, store, settings, clip, model.loss_flag(), model.options().graphs);
    if (meanwhile) meanwhile();
    s.loss = model.take_loss().nll / scored;
    if (s.scored > 0) s.gradient = optimizer.take_norm();
    return s;
  }
  s.loss = model.take_loss().nll / scored;
  s.gradient = gradient_norm(ex, store);
  if (s.finite() && s.scored > 0)
    optimizer.step(ex, store, settings, ops::clip_factor(s.gradient.norm, clip));
  return s;
}

}  // namespace sps
