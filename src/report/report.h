// Report: runs compared in one table, from what they left in their run directories.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "data/token_file.h"

namespace sps {

struct RunSummary {
  std::string name;
  std::filesystem::path dir;
  bool finished = false;
  int64_t parameters = 0, steps = 0, tokens = 0, context = 0;
  double val_loss = 0;          // nats per scored token, last validation
  double bits_per_byte = 0;     // 0 if the run did not know its bytes
  double seconds_per_step = 0;  // median over the run's steps
  double tokens_per_second = 0;
  double flops_per_token = 0;  // training, required by the mask (3 x forward)
  double executed_flops = 0;   // training, as executed
};

// Reads a run's latest checkpoint and metrics.jsonl. Error if it has none or has never been validated.
RunSummary summarise_run(const std::filesystem::path& dir);

// One row a run; losses and costs (seconds per token) also relative to the first.
std::string report_table(const std::vector<RunSummary>& runs);
// What the columns mean, and in words what they say about the best run.
std::string report_footer(const std::vector<RunSummary>& runs);
nlohmann::ordered_json report_json(const std::vector<RunSummary>& runs);

// Cross-entropy, in nats per token, of a split's ids under their own frequencies: what a model without any
// context could reach. Ids after end-of-text ids are not counted, as in the loss.
double unigram_entropy(const TokenFile& file);

}  // namespace sps
