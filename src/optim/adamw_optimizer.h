// AdamW over all parameters of a model: the two moments, per-parameter step counts, and one update.
#pragma once

#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "model/parameters.h"
#include "ops/adamw/adamw.h"
#include "tensor/graph.h"
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

  // On a GPU: the norm of the gradients, clipping to `limit` and the update, for which the host need not
  // wait. Nothing is updated where the norm is not finite or `flag` (ops::flag_not_finite) has been set. With
  // `graphs` all of it is recorded and started again; no bit depends on that.
  void start(const Exec& ex, ParameterStore& store, const ops::AdamW& settings, double limit, Tensor flag,
             bool graphs);
  GradientNorm take_norm();  // of what was started last: waits for it

  // Takes over moments and step counts of the parameters that `other` has too (by name).
  void adopt(const AdamWOptimizer& other);

  std::vector<NamedTensor> named_moments() const;        // "m.<name>", "v.<name>"
  std::vector<int64_t> steps() const { return steps_; }  // updates each parameter has had
  void set_steps(std::vector<int64_t> steps);
  size_t bytes() const { return memory_.peak(); }

 private:
  // Those of what is trained, with settings of the update that they have next.
  std::vector<ops::AdamWUpdate> updates(const ParameterStore& store, ops::AdamW settings) const;
  void count_steps(int64_t n);
  void issue(const Exec& ex, std::span<const ops::AdamWUpdate> updates, double limit, Tensor flag);

  std::vector<Parameter> list_;
  Arena memory_;
  std::vector<Tensor> m_, v_;  // one row each; empty for frozen parameters
  std::vector<int64_t> steps_;

  // On a GPU: what an update brings along and leaves, in the host's pinned memory and there: settings, sums
  // of squares, and the factor of clipping behind them.
  struct Numbers {
    Numbers() = default;
    Numbers(size_t count, Memory kind);
    Bytes memory;
    std::span<ops::AdamWStep> steps;
    Tensor sums, factor;
    size_t results_bytes() const { return size_t(sums.count()) * sizeof(double) + sizeof(float); }
  };
  Numbers host_, device_;
  StreamMark done_;
  StreamGraphs<std::tuple<double, const void*, const void*>> graphs_{2};  // limit, gradients, flag
};

}  // namespace sps
