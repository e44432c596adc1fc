#include "optim/adamw_optimizer.h"

#include <cmath>

#include "ops/clip/clip.h"
#include "tensor/device.h"

namespace sps {

GradientNorm gradient_norm(const Exec& ex, const ParameterStore& store) {
  std::vector<size_t> trained;
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < store.list().size(); ++i) {
    if (store.list()[i].frozen) continue;
    trained.push_back(i);
    gradients.push_back(store.gradient(int(i)));
  }
  const std::vector<double> sums = ops::sums_of_squares(ex, gradients);
  GradientNorm g;
  double squares = 0;
  for (size_t k = 0; k < sums.size(); ++k) {
    if (!std::isfinite(sums[k]) && g.not_finite.empty()) g.not_finite = store.list()[trained[k]].name;
    squares += sums[k];
  }
  g.norm = std::sqrt(squares);
  return g;
}

AdamWOptimizer::AdamWOptimizer(const ParameterStore& store) : list_(store.list()), steps_(list_.size(), 0) {
  const auto lay_out = [&](Arena& arena) { lay_out_moments(list_, store.master(), arena, m_, v_); };
  Arena planning;
  lay_out(planning);
  memory_ = Arena(planning.peak(), store.device());
  lay_out(memory_);
}

void AdamWOptimizer::step(const Exec& ex, ParameterStore& store, ops::AdamW settings, double scale) {
  const double decay = settings.decay;
  settings.scale = scale;
  std::vector<ops::AdamWUpdate> updates;
  for (size_t i = 0; i < list_.size(); ++i) {
    if (list_[i].frozen) continue;
    const int64_t n = list_[i].count();
    settings.decay = list_[i].decays() ? decay : 0;
    settings.t = ++steps_[i];
    const Tensor rounded = store.compute() == DType::bf16 ? store.rounded(int(i)).reshaped(1, n) : Tensor{};
    updates.push_back({settings, store.weight(int(i)).reshaped(1, n), store.gradient(int(i)).reshaped(1, n),
                       m_[i], v_[i], rounded});
  }
  ops::adamw(ex, updates);
}

void AdamWOptimizer::adopt(const AdamWOptimizer& other) {
  for (size_t i = 0; i < list_.size(); ++i)
    for (size_t k = 0; k < other.list_.size(); ++k) {
      if (list_[i].name != other.list_[k].name || list_[i].frozen || other.list_[k].frozen) continue;
      SPS_CHECK(list_[i].shape == other.list_[k].shape && m_[i].dtype == other.m_[k].dtype);
      copy_tensor(other.m_[k], m_[i]);
      copy_tensor(other.v_[k], v_[i]);
      steps_[i] = other.steps_[k];
    }
}

std::vector<NamedTensor> AdamWOptimizer::named_moments() const {
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < list_.size(); ++i) {
    if (list_[i].frozen) continue;
    tensors.push_back({"m." + list_[i].name, list_[i].shape, m_[i]});
    tensors.push_back({"v." + list_[i].name, list_[i].shape, v_[i]});
  }
  return tensors;
}

void AdamWOptimizer::set_steps(std::vector<int64_t> steps) {
  SPS_CHECK(steps.size() == steps_.size());
  steps_ = std::move(steps);
}

}  // namespace sps
