#include "infer/cache.h"

#include <algorithm>

namespace sps {

namespace {

// Positions of a block of cache memory: of a page, of a ring; 0 where nothing is kept.
int64_t block_positions(const KeyPair& pair, int64_t page) {
  if (pair.horizon.kind == Horizon::persistent) return page;
  return pair.horizon.kind == Horizon::ring ? pair.horizon.steps : 0;
}

int64_t pair_bytes(const KeyPair& pair, int64_t head_dim, DType dtype) {
  return 2 * pair.kv_heads * head_dim * int64_t(dtype_size(dtype));
}

}  // namespace

std::vector<KeyPair> key_pairs(const Plan& plan) {
  const ModelConfig& c = plan.config;
  std::vector<KeyPair> pairs;
  const auto add = [&](KeyPair::Source source, int64_t block, int64_t kv_heads,
                       const std::vector<Band>& readers) {
    Horizon h = horizon(readers);
    if (h.kind == Horizon::ring && h.steps == 0) h = {};
    if (h.kind == Horizon::ring && h.steps >= c.context - 1) h = {Horizon::persistent, 0};
    pairs.push_back({source, block, kv_heads, h});
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
  for (int64_t i = 0; i < c.pred.layers; ++i) {
    if (!plan.pred_keys[size_t(i)]) continue;
    std::vector<Band> bands;
    if (plan.pred[size_t(i)] >= Need::pool) bands.push_back(c.pp);
    if (!c.xp.empty() && plan.state[size_t(i)] >= Need::pool) bands.push_back(c.xp);
    add(KeyPair::pred, i, c.pred.kv_heads, bands);
  }
  for (const Plan::LevelReaders& r : plan.own_readers)
    for (const int64_t i : r.blocks) add(KeyPair::reader, i, c.pred.kv_heads, {c.band_px(i)});
  if (plan.read_head) add(KeyPair::read_head, 0, c.state.kv_heads, readers_of(c.state.layers));
  return pairs;
}

int64_t needed_pred_rows(const Plan& plan) {
  const ModelConfig& c = plan.config;
  if (!c.has_pred()) return 0;
  if (plan.lockstep || c.pp.hi == Band::kInf) return INT64_MAX;
  return c.pp.empty() ? 1 : std::min(c.pp.hi, c.context) * c.pred.layers + 1;
}

CacheSize cache_size(const Plan& plan, DType dtype) {
  CacheSize size;
  for (const KeyPair& pair : key_pairs(plan)) {
    const int64_t bytes = pair_bytes(pair, plan.config.head_dim, dtype);
    if (pair.horizon.kind == Horizon::persistent) size.bytes_per_position += bytes;
    if (pair.horizon.kind == Horizon::ring) size.bytes_per_sequence += pair.horizon.steps * bytes;
  }
  return size;
}

KeyCaches::KeyCaches(const Plan& plan, DType dtype, Device device, const CacheOptions& options)
    : pairs_(key_pairs(plan)) {
  SPS_CHECK(options.slots > 0 && options.pages > 0 && options.page > 0);
  const auto lay_out = [&](Arena& arena) {
    caches_.clear();
    paged_bytes_ = ring_bytes_ = 0;
    for (const KeyPair& pair : pairs_) {
      ops::KeyCache cache;
      cache.rows = block_positions(pair, options.page);
      cache.paged = pair.horizon.kind == Horizon::persistent;
      if (cache.rows > 0) {
        const int64_t blocks = cache.paged ? options.pages : options.slots;
        const int64_t rows = blocks * pair.kv_heads * cache.rows;
        cache.k = arena.take(dtype, rows, plan.config.head_dim);
        cache.v = arena.take(dtype, rows, plan.config.head_dim);
        (cache.paged ? paged_bytes_ : ring_bytes_) +=
            size_t(blocks * cache.rows * pair_bytes(pair, plan.config.head_dim, dtype));
      }
      caches_.push_back(cache);
    }
  };
  Arena planning;
  lay_out(planning);
  memory_ = Arena(planning.peak(), device);
  lay_out(memory_);
}

int64_t KeyCaches::find(KeyPair::Source source, int64_t block) const {
  for (size_t i = 0; i < pairs_.size(); ++i)
    if (pairs_[i].source == source && pairs_[i].block == block) return int64_t(i);
  return -1;
}

}  // namespace sps
