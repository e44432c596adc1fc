#include "train/trainer.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "base/progress.h"
#include "base/threads.h"
#include "data/check_ids.h"
#include "data/data_tokenizer.h"
#include "model/flops.h"
#include "model/load.h"
#include "ops/rows/rows.h"
#include "score/model_input.h"
#include "tensor/device.h"
#include "train/metrics.h"
#include "train/train_step.h"

namespace sps {

namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + std::ptrdiff_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}

int64_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

}  // namespace

ModelConfig first_phase_model(const ModelConfig& c) {
  const bool contained = c.readout == Readout::pred && c.xx == Band::causal() && c.xp.empty() &&
                         c.share.attention && c.share.norms && (c.share.ffn || c.ffn == FfnMode::pooled) &&
                         c.tie_head;
  if (!contained)
    usage_error(
        "phase.at > 0 trains the standard model first, so every weight but the prediction start and the "
        "gates must be "
        "shared with the state stream; model.family = {} does not",
        c.family);
  ModelConfig first = c;
  first.family = "standard";
  first.pred = {};
  first.px = first.pp = Band::none();
  first.read_level = ReadLevel::same;
  first.levels.clear();
  first.read_kv = ReadKv::state;
  first.pred_input = PredInput::row;
  first.share = {};
  first.ffn = FfnMode::separate;
  first.readout = Readout::state;
  return first;
}

Trainer::Trainer(RunConfig config)
    : config_(std::move(config)),
      ex_(exec_on(compute_device(config_.run.device))),
      dtype_(compute_dtype(config_.run.dtype, ex_.device)) {
  if (config_.run.threads > 0) set_thread_count(int(config_.run.threads));
  open_data();
  schedule_ = config_.make_schedule();
  check_freeze(config_, final_model_);
  if (config_.phase.at > 0) first_phase_model(final_model_);  // checks
  micro_batches_.resize(size_t(config_.train.global_batch / config_.train.micro_batch));
  if (!resume()) {
    in_first_phase_ = config_.phase.at > 0;
    std::optional<LoadedCheckpoint> source;
    if (!config_.freeze.from.empty()) {
      source = open_freeze_source(config_, final_model_);
      freeze_ = freeze_of(*source, final_model_);
    }
    build(in_first_phase_ ? first_phase_model(final_model_) : final_model_);
    model_->store().initialise(uint64_t(config_.train.seed));
    if (source) {
      copy_frozen(*source, *model_);
      frozen_hash_ = frozen_hash(*model_);
    }
  }
}

Trainer::~Trainer() = default;

// The data decide the vocabulary and the end-of-text id, unless the configuration names them.
void Trainer::open_data() {
  if (config_.data.dir.empty())
    usage_error("data.dir is not set: expected a folder made by `sps prepare`, as in data.dir=data/text");
  train_file_ = TokenFile::open(config_.data.dir, "train");
  val_file_ = TokenFile::open(config_.data.dir, "val");
  if (const auto& meta = train_file_->meta()) {
    adopt_vocabulary(*meta, config_.data.dir, config_.model);
    tokenizer_ = data_set_tokenizer(train_file_->path().parent_path(), *meta);
  }
  final_model_ = resolve(config_.model);
  config_.model = keys_of(final_model_);
  train_file_->set_vocab_size(final_model_.vocab);
  val_file_->set_vocab_size(final_model_.vocab);
  sampler_ = std::make_unique<Sampler>(
      *train_file_,
      SamplerOptions{final_model_.context, uint64_t(config_.train.seed), config_.train.chunk_units});
  windows_ = std::make_unique<ValidationWindows>(*val_file_, final_model_.context, config_.train.eval_tokens);
}

void Trainer::build(const ModelConfig& config) {
  ModelOptions options;
  options.compute = dtype_;
  options.max_rows = config_.train.micro_batch * config.context;
  options.train = true;
  options.freeze = freeze_;
  options.device = ex_.device;
  options.recompute = recompute_from_name(config_.train.recompute);
  options.graphs = config_.run.graphs;
  model_ = std::make_unique<Model>(config, options);
  optimizer_ = std::make_unique<AdamWOptimizer>(model_->store());
}

// The prediction tower starts: shared weights, their moments and the data order go on, what is new starts
// fresh.
void Trainer::switch_phase() {
  // The first model's activations make room for the final one's.
  const ParameterStore first = std::move(*model_).take_store();
  const std::vector<NamedTensor> from = named_weights(model_->parameters(), first);
  model_.reset();
  const auto first_optimizer = std::move(optimizer_);
  build(final_model_);
  model_->store().initialise(uint64_t(config_.train.seed));
  const auto to = named_weights(model_->parameters(), model_->store());
  for (const NamedTensor& t : to)
    for (const NamedTensor& f : from)
      if (f.name == t.name) ops::copy_rows(ex_, f.tensor, t.tensor);
  model_->store().round();
  optimizer_->adopt(*first_optimizer);
  in_first_phase_ = false;
}

Trainer::Step Trainer::step() {
  if (in_first_phase_ && double(tokens()) >= config_.phase.at * double(config_.train.tokens)) switch_phase();
  if (prepared_ != step_) prepare(step_);
  const auto& o = config_.optim;
  ops::AdamW settings;
  settings.lr = schedule_.lr_at(std::max<int64_t>(step_, 1) * batch_tokens());
  settings.beta1 = o.beta1, settings.beta2 = o.beta2, settings.eps = o.eps;
  settings.decay = o.weight_decay;
  const StepResult r = train_step(*model_, *optimizer_, micro_batches_, settings, o.clip, [this] {
    if (step_ + 1 < total_steps()) prepare(step_ + 1);
    gpu_used_ = gpu_memory_used();  // asking the driver takes a while
  });
  // Weights and moments are untouched then.
  if (!r.finite()) {
    std::string what;
    if (!std::isfinite(r.loss)) what = fmt::format("the loss is not finite ({})", r.loss);
    if (!std::isfinite(r.gradient.norm))
      what += fmt::format("{}the gradient of {} is not finite", what.empty() ? "" : ", ",
                          r.gradient.not_finite.empty() ? "all parameters together" : r.gradient.not_finite);
    fail("step {}: {}; {}", step_, what, last_checkpoint_text());
  }
  ++step_;
  return {r.loss, r.gradient.norm, settings.lr, r.scored};
}

// Reads the micro-batches of a step.
void Trainer::prepare(int64_t step) {
  const int64_t micro = config_.train.micro_batch;
  uint64_t sample = uint64_t(step) * uint64_t(config_.train.global_batch);
  prepared_ = -1;  // what follows may throw
  for (Batch& batch : micro_batches_) {
    sampler_->batch(sample, micro, starts_);
    batch.fill(*train_file_, starts_, final_model_.context, special_ids(final_model_));
    sample += uint64_t(micro);
  }
  prepared_ = step;
}

Score Trainer::validate() {
  return score_windows(*model_, *val_file_, *windows_, config_.train.micro_batch, tokenizer_.get());
}

std::string Trainer::last_checkpoint_text() const {
  const auto latest = latest_checkpoint(config_.run_dir());
  return latest ? "the last good checkpoint is " + latest->path.string()
                : std::string("there is no checkpoint yet");
}

// Has a multiple of `every_tokens` been passed by the step before this moment?
bool Trainer::due(int64_t every_tokens) const {
  return every_tokens > 0 && step_ > 0 &&
         tokens() / every_tokens > (tokens() - batch_tokens()) / every_tokens;
}

// The checkpoint to save at this moment, before the next step; of several the one that is kept longest.
std::optional<CheckpointKind> Trainer::due_checkpoint() const {
  const int64_t decay_from = schedule_.decay_start();
  if (config_.schedule.decay_tokens > 0 && decay_from > 0 && step_ > 0 && tokens() >= decay_from &&
      tokens() - batch_tokens() < decay_from)
    return CheckpointKind::pre_decay;
  if (due(config_.train.save_every_tokens)) return CheckpointKind::named;
  if (due(config_.train.rolling_every_tokens)) return CheckpointKind::rolling;
  return std::nullopt;
}

RunResult Trainer::run(const volatile std::sig_atomic_t* interrupted) {
  RunResult result;
  const std::filesystem::path dir = config_.run_dir();
  if (resumed_ != CheckpointKind::final) {
    make_writable_directory(dir);
    remove_leftovers(dir);
    write_atomically(dir / "config.toml", bind(config_).to_toml());
    const std::string tokenizer = tokenizer_ ? tokenizer_->to_json() : "";
    if (!tokenizer.empty()) write_atomically(dir / kTokenizerFile, tokenizer);
    const TokenFile* const files[] = {&*train_file_, &*val_file_};
    check_ids(files, dir / "checked_ids.json");
  }
  const int64_t steps = total_steps();
  if (step_ >= steps) {
    result = {RunEnd::already_finished, step_, tokens(), validate(), 0, 0};
    return result;
  }

  MetricsLog metrics(dir / "metrics.jsonl", resumed_ ? std::optional<int64_t>(tokens()) : std::nullopt,
                     evaluated_tokens_);
  spdlog::info(
      "{}: {} windows of {} tokens an epoch ({} tokens at its ends are left out), {} for validation ({} left "
      "out)",
      config_.name, sampler_->units(), final_model_.context, sampler_->dropped_tokens(), windows_->count(),
      windows_->dropped_tokens());
  Progress progress(config_.name, steps * batch_tokens(), "tok", tokens());
  std::vector<double> seconds;
  Score score;
  const auto evaluate = [&] {
    const double began = monotonic_seconds();
    score = validate();
    evaluated_tokens_ = tokens();
    nlohmann::ordered_json line{{"step", step_},
                                {"tokens", tokens()},
                                {"val_loss", score.nats_per_token()},
                                {"val_scored", score.scored},
                                {"eval_seconds", monotonic_seconds() - began}};
    std::string bits;
    if (score.bytes > 0) {
      line["val_bits_per_byte"] = score.bits_per_byte();
      bits = fmt::format(", {:.4f} bits/byte", score.bits_per_byte());
    }
    metrics.write(line);
    progress.message(fmt::format("{}: step {}, {} tokens, validation loss {:.4f}{}", config_.name, step_,
                                 human_count(double(tokens())), score.nats_per_token(), bits));
  };

  const int64_t resumed_at = resumed_ ? step_ : -1;
  while (step_ < steps) {
    if (interrupted != nullptr && *interrupted != 0) {
      if (step_ != resumed_at && step_ > 0) save(CheckpointKind::rolling);
      result.end = RunEnd::interrupted;
      break;
    }
    const bool first = step_ == 0;
    if (evaluated_tokens_ != tokens() && (first || due(config_.train.eval_every_tokens))) evaluate();
    // A run that was stopped when a lasting checkpoint was due has left a rolling one only.
    const auto kind = due_checkpoint();
    if (kind && (step_ != resumed_at || *kind > *resumed_)) save(*kind);

    const double began = monotonic_seconds();
    const Step s = step();
    const double took = monotonic_seconds() - began;
    seconds.push_back(took);
    record_step(metrics, s, took);
    progress.update(tokens(), fmt::format("loss {:.4f}  lr {:.2e}", s.loss, s.lr));
  }

  const double per_step = median(seconds);
  result.seconds_per_step = per_step;
  result.tokens_per_second = per_step > 0 ? double(batch_tokens()) / per_step : 0;
  if (result.end != RunEnd::interrupted) {
    evaluate();
    save(CheckpointKind::final);
    result.validation = score;
  }
  progress.finish(tokens());
  result.steps = step_, result.tokens = tokens();
  return result;
}

void Trainer::record_step(MetricsLog& metrics, const Step& s, double seconds) {
  const double rate = double(batch_tokens()) / seconds;
  const double flops = training_flops(flops_required(model_->config(), final_model_.context), freeze_);
  nlohmann::ordered_json line{{"step", step_},
                              {"tokens", tokens()},
                              {"loss", s.loss},
                              {"lr", s.lr},
                              {"grad_norm", s.grad_norm},
                              {"scored", s.scored},
                              {"seconds", seconds},
                              {"tokens_per_second", rate},
                              {"model_flops_per_second", rate * flops},
                              {"peak_memory_bytes", peak_memory_bytes()}};
  if (ex_.device == Device::cuda)
    line.update({{"gpu_peak_bytes", device_peak_bytes()}, {"gpu_used_bytes", gpu_used_}});
  metrics.write(line);
}

}  // namespace sps
