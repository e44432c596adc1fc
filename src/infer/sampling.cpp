#include "infer/sampling.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace sps {

void check(const SamplingOptions& o) {
  if (!(o.temperature >= 0) || !std::isfinite(o.temperature))
    usage_error("temperature = {}: expected 0 (greedy) or a positive number", o.temperature);
  if (o.top_k < 0) usage_error("top_k = {}: expected 0 (all) or a positive number", o.top_k);
  if (!(o.top_p > 0 && o.top_p <= 1))
    usage_error("top_p = {}: expected a number above 0 and at most 1", o.top_p);
}

NextId::NextId(const SamplingOptions& options) : options_(options), rng_(options.seed, "sampling") {
  check(options);
}

int32_t NextId::draw(std::span<const float> logits, const std::vector<bool>& forbidden, uint64_t n) {
  order_.clear();
  for (size_t id = 0; id < logits.size(); ++id) {
    if (forbidden[id]) continue;
    if (std::isnan(logits[id])) fail("the logit of id {} is not a number", id);
    if (logits[id] > -INFINITY) order_.push_back(int32_t(id));
  }
  if (order_.empty()) fail("no id is left to choose from: every logit is -inf or forbidden");
  const auto larger = [&](int32_t a, int32_t b) {
    const float la = logits[size_t(a)], lb = logits[size_t(b)];
    return la != lb ? la > lb : a < b;
  };
  if (options_.temperature == 0) return *std::min_element(order_.begin(), order_.end(), larger);

  size_t keep = order_.size();
  if (options_.top_k > 0) keep = std::min(keep, size_t(options_.top_k));
  // Only top_p needs the whole order; top_k needs its first part.
  std::partial_sort(order_.begin(), order_.begin() + std::ptrdiff_t(keep), order_.end(), larger);
  order_.resize(keep);
  const double largest = logits[size_t(order_[0])];
  weights_.clear();
  double total = 0;
  for (const int32_t id : order_) {
    // Differences first: a tiny temperature then gives 0 or 1, and so does an infinite logit; never inf -
    // inf.
    const double logit = logits[size_t(id)];
    weights_.push_back(logit == largest ? 1.0 : std::exp((logit - largest) / options_.temperature));
    total += weights_.back();
  }
  if (options_.top_p < 1) {
    double mass = 0;
    size_t kept = 0;
    // The small allowance lets {.5, .3} reach .8 although the sum of the two is rounded.
    while (kept < weights_.size() && mass < options_.top_p * total * (1 - 1e-12)) mass += weights_[kept++];
    weights_.resize(kept);
    total = mass;
  }
  double u = rng_.uniform(n) * total;
  for (size_t i = 0; i < weights_.size(); ++i) {
    if (u < weights_[i]) return order_[i];
    u -= weights_[i];
  }
  return order_[weights_.size() - 1];
}

}  // namespace sps
