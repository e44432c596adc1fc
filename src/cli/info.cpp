#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/progress.h"
#include "cli/cli.h"
#include "model/describe.h"
#include "model/load.h"
#include "tensor/device.h"
#include "train/run_config.h"
#include "train/trainer.h"

namespace sps {

namespace {

struct InfoArguments {
  std::string source;
  std::vector<std::string> overrides;
  DescribeOptions options;
  std::string device;  // "": the run's
  bool json = false;
};

// FLOPs of the whole run: a phased run trains the standard model first.
struct RunFlops {
  double published, required, executed;
};
RunFlops run_flops(const RunConfig& run, const ModelConfig& model, const DescribeOptions& options) {
  const auto sum = [&](const ModelConfig& c) {
    const auto training = [&](const Flops& f) { return training_flops(f, options.freeze); };
    const Plan plan = make_plan(c);
    const Flops again = flops_made_again(plan, options.recompute, options.freeze, options.length);
    return RunFlops{training(flops_published(c, options.length)), training(flops_required(c, options.length)),
                    training(flops_executed(plan, options.length)) + again.total()};
  };
  const double at = run.phase.at, tokens = double(run.train.tokens);
  const RunFlops after = sum(model), before = at > 0 ? sum(first_phase_model(model)) : after;
  const auto mix = [&](double RunFlops::*f) { return tokens * (at * before.*f + (1 - at) * after.*f); };
  return {mix(&RunFlops::published), mix(&RunFlops::required), mix(&RunFlops::executed)};
}

nlohmann::ordered_json run_json(const RunConfig& run, const RunFlops& flops) {
  const Schedule schedule = run.make_schedule();
  return {{"tokens", run.train.tokens},
          {"steps", schedule.steps()},
          {"batch_tokens", schedule.batch_tokens},
          {"micro_batch", run.train.micro_batch},
          {"recompute", run.train.recompute},
          {"lr", run.optim.lr},
          {"min_lr", run.optim.min_lr},
          {"warmup_tokens", run.schedule.warmup_tokens},
          {"decay_tokens", run.schedule.decay_tokens},
          {"phase_at", run.phase.at},
          {"flops",
           {{"published", flops.published}, {"required", flops.required}, {"executed", flops.executed}}}};
}

std::string run_text(const RunConfig& run, const RunFlops& flops) {
  const Schedule schedule = run.make_schedule();
  const auto count = [](int64_t n) { return human_count(double(n)); };
  std::string out = fmt::format("\nTraining: {} tokens in {} steps of {}\n", count(run.train.tokens),
                                grouped(schedule.steps()), grouped(schedule.batch_tokens));
  out += fmt::format("  {:<22}{:g} to {:g}; warm-up {} tokens, decay over the last {}\n", "learning rate",
                     run.optim.lr, run.optim.min_lr, count(run.schedule.warmup_tokens),
                     count(run.schedule.decay_tokens));
  out += fmt::format("  {:<22}{} sequences, {} in one pass\n", "batch", run.train.global_batch,
                     run.train.micro_batch);
  if (run.phase.at > 0)
    out += fmt::format("  {:<22}the standard model for the first {:g} % of the tokens\n", "phasing",
                       100 * run.phase.at);
  out += fmt::format("  {:<22}{:>16}{:>18}{:>18}\n", "FLOPs (columns above)",
                     fmt::format("{:.3e}", flops.published), fmt::format("{:.3e}", flops.required),
                     fmt::format("{:.3e}", flops.executed));
  return out;
}

// The run that a checkpoint belongs to; none where the weights came from elsewhere.
std::optional<RunConfig> run_of(const LoadedCheckpoint& checkpoint) {
  nlohmann::json stored = checkpoint.config;
  if (!stored.contains("run_model")) return std::nullopt;
  stored["model"] = stored["run_model"];  // the weights of a phased run's first part are another model's
  stored.erase("run_model");
  stored.erase("name");
  RunConfig run;
  bind(run).set_from_json(stored, (checkpoint.path / kConfigFile).string());
  run.run.dtype = checkpoint.state.value("dtype", run.run.dtype);
  return run;
}

void info(InfoArguments& args) {
  std::optional<RunConfig> run;
  ModelConfig model, final_model;
  std::string note;
  if (std::filesystem::is_directory(args.source)) {
    if (!args.overrides.empty())
      usage_error("{} is a checkpoint, whose model is settled: '{}' cannot be set", args.source,
                  args.overrides[0]);
    const LoadedCheckpoint checkpoint =
        load_checkpoint(find_checkpoint(args.source), CheckpointParts::weights);
    model = checkpoint_model_config(checkpoint);
    run = run_of(checkpoint);
    final_model = run ? resolve(run->model) : model;
    if (const auto frozen = frozen_state_of(checkpoint)) args.options.freeze = frozen->freeze;
    args.options.name =
        fmt::format("{}, {} tokens trained", checkpoint.path.string(), grouped(checkpoint.tokens));
  } else {
    run = load_run_config(args.source, args.overrides);
    model = final_model = resolve(run->model);
    args.options.name = run->name;
    for (const std::string& o : args.overrides) args.options.name += " " + o;
    check_freeze(*run, model);
    if (!run->freeze.from.empty())
      args.options.freeze =
          freeze_of(load_checkpoint(find_checkpoint(run->freeze.from), CheckpointParts::weights), model);
    if (run->model.vocab == -1)
      note = "\nNo vocabulary is set, so it is GPT-2's here; training takes the data's.\n";
  }
  const std::string wanted = !args.device.empty() ? args.device : run ? run->run.device : "auto";
  const bool gpu = wanted == "cuda" || (wanted == "auto" && gpu_count() > 0);  // planned, not opened
  args.options.device = gpu ? Device::cuda : Device::cpu;
  if (run) args.options.recompute = recompute_from_name(run->train.recompute);
  args.options.dtype = compute_dtype(run ? run->run.dtype : "auto", args.options.device);
  args.options.micro_batch = run ? run->train.micro_batch : 1;
  const Description d = describe(model, args.options);
  if (args.json) {
    nlohmann::ordered_json j = to_json(d);
    if (run) j["training"] = run_json(*run, run_flops(*run, final_model, d.options));
    fmt::print("{}\n", dump_json(j));
    return;
  }
  fmt::print("{}", to_text(d));
  if (run) fmt::print("{}{}", run_text(*run, run_flops(*run, final_model, d.options)), note);
}

}  // namespace

void add_info(CLI::App& app) {
  auto args = std::make_shared<InfoArguments>();
  CLI::App* cmd =
      app.add_subcommand("info", "What a model is and costs: parameters, mask, memory, caches, FLOPs");
  cmd->footer(
      "Examples:\n"
      "  sps info s_sps_w64_20b\n"
      "  sps info s_sequential_6+6_20b pred_input=vector tie_head=true --json\n"
      "  sps info demo_sps_w4_4m --mask 12 --length 256\n"
      "  sps info 1b_sps_w64_100b --device cuda train.recompute=block train.micro_batch=4\n"
      "  sps info runs/demo_sps_w16_tok_4m\n\n"
      "FLOPs are counted three ways. published: every query sees the whole sequence (square), head over the "
      "tokenizer's\n"
      "ids. required: the pairs the mask shows, head over all vocabulary rows. executed: required without "
      "dead work,\n"
      "and in training with what train.recompute makes again. Memory is forecast for the device that the run "
      "would take,\n"
      "or for --device, which need not be there.");
  cmd->add_option("model", args->source,
                  "Recipe, TOML file, checkpoint, or run directory (its latest checkpoint)")
      ->required();
  cmd->add_option("overrides", args->overrides, "key=value settings on top of a recipe or file");
  cmd->add_option("--length", args->options.length,
                  "Tokens of the document that FLOPs are counted for; 0 = the context")
      ->capture_default_str();
  cmd->add_option("--mask", args->options.picture, "Positions in the picture of the mask; 0 = none")
      ->capture_default_str();
  cmd->add_option("--device", args->device, "Forecast memory for: cpu, cuda, auto (a GPU if there is one)")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  cmd->add_flag("--json", args->json, "Print one JSON object");
  cmd->callback([args] { info(*args); });
}

}  // namespace sps
