#include "base/log.h"
#include "base/progress.h"
#include "base/signals.h"
#include "base/threads.h"
#include "cli/cli.h"
#include "tensor/device.h"
#include "train/trainer.h"

namespace sps {

namespace {

struct TrainArguments {
  std::string source;
  std::vector<std::string> overrides;
  bool keys = false, json = false;
};

void print_json(const RunConfig& config, const RunResult& r) {
  nlohmann::ordered_json j{{"name", config.name},
                           {"run_dir", config.run_dir().string()},
                           {"end", r.end == RunEnd::interrupted ? "interrupted" : "finished"},
                           {"steps", r.steps},
                           {"tokens", r.tokens}};
  if (r.end != RunEnd::interrupted) {
    j["val_loss"] = r.validation.nats_per_token();
    j["val_scored"] = r.validation.scored;
    if (r.validation.bytes > 0) j["val_bits_per_byte"] = r.validation.bits_per_byte();
  }
  if (r.tokens_per_second > 0) {
    j["tokens_per_second"] = r.tokens_per_second;
    j["seconds_per_step"] = r.seconds_per_step;
  }
  fmt::print("{}\n", dump_json(j));
}

void train(const TrainArguments& args) {
  const RunConfig config = load_run_config(args.source, args.overrides);
  Trainer trainer(config);
  const volatile std::sig_atomic_t* stop = catch_stop_signals();
  const ModelParameters& p = trainer.model().parameters();
  const ModelOptions& options = trainer.model().options();
  const std::string device =
      options.device == Device::cuda ? gpu_info().name : fmt::format("{} threads", thread_count());
  spdlog::info("{}: {} parameters, {}, {}, {} tokens in {} steps of {}, run directory {}",
               trainer.config().name, human_count(double(p.count())), dtype_name(options.compute), device,
               human_count(double(trainer.total_steps() * trainer.batch_tokens())), trainer.total_steps(),
               trainer.batch_tokens(), trainer.config().run_dir().string());
  const MemoryPlan memory = plan_memory(trainer.model_config(), options);
  spdlog::info("memory: {} planned ({} weights, gradients and moments, {} activations), train.recompute = {}",
               human_bytes(double(memory.total())),
               human_bytes(double(memory.weights + memory.gradients + memory.moments)),
               human_bytes(double(memory.activations)), name_of(options.recompute));
  const RunResult result = trainer.run(stop);
  if (args.json) {
    print_json(trainer.config(), result);
  } else if (result.end == RunEnd::interrupted) {
    fmt::print("stopped at step {} of {}; the same command continues from there\n", result.steps,
               trainer.total_steps());
  } else {
    fmt::print("{} after {} tokens: validation loss {:.4f} nats/token over {} positions\n",
               result.end == RunEnd::finished ? "finished" : "had already finished",
               human_count(double(result.tokens)), result.validation.nats_per_token(),
               result.validation.scored);
  }
  if (result.end == RunEnd::interrupted) set_exit_status(128 + *stop);
}

}  // namespace

void add_train(CLI::App& app) {
  auto args = std::make_shared<TrainArguments>();
  CLI::App* cmd = app.add_subcommand("train", "Train a model, or continue a run that was stopped");
  cmd->footer(
      "Examples:\n"
      "  sps train xs_sps_w64_20b data.dir=data/fineweb\n"
      "  sps train demo_free_pause_pooled_tok_4m data.dir=data/text run.dtype=f32 run.threads=2\n"
      "  sps train my.toml optim.lr=3e-4\n"
      "  sps train --keys\n\n"
      "A recipe is "
      "{scale}_{family}[_{M}+{N}][_w{N|full}][_pooled][_tok][_phase{percent}]_{tokens}[_seed{n}].\n"
      "A run that stopped, for whatever reason, continues when the same command is given again.");
  cmd->add_option("recipe", args->source, "Recipe, or a TOML file with the keys that `--keys` lists");
  cmd->add_option("overrides", args->overrides, "key=value settings on top of it");
  cmd->add_flag("--keys", args->keys, "List every key with its type, default and meaning");
  cmd->add_flag("--json", args->json, "Print the result as one JSON object");
  cmd->callback([args] {
    if (args->keys) {
      RunConfig defaults;
      fmt::print("{}", bind(defaults).help());
      return;
    }
    if (args->source.empty()) usage_error("train needs a recipe or a TOML file, such as xs_sps_w64_20b");
    train(*args);
  });
}

}  // namespace sps
