// Trainer: one training run from its first token to its final checkpoint (training spec; design, sections 5
// and 6).
//
// A step trains on `global_batch` windows: their scored positions are counted first, so that the loss is the
// mean over the whole batch whatever the micro-batch. A run's state is its checkpoint and nothing else:
// killed at any moment and started again, it ends with the same bytes. Decisions (validate? save? switch
// phase?) look at the tokens trained so far, before each step, and depend on that number alone.
#pragma once

#include <csignal>
#include <memory>
#include <optional>

#include "data/batch.h"
#include "data/sampler.h"
#include "model/model.h"
#include "optim/adamw_optimizer.h"
#include "score/score.h"
#include "tokenizer/tokenizer.h"
#include "train/checkpoint.h"
#include "train/freeze.h"
#include "train/run_config.h"

namespace sps {

class MetricsLog;

enum class RunEnd : uint8_t { finished, already_finished, interrupted };

struct RunResult {
  RunEnd end = RunEnd::finished;
  int64_t steps = 0, tokens = 0;
  Score validation;              // of the final model (also when the run had finished before)
  double tokens_per_second = 0;  // median over this process's steps, validation and saving excluded
  double seconds_per_step = 0;
};

class Trainer {
 public:
  // Opens the data, settles what depends on it (vocabulary, end-of-text), plans memory, and continues from
  // the run directory's latest checkpoint if there is one. Errors leave no file behind that was not there
  // before.
  explicit Trainer(RunConfig config);
  ~Trainer();

  // Trains to the end, or until `interrupted` is set (by a signal): then saves and returns.
  RunResult run(const volatile std::sig_atomic_t* interrupted = nullptr);

  // One optimizer step on the next global batch. For run() and for tests; nothing is written.
  struct Step {
    double loss = 0;  // nats per scored token before the update
    double grad_norm = 0, lr = 0;
    int64_t scored = 0;
  };
  Step step();

  const RunConfig& config() const { return config_; }
  const ModelConfig& model_config() const { return final_model_; }
  Model& model() { return *model_; }
  int64_t steps() const { return step_; }
  int64_t tokens() const { return step_ * batch_tokens(); }
  int64_t batch_tokens() const { return schedule_.batch_tokens; }
  int64_t total_steps() const { return schedule_.steps(); }
  Score validate();

 private:
  void open_data();
  void build(const ModelConfig& config);
  void switch_phase();
  void prepare(int64_t step);
  bool resume();
  void save(CheckpointKind kind);
  nlohmann::json run_state() const;
  nlohmann::json stored_config() const;
  void check_same_run(const LoadedCheckpoint& checkpoint) const;
  std::string last_checkpoint_text() const;
  void record_step(MetricsLog& metrics, const Step& step, double seconds);
  bool due(int64_t every_tokens) const;
  std::optional<CheckpointKind> due_checkpoint() const;

  RunConfig config_;
  ModelConfig final_model_;  // the model the run ends with; before phase.at the standard one is trained
  Exec ex_;
  DType dtype_;
  std::optional<TokenFile> train_file_, val_file_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<ValidationWindows> windows_;
  Schedule schedule_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<AdamWOptimizer> optimizer_;
  std::vector<Batch> micro_batches_;
  int64_t prepared_ = -1;  // the step that they are of
  std::vector<int64_t> starts_;
  int64_t step_ = 0;
  size_t gpu_used_ = 0;  // in the last step
  bool in_first_phase_ = false;
  Freeze freeze_;                          // with freeze.from: what takes no part in training,
  uint64_t frozen_hash_ = 0;               // and what it holds from the first step to the last
  std::optional<CheckpointKind> resumed_;  // the checkpoint that this process continued from
  int64_t evaluated_tokens_ = -1;          // tokens at the last validation that metrics.jsonl holds
};

// The model that a phased run trains first: the state tower alone (second paper, phasing). Usage error if the
// final model does not contain it.
ModelConfig first_phase_model(const ModelConfig& final_model);

}  // namespace sps
