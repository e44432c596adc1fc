// A trainer's state: what a checkpoint keeps of it, and what must agree before a run is continued.
#include "base/log.h"
#include "model/load.h"
#include "train/trainer.h"

namespace sps {

namespace {

// Keys that may change between the parts of a run, because they change nothing that is computed.
bool may_change(const std::string& key) {
  return key.starts_with("run.") || key.starts_with("train.eval") || key == "train.save_every_tokens" ||
         key == "train.recompute" || key == "train.rolling_every_tokens" || key == "data.dir";
}

std::string data_identity(const TokenFile& file) {
  if (file.meta()) return file.meta()->train.hash;
  return fmt::format("{} tokens", file.size());
}

}  // namespace

nlohmann::json Trainer::run_state() const {
  nlohmann::json state{{"step", step_},
                       {"samples", step_ * config_.train.global_batch},
                       {"evaluated_tokens", evaluated_tokens_},
                       {"first_phase", in_first_phase_},
                       {"dtype", dtype_name(dtype_)},
                       {"data", data_identity(*train_file_)},
                       {"optimizer_steps", optimizer_->steps()}};
  if (freeze_.state) state["frozen"] = frozen_state(freeze_, frozen_hash_);
  return state;
}

// config.json: the run's keys, with the model that the weights belong to (in the first phase, the standard
// one).
nlohmann::json Trainer::stored_config() const {
  RunConfig all = config_;
  nlohmann::json stored = bind(all).to_json();
  // Where a run lives and how it is spread over cores is no property of its result.
  stored.erase("run");
  stored["data"].erase("dir");
  stored["run_model"] = stored["model"];
  RunConfig weights = config_;
  weights.model = keys_of(model_->config());
  stored["model"] = bind(weights).to_json()["model"];
  stored["name"] = config_.name;
  return stored;
}

void Trainer::save(CheckpointKind kind) {
  Checkpoint c;
  c.kind = kind;
  c.tokens = tokens();
  c.config = stored_config();
  c.state = run_state();
  if (tokenizer_) c.tokenizer = tokenizer_->to_json();
  c.weights = named_weights(model_->parameters(), model_->store());
  c.optimizer = optimizer_->named_moments();
  save_checkpoint(config_.run_dir(), c);
}

void Trainer::check_same_run(const LoadedCheckpoint& checkpoint) const {
  const std::string hint = "continue with the same settings, or start another run with run.dir=...";
  RunConfig before = config_;
  OptionTable table = bind(before);
  nlohmann::json stored = checkpoint.config;
  if (!stored.is_object() || !stored.contains("run_model"))
    fail("{} was not written by a training run", (checkpoint.path / kConfigFile).string());
  stored["model"] = stored["run_model"];
  stored.erase("run_model");
  stored.erase("name");
  table.set_from_json(stored, (checkpoint.path / kConfigFile).string());
  RunConfig now_config = config_;
  const OptionTable now = bind(now_config);
  for (const std::string& key : now.keys()) {
    if (may_change(key) || now.text(key) == table.text(key)) continue;
    fail("{} holds a run with {} = {}, but {} was asked for: {}", checkpoint.path.string(), key,
         table.text(key), now.text(key), hint);
  }
  const auto same = [&](const char* what, const std::string& stored_value, const std::string& value) {
    if (stored_value != value)
      fail("{} was trained with {} {}, but this run has {}: {}", checkpoint.path.string(), what, stored_value,
           value, hint);
  };
  same("run.dtype", checkpoint.state.value("dtype", ""), std::string(dtype_name(dtype_)));
  same("the data", checkpoint.state.value("data", ""), data_identity(*train_file_));
}

bool Trainer::resume() {
  const auto latest = latest_checkpoint(config_.run_dir());
  if (!latest) return false;
  const LoadedCheckpoint checkpoint = load_checkpoint(latest->path);
  check_same_run(checkpoint);
  const nlohmann::json& state = checkpoint.state;
  std::vector<int64_t> optimizer_steps;
  try {
    step_ = state.at("step");
    evaluated_tokens_ = state.at("evaluated_tokens");
    in_first_phase_ = state.at("first_phase");
    optimizer_steps = state.at("optimizer_steps").get<std::vector<int64_t>>();
  } catch (const nlohmann::json::exception& e) {
    fail("{} does not describe a trainer: {}", (checkpoint.path / kStateFile).string(), e.what());
  }
  const std::optional<FrozenState> frozen = frozen_state_of(checkpoint);
  if (frozen.has_value() == config_.freeze.from.empty())
    fail("{} holds a run {} a frozen state tower, but freeze.from = '{}' was asked for",
         checkpoint.path.string(), frozen ? "with" : "without", config_.freeze.from);
  if (frozen) freeze_ = frozen->freeze;
  build(in_first_phase_ ? first_phase_model(final_model_) : final_model_);
  if (optimizer_steps.size() != optimizer_->steps().size() || step_ * batch_tokens() != checkpoint.tokens)
    fail("{} does not fit its own configuration", (checkpoint.path / kStateFile).string());
  if (!checkpoint.optimizer) fail("{} has no {}", checkpoint.path.string(), kOptimizerFile);
  read_into(checkpoint.weights, named_weights(model_->parameters(), model_->store()));
  read_into(*checkpoint.optimizer, optimizer_->named_moments());
  optimizer_->set_steps(std::move(optimizer_steps));
  model_->store().round();
  if (frozen) {
    check_frozen(checkpoint, *frozen, *model_);
    frozen_hash_ = frozen_hash(*model_);
  }
  resumed_ = checkpoint.kind;
  spdlog::info("{}: continuing from {}", config_.name, checkpoint.path.string());
  return true;
}

}  // namespace sps
