// sps bench: a training step of any recipe, timed beside the matrix-product ceiling of the same machine;
// attention and products alone. bench_inference.cpp has generation.
#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/progress.h"
#include "base/rng.h"
#include "base/threads.h"
#include "cli/bench_attention.h"
#include "cli/bench_gemm.h"
#include "cli/bench_inference.h"
#include "cli/bench_memory.h"
#include "cli/cli.h"
#include "data/batch.h"
#include "model/flops.h"
#include "model/load.h"
#include "score/model_input.h"
#include "tensor/device.h"
#include "train/run_config.h"
#include "train/train_step.h"

namespace sps {

namespace {

struct BenchArguments {
  std::string source;
  std::vector<std::string> overrides;
  int steps = 10;
  double seconds = 0;
  int64_t document = 200;
  bool ceiling = true, json = false;
};

struct Sample {
  double median = 0, low = 0, high = 0;  // seconds
};

Sample summarise(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front(), times.back()};
}

// One whole step on random ids with a document border about every `document` tokens: forward, backward,
// gradient norm, clipping, AdamW. Validation, saving and reading data are not in it.
class StepBench {
 public:
  StepBench(const RunConfig& config, const ModelConfig& model_config, int64_t document)
      : config_(config),
        ex_(exec_on(compute_device(config.run.device))),
        model_(model_config, {.compute = compute_dtype(config.run.dtype, ex_.device),
                              .max_rows = config.train.micro_batch * model_config.context,
                              .device = ex_.device,
                              .recompute = recompute_from_name(config.train.recompute),
                              .graphs = config.run.graphs}),
        optimizer_(model_.store()) {
    model_.store().initialise(uint64_t(config.train.seed));
    const Rng rng(0, "bench");
    const int64_t length = model_config.context, micro = config.train.micro_batch;
    std::vector<int32_t> window;
    for (int64_t m = 0; m < config.train.global_batch / micro; ++m) {
      window.clear();
      for (int64_t i = 0; i < micro * (length + 1); ++i) {
        const auto n = uint64_t(m * micro * (length + 1) + i);
        window.push_back(document > 0 && rng.below(2 * n, uint64_t(document)) == 0
                             ? int32_t(model_config.eot)
                             : int32_t(rng.below(2 * n + 1, uint64_t(model_config.eot))));
      }
      batches_.emplace_back();
      batches_.back().fill(window, length, special_ids(model_config));
    }
  }

  double step() {
    const double began = monotonic_seconds();
    ops::AdamW settings;
    settings.lr = 1e-4;
    loss_ = train_step(model_, optimizer_, batches_, settings, config_.optim.clip).loss;
    synchronize(ex_);
    return monotonic_seconds() - began;
  }
  const Model& model() const { return model_; }
  bool gpu() const { return ex_.device == Device::cuda; }
  double loss() const { return loss_; }
  int64_t tokens() const { return config_.train.global_batch * model_.config().context; }

 private:
  RunConfig config_;
  Exec ex_;
  Model model_;
  AdamWOptimizer optimizer_;
  std::vector<Batch> batches_;
  double loss_ = 0;
};

void bench_train(const BenchArguments& args) {
  RunConfig config = load_run_config(args.source, args.overrides);
  if (!config.data.dir.empty())
    if (const auto meta = read_token_meta(config.data.dir))
      adopt_vocabulary(*meta, config.data.dir, config.model);
  if (config.run.threads > 0) set_thread_count(int(config.run.threads));
  const ModelConfig model_config = resolve(config.model);
  StepBench bench(config, model_config, args.document);
  bench.step(), bench.step();  // warm-up: scratch grows, primitives are made
  // Before the ceiling's own matrices are there.
  const size_t allocated = device_peak_bytes(), used = bench.gpu() ? gpu_memory_used() : 0;
  std::vector<double> times, ceilings;
  const double began = monotonic_seconds();
  const DType dtype = bench.model().options().compute;
  while (int(times.size()) < args.steps || monotonic_seconds() - began < args.seconds) {
    times.push_back(bench.step());
    // Interleaved, so that both see the same machine.
    if (args.ceiling && times.size() % 4 == 1)
      ceilings.push_back(bench.gpu() ? gpu_gemm_flops_per_second(dtype).median
                                     : gemm_flops_per_second(dtype));
  }
  const Sample s = summarise(times);
  const double tokens = double(bench.tokens());
  const double required = 3 * flops_required(model_config, model_config.context).total() * tokens;
  const ModelOptions& options = bench.model().options();
  const Plan& plan = bench.model().plan();
  const double executed =
      tokens * (training_flops(flops_executed(plan, model_config.context), {}) +
                flops_made_again(plan, options.recompute, {}, model_config.context).total());
  nlohmann::ordered_json j{{"recipe", config.name},
                           {"device", bench.gpu() ? gpu_info().name : "CPU"},
                           {"dtype", dtype_name(dtype)},
                           {"recompute", name_of(options.recompute)},
                           {"micro_batch", config.train.micro_batch},
                           {"threads", thread_count()},
                           {"loss", bench.loss()},
                           {"parameters", bench.model().parameters().count()},
                           {"tokens_per_step", bench.tokens()},
                           {"document", args.document},
                           {"steps", times.size()},
                           {"seconds_per_step", s.median},
                           {"seconds_low", s.low},
                           {"seconds_high", s.high},
                           {"tokens_per_second", tokens / s.median},
                           {"required_gflops", required / s.median * 1e-9},
                           {"executed_gflops", executed / s.median * 1e-9}};
  const MemoryPlan memory = plan_memory(model_config, options);
  j["memory_forecast_bytes"] = memory.total();
  if (bench.gpu()) {
    j["graphs"] = options.graphs;
    // Allocated by this program, and what the driver says is in use: the forecast is of the latter.
    j["memory_allocated_bytes"] = allocated;
    j["memory_used_bytes"] = used;
  }
  if (args.ceiling) {
    const double ceiling = *std::max_element(ceilings.begin(), ceilings.end());
    j["ceiling_gflops"] = ceiling * 1e-9;
    j["executed_of_ceiling"] = executed / s.median / ceiling;
  }
  if (args.json) {
    fmt::print("{}\n", dump_json(j));
    return;
  }
  for (const auto& [key, value] : j.items())
    fmt::print("{:<22}{}\n", key,
               value.is_string()         ? value.get<std::string>()
               : value.is_number_float() ? fmt::format("{:.6g}", value.get<double>())
                                         : value.dump());
}

void bench_gemm(const std::string& device, bool json) {
  nlohmann::ordered_json j;
  const bool gpu = compute_device(device) == Device::cuda;
  j["device"] = gpu ? gpu_info().name : "CPU";
  if (gpu) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const GemmRate rate = gpu_gemm_flops_per_second(dtype);
      j[std::string(dtype_name(dtype)) + "_gflops"] = rate.median * 1e-9;
      j[std::string(dtype_name(dtype)) + "_best_gflops"] = rate.best * 1e-9;
    }
    j["copy_gbytes"] = gpu_copy_bytes_per_second() * 1e-9;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    if (gpu) break;
    if (dtype == DType::bf16 && compute_dtype("auto") != DType::bf16) continue;
    j[std::string(dtype_name(dtype)) + "_gflops"] = gemm_flops_per_second(dtype) * 1e-9;
  }
  if (json)
    fmt::print("{}\n", dump_json(j));
  else
    for (const auto& [key, value] : j.items())
      fmt::print("{:<18}{}\n", key,
                 value.is_string() ? value.get<std::string>() : fmt::format("{:.0f}", value.get<double>()));
}

void bench_attention(const std::string& device, const std::string& dtype, AttentionBench bench, bool json) {
  bench.device = compute_device(device);
  bench.dtype = compute_dtype(dtype, bench.device);
  if (bench.dtype == DType::f64)
    usage_error("--dtype f64: the reference is not measured, expected bf16 or f32");
  if (bench.kv_heads == 0) bench.kv_heads = bench.heads;
  if (bench.heads % bench.kv_heads != 0)
    usage_error("--kv-heads {}: {} heads cannot share them evenly", bench.kv_heads, bench.heads);
  nlohmann::ordered_json j{{"device", bench.device == Device::cuda ? gpu_info().name : "CPU"},
                           {"dtype", dtype_name(bench.dtype)},
                           {"batch", bench.batch},
                           {"length", bench.length},
                           {"heads", bench.heads},
                           {"kv_heads", bench.kv_heads},
                           {"head_dim", bench.head_dim},
                           {"document", bench.document},
                           {"window", bench.window}};
  for (const AttentionTime& t : time_attention(bench))
    j[t.family] = {{"forward_ms", t.forward_ms},
                   {"backward_ms", t.backward_ms},
                   {"forward_tflops", t.forward_tflops},
                   {"backward_tflops", t.backward_tflops}};
  if (json) {
    fmt::print("{}\n", dump_json(j));
    return;
  }
  fmt::print("{:<12}{:>12}{:>12}{:>16}{:>16}\n", "", "forward ms", "backward ms", "forward TFLOP/s",
             "backward TFLOP/s");
  for (const char* family : {"standard", "sps", "free_pause"})
    fmt::print("{:<12}{:>12.3f}{:>12.3f}{:>16.1f}{:>16.1f}\n", family, j[family]["forward_ms"].get<double>(),
               j[family]["backward_ms"].get<double>(), j[family]["forward_tflops"].get<double>(),
               j[family]["backward_tflops"].get<double>());
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* cmd = app.add_subcommand("bench", "Measure speed on this machine");
  cmd->require_subcommand(1);
  cmd->footer(
      "Examples:\n"
      "  sps bench train demo_sps_w16_4m --json\n"
      "  sps bench train xs_standard_20b run.device=cuda run.graphs=false\n"
      "  sps bench decode s_standard_20b s_sps_w64_20b s_free_pause_20b --batch 1,16\n"
      "  sps bench prefill s_standard_20b s_sequential_6+6_20b --prompt 512\n"
      "  sps bench attention --head-dim 128\n"
      "  sps bench gemm");

  auto args = std::make_shared<BenchArguments>();
  CLI::App* train =
      cmd->add_subcommand("train", "Training steps of a recipe, beside the matrix-product ceiling");
  train->add_option("recipe", args->source, "Recipe or TOML file")->required();
  train->add_option("overrides", args->overrides, "key=value settings");
  train->add_option("--steps", args->steps, "Timed steps, at least")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  train->add_option("--document", args->document, "Mean tokens of a document; 0: one fills each window")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  train->add_option("--seconds", args->seconds, "Keep on for this long")->capture_default_str();
  train->add_flag("!--no-ceiling", args->ceiling, "Skip measuring the ceiling");
  train->add_flag("--json", args->json, "Print one JSON object");
  train->callback([args] { bench_train(*args); });

  add_bench_inference(cmd);

  struct AttentionArguments {
    std::string device = "auto", dtype = "auto";
    AttentionBench bench;
    bool json = false;
  };
  auto attention_args = std::make_shared<AttentionArguments>();
  attention_args->bench.kv_heads = 0;
  CLI::App* attention =
      cmd->add_subcommand("attention", "Attention alone for standard, sps and free_pause, in turns");
  attention->add_option("--device", attention_args->device, "auto (a GPU if there is one), cpu, cuda")
      ->capture_default_str();
  attention->add_option("--dtype", attention_args->dtype, "auto, bf16, f32")->capture_default_str();
  const auto size = [&](const char* name, int64_t* value, const char* text) {
    attention->add_option(name, *value, text)->capture_default_str()->check(CLI::PositiveNumber);
  };
  size("--batch", &attention_args->bench.batch, "Sequences");
  size("--length", &attention_args->bench.length, "Tokens of a sequence");
  size("--heads", &attention_args->bench.heads, "Query heads");
  size("--head-dim", &attention_args->bench.head_dim, "Numbers of a head");
  size("--window", &attention_args->bench.window, "Window of sps");
  attention->add_option("--kv-heads", attention_args->bench.kv_heads, "Key heads; 0: as many as query heads")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  attention
      ->add_option("--document", attention_args->bench.document,
                   "Mean tokens of a document; 0: one fills each")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  attention->add_flag("--json", attention_args->json, "Print one JSON object");
  attention->callback([a = attention_args] { bench_attention(a->device, a->dtype, a->bench, a->json); });

  struct GemmArguments {
    std::string device = "auto";
    bool json = false;
  };
  auto gemm_args = std::make_shared<GemmArguments>();
  CLI::App* gemm =
      cmd->add_subcommand("gemm", "The machine's ceilings: square matrix products, on a GPU also copies");
  gemm->add_option("--device", gemm_args->device, "auto (a GPU if there is one), cpu, cuda")
      ->capture_default_str();
  gemm->add_flag("--json", gemm_args->json, "Print one JSON object");
  gemm->callback([gemm_args] { bench_gemm(gemm_args->device, gemm_args->json); });
}

}  // namespace sps
