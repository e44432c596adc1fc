// What a model takes of memory while it trains or runs, derived from its configuration before anything is
// allocated. The same code lays out the plan and the memory, so what arenas hold is exact; on a GPU the
// scratch of the operations and what the driver takes for itself are forecast beside it.
#pragma once

#include <cstddef>

#include "model/config.h"
#include "model/parameters.h"
#include "model/recompute.h"

namespace sps {

struct ModelOptions {
  DType compute = DType::f32;  // f32, bf16, or f64 for the reference
  int64_t max_rows = 0;        // largest batch * length of a pass
  bool train = true;           // false: forward only, no memory for gradients
  bool eliminate_dead = true;  // see make_plan
  bool skip_tiles = true;      // see AttentionShape
  Freeze freeze = {};          // leaves out the state tower's backward pass
  Device device = Device::cpu;
  Masters masters = Masters::all;         // where train is false
  Recompute recompute = Recompute::none;  // of a training pass
  bool graphs = true;                     // on a GPU: training passes are recorded; no bit depends on it
};

// Bytes, on the model's device. Not in it: on the CPU the scratch of threads, on a GPU pinned memory of the
// host.
struct MemoryPlan {
  size_t weights = 0;  // master weights and the rounded copy
  size_t gradients = 0;
  size_t moments = 0;      // AdamW's, of what is not frozen
  size_t activations = 0;  // with their gradients
  size_t tables = 0;       // rotary tables, and the lists of one number a row
  size_t scratch = 0;      // GPU: inside operations (tensor/device.h)
  size_t context = 0;      // GPU: kGpuContextBytes
  size_t total() const { return weights + gradients + moments + activations + tables + scratch + context; }
};
MemoryPlan plan_memory(const ModelConfig& config, const ModelOptions& options);

}  // namespace sps
