// metrics.jsonl: one JSON object a line for every logged step and evaluation. Every line has "tokens", the
// tokens trained when it was written (after its step), which is what ties the file to a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "base/files.h"
#include "base/json.h"

namespace sps {

class MetricsLog {
 public:
  // Continues the file of a run that was resumed at `resumed_tokens`: lines of later steps, which will be run
  // again, are dropped, and so is a line that a crash cut short. Without a value the run starts from nothing
  // and so does the file. The old file stands until the shortened one is complete.
  // A run that stopped before it validated at a checkpoint's tokens validates there again: with
  // `evaluated_tokens`, validations ("val_loss") of later tokens than those are dropped too.
  MetricsLog(const std::filesystem::path& path, std::optional<int64_t> resumed_tokens,
             std::optional<int64_t> evaluated_tokens = {});

  // `line` is an object with an integer "tokens"; keys keep their order, non-finite numbers become null.
  void write(const nlohmann::ordered_json& line);

 private:
  AppendFile file_;
};

}  // namespace sps
