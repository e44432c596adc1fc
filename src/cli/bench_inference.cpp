#include "cli/bench_inference.h"

#include <algorithm>
#include <fstream>
#include <optional>

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/threads.h"
#include "cli/bench_generation.h"
#include "cli/cli.h"
#include "tensor/device.h"

namespace sps {

namespace {

using Json = nlohmann::ordered_json;

struct InferenceArguments {
  std::vector<std::string> words;  // models and settings
  GenerationBench bench;
  int threads = 0;
  std::string device = "auto", dtype = "auto", weights, json;
  bool decode = false;
};

constexpr double kMega = 1e-6, kGiga = 1e-9;

std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(std::min(line.find(": ") + 2, line.size()));
  return "CPU";
}

// The first model without predictions is what the others are held against; -1: there is none.
int64_t standard_of(const std::vector<BenchSubject>& subjects) {
  for (size_t s = 0; s < subjects.size(); ++s)
    if (!subjects[s].config().has_pred()) return int64_t(s);
  return -1;
}

// Median over the rounds of one figure over another of the same round.
double ratio(const std::vector<double>& of, const std::vector<double>& to) {
  std::vector<double> ratios;
  for (size_t r = 0; r < std::min(of.size(), to.size()); ++r) ratios.push_back(of[r] / to[r]);
  return median(ratios);
}

// The spread is that of the middle four fifths.
Json milliseconds(const std::vector<double>& seconds) {
  return {{"median", 1e3 * median(seconds)},
          {"low", 1e3 * quantile(seconds, 0.1)},
          {"high", 1e3 * quantile(seconds, 0.9)}};
}

Json memory_json(const BenchSubject& subject, const GenerationTimes& t) {
  const DecoderMemory& m = t.memory.decoder;
  return {{"weights", subject.store().bytes()},
          {"int8_weights", m.int8},
          {"persistent", m.persistent},
          {"rings", m.rings},
          {"scratch", m.step + t.scratch},
          {"per_position", t.memory.bytes_per_position},
          {"per_text", t.memory.bytes_per_sequence}};
}

Json decode_json(int64_t batch, int64_t tokens, const GenerationTimes& t) {
  if (t.steps.empty())
    fail(
        "batch {}: the first text ends before the last begins: expected more than {} new tokens, or more "
        "rows a step",
        batch, tokens);
  Json j{{"tokens", tokens},
         {"ms_per_step", milliseconds(t.steps)},
         {"decode_tokens_per_sec", median(t.step_tokens_per_second)},
         {"tokens_per_sec", double(batch * tokens) / median(t.whole)},
         {"prefill_ms", 1e3 * median(t.prefill)},
         {"bytes_per_step",
          {{"weights", t.bytes.weights},
           {"keys", t.bytes.keys},
           {"logits", t.bytes.logits},
           {"total", t.bytes.total()}}},
         {"gbytes_per_second", kGiga * median(t.bytes_per_second)},
         {"drawn_xxh3", hex(t.drawn)}};
  if (t.programs.all > 0) j["programs"] = {{"launches", t.programs.all}, {"by_mail", t.programs.by_mail}};
  if (!t.ceilings.empty()) {
    j["ceiling_gbytes_per_second"] = kGiga * median(t.ceilings);
    j["of_ceiling"] = ratio(t.bytes_per_second, t.ceilings);
  }
  return j;
}

Json prefill_json(const GenerationBench& bench, const BenchSubject& subject, int64_t batch,
                  const GenerationTimes& t) {
  const double flops =
      double(batch) * decoder_prefill_flops(make_plan(subject.config()), bench.prompt).total();
  const double seconds = median(t.prefill);
  return {{"ms", milliseconds(t.prefill)},
          {"tokens_per_sec", double(batch * bench.prompt) / seconds},
          {"executed_flops", flops},
          {"executed_gflops", kGiga * flops / seconds}};
}

Json sampling_json(const SamplingOptions& o) {
  return {{"temperature", o.temperature},
          {"top_k", o.top_k},
          {"top_p", o.top_p},
          {"min_p", o.min_p},
          {"repetition_penalty", o.repetition_penalty},
          {"seed", o.seed}};
}

Json report(const InferenceArguments& args, DType dtype, Device device,
            const std::vector<BenchSubject>& subjects,
            const std::vector<std::vector<GenerationTimes>>& times) {
  const bool gpu = device == Device::cuda;
  Json j{{"what", args.decode ? "decode" : "prefill"},
         {"sps", SPS_VERSION},
         {"compiler", __VERSION__},
         {"device", gpu ? gpu_info().name : processor()},
         {"threads", thread_count()},
         {"dtype", dtype_name(dtype)},
         {"weights", args.weights.empty() ? std::string(dtype_name(dtype)) : args.weights},
         {"prompt", args.bench.prompt}};
  if (args.decode && gpu) j["chain"] = !args.bench.program;
  if (args.decode) j["sampling"] = sampling_json(args.bench.sampling);
  j["rounds"] = args.bench.rounds;
  if (args.bench.ceiling) j["ceiling"] = gpu ? "memory copied" : "memory read";
  j["results"] = Json::array();
  const int64_t standard = standard_of(subjects);
  for (size_t b = 0; b < args.bench.batches.size(); ++b)
    for (size_t s = 0; s < subjects.size(); ++s) {
      const GenerationTimes& t = times[s][b];
      const int64_t batch = args.bench.batches[b];
      Json row{{"model", subjects[s].name()},
               {"family", subjects[s].config().family},
               {"parameters", subjects[s].parameters().count()},
               {"batch", batch}};
      if (!t.error.empty()) {
        row["error"] = t.error;
      } else {
        row.update(args.decode ? decode_json(batch, args.bench.tokens[b], t)
                               : prefill_json(args.bench, subjects[s], batch, t));
        const auto* base = standard < 0 ? nullptr : &times[size_t(standard)][b];
        if (base != nullptr && base->error.empty())
          row["over_standard"] =
              args.decode ? ratio(t.step_medians, base->step_medians) : ratio(t.prefill, base->prefill);
        row["step_rows"] = args.bench.rows_of(batch);
        row["memory_bytes"] = memory_json(subjects[s], t);
      }
      j["results"].push_back(row);
    }
  return j;
}

std::string share_text(const Json& row, const char* key, const char* format) {
  return row.contains(key) ? fmt::format(fmt::runtime(format), row[key].get<double>()) : "-";
}

std::string table(const Json& j) {
  const bool decode = j["what"] == "decode";
  std::string out =
      fmt::format("{}, {}, {} threads, prompts of {}", j["device"].get<std::string>(),
                  j["dtype"].get<std::string>(), j["threads"].get<int>(), j["prompt"].get<int64_t>());
  if (j["weights"] != j["dtype"]) out += ", weights " + j["weights"].get<std::string>();
  if (j.contains("ceiling")) out += "; ceiling: " + j["ceiling"].get<std::string>();
  size_t width = 5;
  for (const Json& row : j["results"]) width = std::max(width, row["model"].get<std::string>().size());
  out += fmt::format("\n{:<{}}{:>7}", "model", width, "batch");
  out += decode ? fmt::format("{:>8}{:>9}{:>18}{:>8}{:>12}{:>10}{:>9}{:>8}{:>9}", "new", "ms/step", "",
                              "ratio", "tokens/s", "wall", "MB/step", "GB/s", "ceiling")
                : fmt::format("{:>10}{:>22}{:>8}{:>12}{:>10}{:>10}", "ms", "", "ratio", "tokens/s", "GFLOP",
                              "GFLOP/s");
  out += "   memory in MiB: weights, cache, rings, scratch\n";
  for (const Json& row : j["results"]) {
    out += fmt::format("{:<{}}{:>7}", row["model"].get<std::string>(), width, row["batch"].get<int64_t>());
    if (row.contains("error")) {
      out += "  " + row["error"].get<std::string>() + "\n";
      continue;
    }
    const Json& ms = row[decode ? "ms_per_step" : "ms"];
    const std::string spread =
        fmt::format("({:.3f}-{:.3f})", ms["low"].get<double>(), ms["high"].get<double>());
    const auto number = [&](const char* key) { return row[key].get<double>(); };
    if (decode)
      out += fmt::format("{:>8}{:>9.3f}{:>18}{:>8}{:>12.1f}{:>10.1f}{:>9.1f}{:>8.1f}{:>9}",
                         row["tokens"].get<int64_t>(), ms["median"].get<double>(), spread,
                         share_text(row, "over_standard", "{:.3f}"), number("decode_tokens_per_sec"),
                         number("tokens_per_sec"), kMega * row["bytes_per_step"]["total"].get<double>(),
                         number("gbytes_per_second"), share_text(row, "of_ceiling", "{:.2f}"));
    else
      out += fmt::format("{:>10.2f}{:>22}{:>8}{:>12.0f}{:>10.1f}{:>10.1f}", ms["median"].get<double>(),
                         spread, share_text(row, "over_standard", "{:.3f}"), number("tokens_per_sec"),
                         kGiga * number("executed_flops"), number("executed_gflops"));
    const Json& memory = row["memory_bytes"];
    const auto mib = [&](const char* key) { return memory[key].get<double>() / double(1 << 20); };
    out += fmt::format("   {:.1f} {:.1f} {:.1f} {:.1f}\n", mib("weights") + mib("int8_weights"),
                       mib("persistent"), mib("rings"), mib("scratch"));
  }
  return out;
}

void bench_inference(InferenceArguments args) {
  if (args.threads > 0) set_thread_count(args.threads);
  const Device device = compute_device(args.device);
  const DType dtype = compute_dtype(args.dtype, device);
  if (dtype == DType::f64) usage_error("--dtype f64: the reference is not measured, expected bf16 or f32");
  if (!args.weights.empty()) check_int8_serves("--weights int8", dtype, device);
  const bool gpu = device == Device::cuda;
  GenerationBench& b = args.bench;
  check(b.sampling);
  if (b.batches.empty()) b.batches = gpu ? std::vector<int64_t>{1, 4, 16, 64} : std::vector<int64_t>{1, 4};
  if (b.prompt == 0) b.prompt = gpu ? 1024 : 256;
  if (b.tokens.empty()) b.tokens = {!args.decode ? 1 : gpu ? 3072 : 64};
  if (b.tokens.size() == 1) b.tokens.resize(b.batches.size(), b.tokens[0]);
  if (b.tokens.size() != b.batches.size())
    usage_error("--tokens has {} numbers, --batch {}: expected one for all or one for each", b.tokens.size(),
                b.batches.size());
  if (b.rounds == 0) b.rounds = gpu && args.decode ? 2 : 3;
  for (const int64_t tokens : b.tokens)
    if (args.decode && tokens < 2)
      usage_error("--tokens {}: expected 2 or more, for there is no step after one", tokens);
  const std::vector<BenchSubject> subjects = bench_subjects(args.words, dtype, device, !args.weights.empty());
  for (const BenchSubject& s : subjects)
    if (s.config().text_ids() < 2) usage_error("{}: a vocabulary of one id leaves nothing to read", s.name());
  // Before minutes of measuring, for there may be no such place.
  std::optional<AtomicFile> file;
  if (!args.json.empty() && args.json != "-") file.emplace(args.json);
  const Json j = report(args, dtype, device, subjects, bench_generation(subjects, dtype, device, b));
  if (args.json == "-") {
    fmt::print("{}\n", dump_json(j));
    return;
  }
  fmt::print("{}", table(j));
  if (!file) return;
  file->write(storable_json(j, args.json));
  file->commit();
}

void add(CLI::App* bench, bool decode, const char* name, const char* text) {
  auto args = std::make_shared<InferenceArguments>();
  args->decode = decode, args->bench.ceiling = decode, args->bench.rounds = 0;
  CLI::App* cmd = bench->add_subcommand(name, text);
  cmd->add_option("models", args->words,
                  "Recipes or TOML files (random weights), checkpoints, run directories; key=value settings "
                  "for recipes")
      ->required();
  cmd->add_option("--batch", args->bench.batches,
                  "Texts at the same time, several with commas (1,4,16,64; CPU: 1,4)")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{4096}));
  cmd->add_option("--prompt", args->bench.prompt, "Tokens of a prompt (1024; CPU: 256)")
      ->check(CLI::PositiveNumber);
  if (decode)
    cmd->add_option("--tokens", args->bench.tokens,
                    "New tokens of a text (3072; CPU: 64); several with commas: one for each batch")
        ->delimiter(',')
        ->check(CLI::PositiveNumber);
  cmd->add_option("--rounds", args->bench.rounds,
                  "Timed rounds, in each of which every model takes its turn (3; decode on a GPU: 2)")
      ->check(CLI::PositiveNumber);
  cmd->add_option("--step-rows", args->bench.step_rows,
                  "Most positions of a step; 0: whole prompts of a batch, 16384 at the most")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  if (decode) add_sampling_options(cmd, args->bench.sampling);
  cmd->add_option("--device", args->device, "auto (a GPU if there is one), cpu, cuda")->capture_default_str();
  cmd->add_option("--dtype", args->dtype, "auto, bf16, f32")->capture_default_str();
  if (decode)
    cmd->add_option("--weights", args->weights, "int8: products read 8 bits (CPU, bf16); otherwise as dtype")
        ->check(CLI::IsMember({"int8"}));
  add_threads_option(cmd, args->threads);
  if (decode)
    cmd->add_flag("!--chain", args->bench.program,
                  "On a GPU: a kernel for every operation of a step, where one for many of them is the rule");
  if (decode) cmd->add_flag("!--no-ceiling", args->bench.ceiling, "Skip measuring the memory's ceiling");
  cmd->add_option("--json", args->json,
                  "Also write the figures to this file; - prints them instead of the table");
  cmd->callback([args] { bench_inference(*args); });
}

}  // namespace

void add_bench_inference(CLI::App* bench) {
  add(bench, true, "decode", "Generating tokens, several models side by side, beside the memory's ceiling");
  add(bench, false, "prefill", "Reading prompts, several models side by side");
}

}  // namespace sps
