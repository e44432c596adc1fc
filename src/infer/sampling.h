// Choosing the next id from logits (inference spec, section 5). All paths are exact and defined for every input:
// ties go to the lowest id, top_k keeps exactly k ids, top_p the smallest set that reaches p.
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
  uint64_t seed = 0;
};

// Usage error that names the option if a value makes no sense.
void check(const SamplingOptions& options);

class NextId {
 public:
  explicit NextId(const SamplingOptions& options);
  // `forbidden` ids (true) are never drawn. Draw number n uses the n-th random number of the seed. Error
  // if no id is left or a logit is NaN.
  int32_t draw(std::span<const float> logits, const std::vector<bool>& forbidden, uint64_t n);

 private:
  SamplingOptions options_;
  Rng rng_;
  std::vector<int32_t> order_;
  std::vector<double> weights_;
};

}  // namespace sps
