#include "model/key_pairs.h"

namespace sps {

std::vector<KeyPair> key_pairs(const Plan& plan) {
  const ModelConfig& c = plan.config;
  std::vector<KeyPair> pairs;
  const auto add = [&](KeyPair::Source source, int64_t block, int64_t kv_heads,
                       const std::vector<Band>& readers) {
    pairs.push_back({source, block, kv_heads, horizon(readers)});
  };
  // The prediction blocks that read this state level through keys of its own block or of the read head.
  const auto readers_of = [&](int64_t level) {
    std::vector<Band> bands;
    for (int64_t i = 0; i < c.pred.layers && c.read_kv == ReadKv::state; ++i)
      if (plan.pred[size_t(i)] >= Need::pool && c.levels[size_t(i)] == level) bands.push_back(c.band_px(i));
    return bands;
  };
  for (int64_t j = 0; j < c.state.layers; ++j) {
    if (plan.state[size_t(j)] == Need::none) continue;
    std::vector<Band> bands = readers_of(j);
    if (plan.state[size_t(j)] >= Need::pool) bands.push_back(c.band_xx(j));
    add(KeyPair::state, j, c.state.kv_heads, bands);
  }
  if (plan.read_head) add(KeyPair::read_head, 0, c.state.kv_heads, readers_of(c.state.layers));
  for (int64_t i = 0; i < c.pred.layers; ++i) {
    if (!plan.pred_keys[size_t(i)]) continue;
    std::vector<Band> bands;
    if (plan.pred[size_t(i)] >= Need::pool) bands.push_back(c.pp);
    if (!c.xp.empty() && plan.state[size_t(i)] >= Need::pool) bands.push_back(c.xp);
    add(KeyPair::pred, i, c.pred.kv_heads, bands);
  }
  for (const Plan::LevelReaders& r : plan.own_readers)
    for (const int64_t i : r.blocks) add(KeyPair::reader, i, c.pred.kv_heads, {c.band_px(i)});
  return pairs;
}

}  // namespace sps
