// The rules one after the other, as they read.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/sample/sample_kernels.h"

namespace sps::ops {

namespace {

bool holds(const int32_t* set, size_t id) {
  return (uint32_t(set[id / 32]) >> (id % 32) & 1) != 0;
}

// Keeps its memory for the next row.
class Draw {
 public:
  Sampled run(std::span<const float> logits, const SampleRow& row, const int32_t* forbidden,
              const int32_t* seen);

 private:
  void keep_top_k();
  void keep_top_p();
  double weight(int32_t id) const;
  bool larger(int32_t a, int32_t b) const;

  SampleRow row_;
  std::span<const float> logits_;
  double largest_ = 0;
  std::vector<float> penalised_;
  std::vector<int32_t> order_;   // candidates
  std::vector<double> weights_;  // of the candidates, the likeliest has 1
};

bool Draw::larger(int32_t a, int32_t b) const {
  const float la = logits_[size_t(a)], lb = logits_[size_t(b)];
  return la != lb ? la > lb : a < b;
}

// As a part of the likeliest id's. Differences first: a tiny temperature then gives 0 or 1, and so does an
// infinite logit; never inf - inf.
double Draw::weight(int32_t id) const {
  const double logit = logits_[size_t(id)];
  return logit == largest_ ? 1.0 : std::exp((logit - largest_) / row_.temperature);
}

Sampled Draw::run(std::span<const float> logits, const SampleRow& row, const int32_t* forbidden,
                  const int32_t* seen) {
  row_ = row, logits_ = logits;
  if (row.repetition_penalty != 1 && seen != nullptr) {
    penalised_.assign(logits.begin(), logits.end());
    const float penalty = row.repetition_penalty;
    for (size_t id = 0; id < logits.size(); ++id)
      if (holds(seen, id)) penalised_[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
    logits_ = penalised_;
  }
  order_.clear();
  const bool draws = row.temperature > 0;
  int32_t best = -1;
  for (size_t id = 0; id < logits.size(); ++id) {
    if (holds(forbidden, id)) continue;
    if (std::isnan(logits_[id])) return {NAN, int32_t(id), SampleProblem::not_a_number};
    if (logits_[id] == -INFINITY) continue;
    if (draws) order_.push_back(int32_t(id));
    if (best < 0 || logits_[id] > logits_[size_t(best)]) best = int32_t(id);
  }
  if (best < 0) return {0, -1, SampleProblem::nothing_left};
  if (!draws) return {0, best};

  if (row.top_k > 0 && size_t(row.top_k) < order_.size()) keep_top_k();
  largest_ = logits_[size_t(best)];
  if (row.top_p < 1) keep_top_p();
  weights_.clear();
  for (const int32_t id : order_) weights_.push_back(weight(id));
  double total = 0;
  size_t kept = 0;
  for (size_t i = 0; i < order_.size(); ++i) {
    if (weights_[i] < row.min_p) continue;
    order_[kept] = order_[i];
    total += weights_[kept++] = weights_[i];
  }
  double u = row.uniform * total;
  size_t last = 0;  // where rounding leaves a little of u
  for (size_t i = 0; i < kept; ++i) {
    if (u < weights_[i]) return {0, order_[i]};
    u -= weights_[i];
    if (weights_[i] > 0) last = i;
  }
  return {0, order_[last]};
}

void Draw::keep_top_k() {
  std::partial_sort(order_.begin(), order_.begin() + row_.top_k, order_.end(),
                    [&](int32_t a, int32_t b) { return larger(a, b); });
  order_.resize(size_t(row_.top_k));
}

// The candidates are put in order piece by piece: the set is usually a small part of the vocabulary.
void Draw::keep_top_p() {
  const auto by_size = [&](int32_t a, int32_t b) { return larger(a, b); };
  double total = 0;
  for (const int32_t id : order_) total += weight(id);
  double mass = 0;
  size_t kept = 0, sorted = 0;
  // The small allowance lets {.5, .3} reach .8 although the sum of the two is rounded.
  while (kept < order_.size() && mass < row_.top_p * total * (1 - 1e-12)) {
    if (kept == sorted) {
      sorted = std::min(order_.size(), 4 * sorted + 64);
      std::partial_sort(order_.begin() + std::ptrdiff_t(kept), order_.begin() + std::ptrdiff_t(sorted),
                        order_.end(), by_size);
    }
    mass += weight(order_[kept++]);
  }
  order_.resize(kept);
}

}  // namespace

Sampled sample_row_cpu(std::span<const float> logits, const SampleRow& row, const int32_t* forbidden,
                       const int32_t* seen) {
  static thread_local Draw draw;
  Sampled s = draw.run(logits, row, forbidden, seen);
  if (row.log_probability != 0 && s.problem == SampleProblem::none)
    s.log_probability = log_probability(logits, s.id);
  return s;
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

}  // namespace sps::ops
