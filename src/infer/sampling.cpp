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
  if (!(o.min_p >= 0 && o.min_p <= 1)) usage_error("min_p = {}: expected a number from 0 to 1", o.min_p);
  if (!(o.repetition_penalty > 0) || !std::isfinite(o.repetition_penalty))
    usage_error("repetition_penalty = {}: expected a positive number (1 changes nothing)",
                o.repetition_penalty);
}

NextId::NextId(const SamplingOptions& options) : options_(options), rng_(options.seed, "sampling") {
  check(options);
}

bool NextId::larger(int32_t a, int32_t b) const {
  const float la = logits_[size_t(a)], lb = logits_[size_t(b)];
  return la != lb ? la > lb : a < b;
}

// As a part of the likeliest id's. Differences first: a tiny temperature then gives 0 or 1, and so does an
// infinite logit; never inf - inf.
double NextId::weight(int32_t id) const {
  const double logit = logits_[size_t(id)];
  return logit == largest_ ? 1.0 : std::exp((logit - largest_) / options_.temperature);
}

int32_t NextId::draw(std::span<const float> logits, const std::vector<bool>& forbidden, uint64_t n,
                     const std::vector<bool>& seen) {
  logits_ = logits;
  if (options_.repetition_penalty != 1 && !seen.empty()) {
    penalised_.assign(logits.begin(), logits.end());
    const auto penalty = float(options_.repetition_penalty);
    for (size_t id = 0; id < logits.size(); ++id)
      if (seen[id]) penalised_[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
    logits_ = penalised_;
  }
  order_.clear();
  int32_t best = -1;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (forbidden[id]) continue;
    if (std::isnan(logits_[id])) fail("the logit of id {} is not a number", id);
    if (logits_[id] == -INFINITY) continue;
    order_.push_back(int32_t(id));
    if (best < 0 || logits_[id] > logits_[size_t(best)]) best = int32_t(id);
  }
  if (best < 0) fail("no id is left to choose from: every logit is -inf or forbidden");
  if (options_.temperature == 0) return best;

  if (options_.top_k > 0 && size_t(options_.top_k) < order_.size()) keep_top_k();
  largest_ = logits_[size_t(best)];
  if (options_.top_p < 1) keep_top_p();
  weights_.clear();
  for (const int32_t id : order_) weights_.push_back(weight(id));
  double total = 0;
  size_t kept = 0;
  for (size_t i = 0; i < order_.size(); ++i) {
    if (weights_[i] < options_.min_p) continue;
    order_[kept] = order_[i];
    total += weights_[kept++] = weights_[i];
  }
  double u = rng_.uniform(n) * total;
  size_t last = 0;  // where rounding leaves a little of u
  for (size_t i = 0; i < kept; ++i) {
    if (u < weights_[i]) return order_[i];
    u -= weights_[i];
    if (weights_[i] > 0) last = i;
  }
  return order_[last];
}

void NextId::keep_top_k() {
  std::partial_sort(order_.begin(), order_.begin() + options_.top_k, order_.end(),
                    [&](int32_t a, int32_t b) { return larger(a, b); });
  order_.resize(size_t(options_.top_k));
}

// The candidates are put in order piece by piece: the set is usually a small part of the vocabulary.
void NextId::keep_top_p() {
  const auto by_size = [&](int32_t a, int32_t b) { return larger(a, b); };
  double total = 0;
  for (const int32_t id : order_) total += weight(id);
  double mass = 0;
  size_t kept = 0, sorted = 0;
  // The small allowance lets {.5, .3} reach .8 although the sum of the two is rounded.
  while (kept < order_.size() && mass < options_.top_p * total * (1 - 1e-12)) {
    if (kept == sorted) {
      sorted = std::min(order_.size(), 4 * sorted + 64);
      std::partial_sort(order_.begin() + std::ptrdiff_t(kept), order_.begin() + std::ptrdiff_t(sorted),
                        order_.end(), by_size);
    }
    mass += weight(order_[kept++]);
  }
  order_.resize(kept);
}

double log_probability(std::span<const float> logits, int32_t id) {
  double largest = -INFINITY;
  for (const float l : logits) {
    if (std::isnan(l)) return NAN;
    largest = std::max(largest, double(l));
  }
  const auto apart = [&](float l) { return double(l) == largest ? 0.0 : double(l) - largest; };
  double total = 0;
  for (const float l : logits) total += std::exp(apart(l));
  return apart(logits[size_t(id)]) - std::log(total);
}

}  // namespace sps
