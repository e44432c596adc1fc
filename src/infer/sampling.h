// Choosing the next id from logits (inference spec, section 5). All paths are exact and defined for every
// input: ties go to the lowest id, top_k keeps exactly k ids, top_p the smallest set that reaches p.
//
// The order of the rules: repetition penalty, forbidden ids, greedy if the temperature is 0; else
// temperature, top_k, top_p of what top_k left, min_p, one draw.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/rng.h"

namespace sps {

struct SamplingOptions {
  double temperature = 0;  // 0: the largest logit
  int64_t top_k = 0;       // 0: all
  double top_p = 1;        // (0, 1]
  double min_p = 0;        // [0, 1]: only ids at least so likely, as a part of the likeliest's probability
  double repetition_penalty =
      1;  // > 0: logits of ids in the text so far are divided by it, negative ones multiplied
  uint64_t seed = 0;
};

// Usage error that names the option if a value makes no sense.
void check(const SamplingOptions& options);

class NextId {
 public:
  explicit NextId(const SamplingOptions& options);
  // `forbidden` ids (true) are never drawn; `seen` ids (true; may be empty) are those of the text so far.
  // Draw number n uses the n-th random number of the seed. Error if no id is left or a logit is NaN.
  int32_t draw(std::span<const float> logits, const std::vector<bool>& forbidden, uint64_t n,
               const std::vector<bool>& seen = {});

 private:
  void keep_top_k();
  void keep_top_p();
  double weight(int32_t id) const;
  bool larger(int32_t a, int32_t b) const;

  SamplingOptions options_;
  Rng rng_;
  std::span<const float> logits_;  // of the draw under way
  double largest_ = 0;
  std::vector<float> penalised_;
  std::vector<int32_t> order_;   // candidates
  std::vector<double> weights_;  // of the candidates, the likeliest has 1
};

// Natural logarithm of the probability that the model itself gives an id: softmax of the logits as they are,
// forbidden ids included. -inf where it is impossible; NaN if a logit is.
double log_probability(std::span<const float> logits, int32_t id);

}  // namespace sps
