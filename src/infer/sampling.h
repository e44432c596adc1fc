// Choosing the next id from logits: the options of a text, and one draw on the CPU. The rules, and draws for
// many texts at once, are those of ops/sample.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "ops/sample/sample.h"

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

using IdSet = std::vector<int32_t>;  // a bit for every id, as ops/sample reads them
IdSet id_set(const std::vector<bool>& ids);

class NextId {
 public:
  explicit NextId(const SamplingOptions& options);
  // `forbidden` ids (true) are never drawn; `seen` ids (true; may be empty) are those of the text so far.
  // Draw number n uses the n-th random number of the seed. Error if no id is left or a logit is NaN.
  int32_t draw(std::span<const float> logits, const std::vector<bool>& forbidden, uint64_t n,
               const std::vector<bool>& seen = {}) const;

  // What ops/sample is told for draw n; `set` is where it finds the text's ids.
  ops::SampleRow row(uint64_t n, int64_t set) const;

 private:
  SamplingOptions options_;
  Rng rng_;
};

// The sentence for a draw that was not possible.
std::string problem_text(const ops::Sampled& drawn);

using ops::log_probability;

}  // namespace sps
