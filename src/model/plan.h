// Plan: everything that follows from a ModelConfig about how it is computed, derived once, here (design,
// sections 1 and 2): which blocks run together, what is dead work, which streams keep keys and for how long.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"

namespace sps {

// How much of a block of one stream reaches the readout. Each value includes those before it.
enum class Need : uint8_t {
  none,
  keys,  // only its keys and values are read
  pool,  // also its attention and second norm: the row enters a pooled FFN, whose output it does not take
  all,
};

std::string_view name_of(Need need);  // "none", "keys", "pool", "all"

// One step of the forward pass: a state block, a prediction block, or both together with one attention call.
struct Stage {
  int64_t state = -1, pred = -1;
};

// How long a stream's keys must be kept while decoding.
struct Horizon {
  enum Kind : uint8_t { nothing, ring, persistent } kind = nothing;
  int64_t steps = 0;  // ring: largest distance back that is read
};

// The horizon of keys that are read through these bands.
Horizon horizon(const std::vector<Band>& readers);

struct Plan {
  ModelConfig config;
  bool eliminate_dead = true;

  bool lockstep = false;  // the streams must advance block by block together (xp, or pooled)
  bool joint = false;     // they do (also where one attention call for both is cheaper than two passes)
  bool constant_start =
      false;               // every prediction row starts equal: the first block's projections are one row's
  bool read_head = false;  // read.kv = state at the level above the last block needs a projection of its own
  std::vector<Stage> stages;
  std::vector<Need> state, pred;  // per block
  std::vector<bool> pred_keys;    // this prediction block's keys are read by somebody
  // read.kv = own: prediction blocks grouped by the level they read, in order; several readers of one level
  // share its normalised rows and one wide product. Empty groups are left out.
  struct LevelReaders {
    int64_t level = 0;
    std::vector<int64_t> blocks;
    // The level has several readers (also those of other groups): it is normed with gain 1, and each reader's
    // weights carry its own gain.
    bool folded = false;
  };
  std::vector<LevelReaders> own_readers;
  Horizon state_horizon, pred_horizon;  // caches while decoding
  int64_t read_pairs = 0;  // further persistent key/value pairs a token (own projections, read head)

  int64_t state_blocks_alive() const;      // state blocks that run at all
  bool level_needed(int64_t level) const;  // some reader or start reads this state residual itself
};

// With eliminate_dead = false every block runs in full, constant rows are spread out first and every position
// goes through the head: same loss, same gradients, more work. It exists to test that.
Plan make_plan(const ModelConfig& config, bool eliminate_dead = true);

}  // namespace sps
