#include "model/plan.h"

#include <algorithm>

namespace sps {

namespace {

// Backward reachability from the readout. A block that is needed raises what it reads; blocks are visited
// until nothing rises any more, which takes as many rounds as a chain has turns between the streams (at most
// the depth).
class Reachability {
 public:
  explicit Reachability(Plan& plan) : plan_(plan), c_(plan.config) {}

  void run() {
    const bool readout_pred = c_.readout == Readout::pred;
    raise_residual(readout_pred, readout_pred ? c_.pred.layers : c_.state.layers);
    do {
      changed_ = false;
      for (int64_t j = 0; j < c_.state.layers; ++j) visit_state(j);
      for (int64_t i = 0; i < c_.pred.layers; ++i) visit_pred(i);
    } while (changed_);
  }

 private:
  void raise(std::vector<Need>& needs, int64_t block, Need need) {
    Need& n = needs[size_t(block)];
    if (n < need) n = need, changed_ = true;
  }
  // The residual that enters block `level` of a stream is the work of all blocks before it.
  void raise_residual(bool pred, int64_t level) {
    for (int64_t j = 0; j < level; ++j) raise(pred ? plan_.pred : plan_.state, j, Need::all);
    if (pred && c_.pred_input == PredInput::state && c_.has_pred()) raise_residual(false, c_.state.layers);
  }
  void raise_keys(bool pred, int64_t block) {
    raise(pred ? plan_.pred : plan_.state, block, Need::keys);
    raise_residual(pred, block);
    if (pred && !plan_.pred_keys[size_t(block)]) plan_.pred_keys[size_t(block)] = true, changed_ = true;
  }
  void visit_state(int64_t j) {
    if (plan_.state[size_t(j)] < Need::pool) return;
    raise_residual(false, j);
    if (!c_.xp.empty()) raise_keys(true, j);
    if (c_.ffn == FfnMode::pooled && plan_.state[size_t(j)] == Need::all) {
      raise(plan_.pred, j, Need::pool);
      raise_residual(true, j);
    }
  }
  void visit_pred(int64_t i) {
    if (plan_.pred[size_t(i)] < Need::pool) return;
    raise_residual(true, i);
    if (!c_.pp.empty()) raise_keys(true, i);
    if (!c_.px.empty()) {
      const int64_t level = c_.levels[size_t(i)];
      if (c_.read_kv == ReadKv::own || level == c_.state.layers)
        raise_residual(false, level);
      else
        raise_keys(false, level);
    }
    if (c_.ffn == FfnMode::pooled && plan_.pred[size_t(i)] == Need::all) raise(plan_.state, i, Need::pool);
  }

  Plan& plan_;
  const ModelConfig& c_;
  bool changed_ = false;
};

}  // namespace

Horizon horizon(const std::vector<Band>& readers) {
  Horizon h;
  for (const Band b : readers) {
    if (b.empty()) continue;
    if (b.hi == Band::kInf) return {Horizon::persistent, 0};
    h = {Horizon::ring, std::max(h.steps, b.hi)};
  }
  return h;
}

std::string_view name_of(Need n) {
  switch (n) {
    case Need::none:
      return "none";
    case Need::keys:
      return "keys";
    case Need::pool:
      return "pool";
    case Need::all:
      return "all";
  }
  return "?";
}

int64_t Plan::state_blocks_alive() const {
  return std::count_if(state.begin(), state.end(), [](Need n) { return n != Need::none; });
}

bool Plan::level_needed(int64_t level) const {
  if (level == config.state.layers &&
      (read_head || (config.has_pred() && config.pred_input == PredInput::state)))
    return true;
  return std::any_of(own_readers.begin(), own_readers.end(),
                     [&](const LevelReaders& r) { return r.level == level; });
}

Plan make_plan(const ModelConfig& c, bool eliminate_dead) {
  Plan plan;
  plan.config = c;
  plan.eliminate_dead = eliminate_dead;
  const int64_t ls = c.state.layers, lp = c.pred.layers;
  const bool reads_state = c.has_pred() && !c.px.empty();
  plan.lockstep = c.has_pred() && (!c.xp.empty() || c.ffn == FfnMode::pooled);
  plan.joint = plan.lockstep || (c.has_pred() && c.read_level == ReadLevel::same &&
                                 c.read_kv == ReadKv::state && c.pred_input != PredInput::state);
  plan.constant_start =
      eliminate_dead && c.has_pred() && (c.pred_input == PredInput::row || c.pred_input == PredInput::vector);
  plan.read_head = reads_state && c.read_kv == ReadKv::state &&
                   std::find(c.levels.begin(), c.levels.end(), ls) != c.levels.end();

  plan.state.assign(size_t(ls), Need::none);
  plan.pred.assign(size_t(lp), Need::none);
  plan.pred_keys.assign(size_t(lp), false);
  if (eliminate_dead) {
    Reachability(plan).run();
  } else {
    plan.state.assign(size_t(ls), Need::all);
    plan.pred.assign(size_t(lp), Need::all);
    plan.pred_keys.assign(size_t(lp), c.pred_writes_keys());
  }

  if (plan.joint) {
    for (int64_t j = 0; j < ls; ++j) plan.stages.push_back({j, j});
  } else {
    for (int64_t j = 0; j < ls; ++j) plan.stages.push_back({j, -1});
    for (int64_t i = 0; i < lp; ++i) plan.stages.push_back({-1, i});
  }

  if (reads_state && c.read_kv == ReadKv::own) {
    for (int64_t level = 0; level <= ls; ++level) {
      Plan::LevelReaders readers{level, {}, false};
      for (int64_t i = 0; i < lp; ++i)
        if (c.levels[size_t(i)] == level && plan.pred[size_t(i)] >= Need::pool) readers.blocks.push_back(i);
      if (readers.blocks.empty()) continue;
      readers.folded = readers.blocks.size() > 1;
      // Without the elimination every reader norms and projects for itself.
      if (eliminate_dead) {
        plan.own_readers.push_back(readers);
      } else {
        for (const int64_t i : readers.blocks) plan.own_readers.push_back({level, {i}, readers.folded});
      }
    }
    plan.read_pairs = lp;
  }
  if (plan.read_head) plan.read_pairs = 1;

  const bool keys_shared = reads_state && c.read_kv == ReadKv::state;
  plan.state_horizon = horizon({c.xx, keys_shared ? c.px : Band::none()});
  plan.pred_horizon = horizon({c.xp, c.pp});
  return plan;
}

}  // namespace sps
