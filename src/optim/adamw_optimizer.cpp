#include "optim/adamw_optimizer.h"

#include <algorithm>
#include <cmath>

#include "ops/clip/clip.h"
#include "tensor/device.h"

namespace sps {

namespace {

// `sums` of squares of what is trained, in order.
GradientNorm norm_of(const std::vector<Parameter>& list, std::span<const double> sums) {
  GradientNorm g;
  double squares = 0;
  size_t k = 0;
  for (const Parameter& p : list) {
    if (p.frozen) continue;
    if (!std::isfinite(sums[k]) && g.not_finite.empty()) g.not_finite = p.name;
    squares += sums[k++];
  }
  SPS_CHECK(k == sums.size());
  g.norm = std::sqrt(squares);
  return g;
}

}  // namespace

GradientNorm gradient_norm(const Exec& ex, const ParameterStore& store) {
  std::vector<Tensor> gradients;
  for (size_t i = 0; i < store.list().size(); ++i)
    if (!store.list()[i].frozen) gradients.push_back(store.gradient(int(i)));
  return norm_of(store.list(), ops::sums_of_squares(ex, gradients));
}

AdamWOptimizer::AdamWOptimizer(const ParameterStore& store) : list_(store.list()), steps_(list_.size(), 0) {
  const auto lay_out = [&](Arena& arena) { lay_out_moments(list_, store.master(), arena, m_, v_); };
  Arena planning;
  lay_out(planning);
  memory_ = Arena(planning.peak(), store.device());
  lay_out(memory_);
  if (store.device() == Device::cpu) return;
  const auto trained = size_t(std::ranges::count(list_, false, &Parameter::frozen));
  host_ = Numbers(trained, Memory::pinned), device_ = Numbers(trained, Memory::device);
}

AdamWOptimizer::Numbers::Numbers(size_t count, Memory kind) {
  // Doubles first, so that all are aligned.
  const auto n = int64_t(count);
  const Device device = kind == Memory::device ? Device::cuda : Device::cpu;
  const size_t sums_bytes = count * sizeof(double), factor_bytes = sizeof(float);
  memory = Bytes(sums_bytes + factor_bytes + count * sizeof(ops::AdamWStep), kind);
  std::byte* const begin = memory.data();
  sums = {begin, 1, n, n, DType::f64, device};
  factor = {begin + sums_bytes, 1, 1, 1, DType::f32, device};
  steps = {reinterpret_cast<ops::AdamWStep*>(begin + sums_bytes + factor_bytes), count};
}

void AdamWOptimizer::count_steps(int64_t n) {
  for (size_t i = 0; i < list_.size(); ++i)
    if (!list_[i].frozen) steps_[i] += n;
}

std::vector<ops::AdamWUpdate> AdamWOptimizer::updates(const ParameterStore& store,
                                                      ops::AdamW settings) const {
  const double decay = settings.decay;
  std::vector<ops::AdamWUpdate> all;
  for (size_t i = 0; i < list_.size(); ++i) {
    if (list_[i].frozen) continue;
    const int64_t n = list_[i].count();
    settings.decay = list_[i].decays() ? decay : 0;
    settings.t = steps_[i];
    const Tensor rounded = store.compute() == DType::bf16 ? store.rounded(int(i)).reshaped(1, n) : Tensor{};
    all.push_back({settings, store.weight(int(i)).reshaped(1, n), store.gradient(int(i)).reshaped(1, n),
                   m_[i], v_[i], rounded});
  }
  return all;
}

void AdamWOptimizer::step(const Exec& ex, ParameterStore& store, ops::AdamW settings, double scale) {
  settings.scale = scale;
  count_steps(1);
  ops::adamw(ex, updates(store, settings));
}

void AdamWOptimizer::start(const Exec& ex, ParameterStore& store, const ops::AdamW& settings, double limit,
                           Tensor flag, bool graphs) {
  SPS_CHECK(ex.device == Device::cuda);
  done_.wait();  // the settings of the update before have been read
  count_steps(1);
  const std::vector<ops::AdamWUpdate> all = updates(store, settings);
  SPS_CHECK(all.size() == host_.steps.size());
  for (size_t k = 0; k < all.size(); ++k) host_.steps[k] = ops::AdamWStep(all[k].settings);
  const auto update = [&] { issue(ex, all, limit, flag); };
  if (graphs)
    graphs_.run(ex, {limit, store.all_gradients().data, flag.data}, update);
  else
    update();
  done_.set(ex);
}

void AdamWOptimizer::issue(const Exec& ex, std::span<const ops::AdamWUpdate> updates, double limit,
                           Tensor flag) {
  copy_bytes(ex, device_.steps.data(), host_.steps.data(), host_.steps.size_bytes());
  std::vector<Tensor> gradients;
  for (const ops::AdamWUpdate& u : updates) gradients.push_back(u.grad);
  ops::sums_of_squares(ex, gradients, device_.sums);
  ops::clip_factor(ex, device_.sums, flag, limit, device_.factor);
  ops::adamw(ex, updates, device_.steps, device_.factor);
  copy_bytes(ex, host_.sums.data, device_.sums.data, host_.results_bytes());
}

GradientNorm AdamWOptimizer::take_norm() {
  done_.wait();
  if (*host_.factor.as<float>() < 0) count_steps(-1);
  return norm_of(list_, {host_.sums.as<double>(), host_.steps.size()});
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
