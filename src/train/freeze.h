// Freeze-and-retrain (two-tower spec, section 1.8): a run with freeze.from takes the state tower of a
// checkpoint, freezes it, and trains a fresh prediction tower on it. The source is read once, when the run
// begins; from then on the run's own checkpoints hold the frozen weights and their hash.
#pragma once

#include <optional>

#include "model/model.h"
#include "train/run_config.h"

namespace sps {

struct LoadedCheckpoint;

// Usage error if the run asks for what a frozen state tower cannot give.
void check_freeze(const RunConfig& run, const ModelConfig& model);

// The checkpoint that freeze.from names. Usage error naming the first key in which the state towers differ.
LoadedCheckpoint open_freeze_source(const RunConfig& run, const ModelConfig& model);

// What `model` takes from the source: the state tower, and the read head if both have one. A read head that
// the source lacks belongs to the new prediction tower and is trained.
Freeze freeze_of(const LoadedCheckpoint& source, const ModelConfig& model);

// Copies the model's frozen tensors from the source.
void copy_frozen(const LoadedCheckpoint& source, Model& model);

// What the frozen tensors hold, by name and value.
uint64_t frozen_hash(const Model& model);

// "frozen" in a run's state: {"read_head": ..., "xxh3": ...}.
nlohmann::json frozen_state(Freeze freeze, uint64_t hash);
// None if the checkpoint's run froze nothing.
struct FrozenState {
  Freeze freeze;
  std::string hash;
};
std::optional<FrozenState> frozen_state_of(const LoadedCheckpoint& checkpoint);
// Error unless a run that continues from the checkpoint holds the weights it began with.
void check_frozen(const LoadedCheckpoint& checkpoint, const FrozenState& state, const Model& model);

}  // namespace sps
