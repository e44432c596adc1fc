// Checkpoints on disk: names, completeness, reading. docs/formats/checkpoints.md is the format. Writing them
// is the business of train/checkpoint.h; this part is what evaluation and inference need too.
//
//   runs/<name>/checkpoints/tokens-000002000289792/
//     config.json              the resolved configuration, as OptionTable::to_json() gives it
//     tokenizer.json           what the ids mean; absent where the ids are bytes or nobody knows
//     weights.safetensors
//     optimizer.safetensors    absent where there is no optimizer state
//     state.json               trainer state; size and hash of the other files; written last
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "tensor/safetensors.h"

namespace sps {

inline constexpr const char* kConfigFile = "config.json";
inline constexpr const char* kTokenizerFile = "tokenizer.json";
inline constexpr const char* kWeightsFile = "weights.safetensors";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";
inline constexpr const char* kStateFile = "state.json";

// In the order in which they win when several have seen the same number of tokens: a finished run is
// finished.
enum class CheckpointKind { rolling, named, pre_decay, final };

struct CheckpointName {
  CheckpointKind kind = CheckpointKind::rolling;
  int64_t tokens = 0;  // trained before it was saved

  // "rolling-000000100270080", "tokens-000002000289792", "...-pre-decay", "...-final": 15 digits, so that
  // names sort like tokens.
  std::string text() const;
  static std::optional<CheckpointName> parse(std::string_view text);
  bool operator==(const CheckpointName&) const = default;
  bool before(const CheckpointName& other) const {
    return tokens != other.tokens ? tokens < other.tokens : kind < other.kind;
  }
};

struct CheckpointInfo {
  CheckpointName name;
  std::filesystem::path path;
};

// The folder of a run's checkpoints.
std::filesystem::path checkpoints_dir(const std::filesystem::path& run_dir);

// The complete checkpoints of a run, oldest first. One that is not complete (state.json missing or damaged, a
// file missing or of another size) is left out with a warning. Contents are verified on loading, not here.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& run_dir);
std::optional<CheckpointInfo> latest_checkpoint(const std::filesystem::path& run_dir);

// What a command's CHECKPOINT argument means: a checkpoint itself, or a run whose latest one is taken.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

enum class CheckpointParts { weights, all };

struct LoadedCheckpoint {
  std::filesystem::path path;
  CheckpointKind kind = CheckpointKind::rolling;
  int64_t tokens = 0;
  nlohmann::json config, state;
  SafeTensors weights;
  bool has_tokenizer = false;            // in path / kTokenizerFile
  std::optional<SafeTensors> optimizer;  // only with CheckpointParts::all, and only if it was saved
};

// Opens a checkpoint under any folder name and verifies size and hash of every file it reads. Error: which
// file, and what is wrong with it.
LoadedCheckpoint load_checkpoint(const std::filesystem::path& path,
                                 CheckpointParts parts = CheckpointParts::all);

// state.json as text, from what the trainer wants to keep and the files it vouches for; for the writer.
struct CheckpointFile {
  std::string name;
  WrittenFile written;
};
std::string checkpoint_state_text(const CheckpointName& name, const nlohmann::json& state,
                                  const std::vector<CheckpointFile>& files);

}  // namespace sps
