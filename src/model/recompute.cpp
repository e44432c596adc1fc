#include "model/recompute.h"

#include <algorithm>

#include "base/error.h"

namespace sps {

namespace {

bool runs(const std::vector<Need>& needs, int64_t block) {
  return block >= 0 && needs[size_t(block)] != Need::none;
}
bool runs(const Plan& plan, const Stage& stage) {
  return runs(plan.state, stage.state) || runs(plan.pred, stage.pred);
}

}  // namespace

std::string_view name_of(Recompute mode) {
  switch (mode) {
    case Recompute::none:
      return "none";
    case Recompute::ffn:
      return "ffn";
    case Recompute::block:
      return "block";
  }
  return "?";
}

Recompute recompute_from_name(std::string_view name) {
  for (const Recompute mode : {Recompute::none, Recompute::ffn, Recompute::block})
    if (name == name_of(mode)) return mode;
  usage_error("train.recompute = '{}': expected none, ffn or block", name);
}

Recompute shared_part(const Plan& plan, const Stage& stage, Recompute mode, Freeze freeze, bool train) {
  // The readout takes the last state block's rows after stages of the prediction tower have run (computed in
  // full, although nothing reads them): shared memory would not hold them until then.
  const bool read_late =
      !plan.joint && plan.config.readout == Readout::state && stage.state == plan.config.state.layers - 1 &&
      std::any_of(plan.pred.begin(), plan.pred.end(), [](Need n) { return n != Need::none; });
  if (read_late) return Recompute::none;
  const bool never_again = !train || (freeze.state && stage.pred < 0);
  return never_again ? Recompute::block : mode;
}

std::vector<Recompute> made_again(const Plan& plan, Recompute mode, Freeze freeze) {
  std::vector<Recompute> again(plan.stages.size(), Recompute::none);
  size_t last = again.size();
  for (size_t i = 0; i < again.size(); ++i) {
    const Stage& stage = plan.stages[i];
    if (!runs(plan, stage)) continue;
    last = i;
    const bool backward = !(freeze.state && stage.pred < 0);
    if (backward) again[i] = shared_part(plan, stage, mode, freeze, true);
  }
  if (last < again.size()) again[last] = Recompute::none;
  return again;
}

}  // namespace sps
