// AdamW over all parameters of a model: the two moments, per-parameter step counts, and one update.
#pragma once

#include <string>
#include <vector>

#include "model/parameters.h"
#include "ops/adamw/adamw.h"
#include "tensor/safetensors.h"

namespace sps {

// The gradient of one step, looked at before it is used.
struct GradientNorm {
  double norm = 0;         // over all parameters together, frozen ones left out
  std::string not_finite;  // the first parameter with a NaN or an infinity; empty if there is none
};
GradientNorm gradient_norm(const Exec& ex, const ParameterStore& store);

class AdamWOptimizer {
 public:
  // Moments and step counts start at zero. Frozen parameters have no moments and are never touched.
  explicit AdamWOptimizer(const ParameterStore& store);

  // One update with the store's gradients times `scale`. Matrices decay by settings.decay, norms do not.
  void step(const Exec& ex, ParameterStore& store, ops::AdamW settings, double scale);

  // Takes over moments and step counts of the parameters that `other` has too (by name).
  void adopt(const AdamWOptimizer& other);

  std::vector<NamedTensor> named_moments() const;        // "m.<name>", "v.<name>"
  std::vector<int64_t> steps() const { return steps_; }  // updates each parameter has had
  void set_steps(std::vector<int64_t> steps);
  size_t bytes() const { return memory_.peak(); }

 private:
  std::vector<Parameter> list_;
  Arena memory_;
  std::vector<Tensor> m_, v_;  // one row each; empty for frozen parameters
  std::vector<int64_t> steps_;
};

}  // namespace sps
