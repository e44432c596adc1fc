// For the tests: models whose state tower may be frozen, and what may be frozen of each.
#pragma once

#include "model/test_compare.h"

namespace sps {

// Every read, start, band and backbone that a frozen tower may have.
inline std::vector<TestModel> freezable_models() {
  std::vector<TestModel> all;
  for (const TestModel& m : test_models()) {
    const ModelConfig c = resolve(m.keys);
    const bool may = c.has_pred() && !c.tie_head && !c.share.any() && c.ffn == FfnMode::separate &&
                     c.xp.empty() && c.pred_input != PredInput::row;
    if (may) all.push_back(m);
  }
  const auto add = [&](const std::string& name, const auto& change) {
    ModelKeys k = small_keys("sequential");
    k.layers = 3;
    change(k);
    all.push_back({name, k});
  };
  add("state_post", [](ModelKeys& k) { k.read_level = "post", k.read_kv = "state"; });
  add("state_final", [](ModelKeys& k) { k.read_kv = "state"; });
  add("state_same", [](ModelKeys& k) { k.read_level = "same", k.read_kv = "state"; });
  add("state_same_with_prediction_keys",
      [](ModelKeys& k) { k.read_level = "same", k.read_kv = "state", k.band_pp = "0:2"; });
  add("state_levels", [](ModelKeys& k) { k.read_level = "3,1,3", k.read_kv = "state"; });
  add("state_below", [](ModelKeys& k) { k.read_level = "1,0,1", k.read_kv = "state"; });
  add("state_final_qk_norm", [](ModelKeys& k) { k.read_kv = "state", k.qk_norm = true; });
  add("own_levels", [](ModelKeys& k) { k.read_level = "3,1,3"; });
  add("own_token", [](ModelKeys& k) { k.pred_input = "token"; });
  add("own_vector", [](ModelKeys& k) { k.pred_input = "vector"; });
  add("own_state_start", [](ModelKeys& k) { k.pred_input = "state"; });
  add("state_state_start", [](ModelKeys& k) { k.pred_input = "state", k.read_kv = "state"; });
  return all;
}

inline std::vector<Freeze> freezes(const ModelConfig& c) {
  if (make_plan(c).read_head) return {{true, false}, {true, true}};
  return {{true, false}};
}

}  // namespace sps
