// Saving checkpoints. One is written to a folder beside its final name, brought to the disk and renamed, so
// at every moment, also after a kill or with a full disk, the newest folder with a final name is complete.
// Names, listing and loading: model/checkpoint_files.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/checkpoint_files.h"

namespace sps {

struct Checkpoint {
  CheckpointKind kind = CheckpointKind::rolling;
  int64_t tokens = 0;
  nlohmann::json config;               // OptionTable::to_json(): every model and run key
  nlohmann::json state;                // what the trainer needs to continue; finite numbers only
  std::vector<NamedTensor> weights;    // at least one
  std::vector<NamedTensor> optimizer;  // may be empty
  std::string tokenizer = {};          // text of tokenizer.json; may be empty
};

// Writes the checkpoint as the folder `path`, replacing one that is there. Its parent must exist.
void write_checkpoint(const std::filesystem::path& path, const Checkpoint& checkpoint);

// Writes run_dir/checkpoints/<name>, replacing one of the same name; then removes rolling checkpoints that
// have seen fewer tokens if this is a rolling one. On failure everything that was there before is still
// there. One process saves to a run at a time.
void save_checkpoint(const std::filesystem::path& run_dir, const Checkpoint& checkpoint);

// Removes what processes that no longer run left behind while saving. For the start of a run.
void remove_leftovers(const std::filesystem::path& run_dir);

}  // namespace sps
