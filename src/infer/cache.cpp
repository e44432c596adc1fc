#include "infer/cache.h"

#include <algorithm>

namespace sps {

namespace {

// The pairs with what is kept of them: a ring that would hold every position of a text is none.
std::vector<KeyPair> kept_pairs(const Plan& plan) {
  std::vector<KeyPair> pairs = key_pairs(plan);
  for (KeyPair& pair : pairs) {
    Horizon& h = pair.horizon;
    if (h.kind != Horizon::ring) continue;
    if (h.steps == 0)
      h = {};
    else if (h.steps >= plan.config.context - 1)
      h = {Horizon::persistent, 0};
  }
  return pairs;
}

// Positions of a block of cache memory: of a page, of a ring; 0 where nothing is kept.
int64_t block_positions(const KeyPair& pair, int64_t page) {
  return pair.horizon.kind == Horizon::persistent ? page : pair.horizon.steps;
}

int64_t pair_bytes(const KeyPair& pair, int64_t head_dim, DType dtype) {
  return 2 * pair.kv_heads * head_dim * int64_t(dtype_size(dtype));
}

}  // namespace

int64_t needed_pred_rows(const Plan& plan) {
  const ModelConfig& c = plan.config;
  if (!c.has_pred()) return 0;
  if (plan.lockstep || c.pp.hi == Band::kInf) return INT64_MAX;
  return c.pp.empty() ? 1 : std::min(c.pp.hi, c.context) * c.pred.layers + 1;
}

CacheSize cache_size(const Plan& plan, DType dtype) {
  CacheSize size;
  for (const KeyPair& pair : kept_pairs(plan)) {
    const int64_t bytes = pair_bytes(pair, plan.config.head_dim, dtype);
    if (pair.horizon.kind == Horizon::persistent) size.bytes_per_position += bytes;
    if (pair.horizon.kind == Horizon::ring) size.bytes_per_sequence += pair.horizon.steps * bytes;
  }
  return size;
}

KeyCaches::KeyCaches(const Plan& plan, DType dtype, Device device, const CacheOptions& options)
    : pairs_(kept_pairs(plan)) {
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
