#include "report/report.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/progress.h"
#include "model/flops.h"
#include "model/load.h"

namespace sps {

namespace {

struct Metrics {
  std::vector<double> seconds;
  int64_t steps = 0, tokens = 0;
  double val_loss = NAN, bits_per_byte = 0;
};

Metrics read_metrics(const std::filesystem::path& path) {
  const std::string text = read_text(path);
  Metrics m;
  int64_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string where = fmt::format("{} line {}", path.string(), ++number);
    const nlohmann::json line = parse_json(std::string_view(text).substr(at, end - at), where);
    at = end + 1;
    try {
      if (line.contains("seconds")) {
        m.seconds.push_back(line.at("seconds"));
        m.steps = line.at("step"), m.tokens = line.at("tokens");
      }
      if (line.contains("val_loss") && line.at("val_loss").is_number()) {
        m.val_loss = line.at("val_loss");
        m.bits_per_byte = line.value("val_bits_per_byte", 0.0);
      }
    } catch (const nlohmann::json::exception& e) {
      fail("{} is no line of a run's metrics: {}", where, e.what());
    }
  }
  return m;
}

}  // namespace

RunSummary summarise_run(const std::filesystem::path& dir) {
  const auto latest = latest_checkpoint(dir);
  if (!latest) fail("{} holds no checkpoint of a run", dir.string());
  const LoadedCheckpoint checkpoint = load_checkpoint(latest->path, CheckpointParts::weights);
  const ModelConfig config = checkpoint_model_config(checkpoint);
  const Metrics metrics = read_metrics(dir / "metrics.jsonl");
  if (std::isnan(metrics.val_loss)) fail("{} has no validation in its metrics.jsonl", dir.string());

  RunSummary r;
  r.name = (dir.has_filename() ? dir : dir.parent_path()).filename().string();
  r.dir = dir;
  r.finished = checkpoint.kind == CheckpointKind::final;
  r.parameters = describe_parameters(config).count();
  r.steps = metrics.steps, r.tokens = metrics.tokens, r.context = config.context;
  r.val_loss = metrics.val_loss, r.bits_per_byte = metrics.bits_per_byte;
  if (!metrics.seconds.empty()) {
    std::vector<double> seconds = metrics.seconds;
    std::sort(seconds.begin(), seconds.end());
    r.seconds_per_step = seconds[seconds.size() / 2];
    r.tokens_per_second = double(metrics.tokens) / double(metrics.steps) / r.seconds_per_step;
  }
  r.flops_per_token = 3 * flops_required(config, config.context).total();
  r.executed_flops = 3 * flops_executed(make_plan(config), config.context).total();
  return r;
}

std::string report_table(const std::vector<RunSummary>& runs) {
  size_t width = 5;
  for (const RunSummary& r : runs) width = std::max(width, r.name.size());
  const bool bytes =
      std::all_of(runs.begin(), runs.end(), [](const RunSummary& r) { return r.bits_per_byte > 0; });
  std::string out = fmt::format("{:<{}}  {:>8}  {:>8}  {}{:>7}  {:>8}  {:>5}  {:>7}  {:>11}\n", "run", width,
                                "val loss", "vs first", bytes ? "bits/byte  " : "", "ms/step", "tokens/s",
                                "cost", "params", "FLOPs/token");
  for (const RunSummary& r : runs) {
    const double cost = runs[0].tokens_per_second > 0 ? runs[0].tokens_per_second / r.tokens_per_second : 0;
    out += fmt::format("{:<{}}  {:>8.4f}  {:>+8.4f}  {}{:>7.1f}  {:>8}  {:>5.2f}  {:>7}  {:>11}{}\n", r.name,
                       width, r.val_loss, r.val_loss - runs[0].val_loss,
                       bytes ? fmt::format("{:>9.4f}  ", r.bits_per_byte) : "", r.seconds_per_step * 1e3,
                       human_count(r.tokens_per_second), cost, human_count(double(r.parameters)),
                       human_count(r.flops_per_token), r.finished ? "" : "  (unfinished)");
  }
  return out;
}

std::string report_footer(const std::vector<RunSummary>& runs) {
  std::string out =
      "val loss: nats per token on the same validation windows; cost: time per token relative to the first "
      "row;\n"
      "FLOPs/token: training, as the mask requires\n";
  const RunSummary& first = runs[0];
  const auto same_tokens = [&](const RunSummary& r) { return r.tokens == first.tokens; };
  if (runs.size() < 2) return out;
  if (!std::all_of(runs.begin(), runs.end(), same_tokens))
    return out +
           "The runs have seen different numbers of tokens: their losses cannot be compared directly.\n";
  const RunSummary& best = *std::min_element(
      runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.val_loss < b.val_loss; });
  out += fmt::format("After {} tokens each, one seed: ", human_count(double(first.tokens)));
  if (&best == &first)
    return out +
           fmt::format("{} has the lowest loss; no other run has gained anything on it yet.\n", first.name);
  return out +
         fmt::format("{} has the lowest loss, {:.4f} nats below {}, at {:.2f} times its time per token.\n",
                     best.name, first.val_loss - best.val_loss, first.name,
                     first.tokens_per_second / best.tokens_per_second);
}

nlohmann::ordered_json report_json(const std::vector<RunSummary>& runs) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const RunSummary& r : runs)
    all.push_back({{"name", r.name},
                   {"run_dir", r.dir.string()},
                   {"finished", r.finished},
                   {"steps", r.steps},
                   {"tokens", r.tokens},
                   {"context", r.context},
                   {"val_loss", r.val_loss},
                   {"val_bits_per_byte", r.bits_per_byte},
                   {"seconds_per_step", r.seconds_per_step},
                   {"tokens_per_second", r.tokens_per_second},
                   {"parameters", r.parameters},
                   {"train_flops_per_token_required", r.flops_per_token},
                   {"train_flops_per_token_executed", r.executed_flops}});
  return all;
}

double unigram_entropy(const TokenFile& file) {
  std::vector<int64_t> counts;
  int64_t total = 0;
  constexpr int64_t kChunk = 1 << 16;
  std::vector<int32_t> ids(size_t{kChunk});
  int32_t before = -1;
  const int32_t eot = file.meta() ? file.meta()->eot : -1;
  for (int64_t at = 0; at < file.size(); at += kChunk) {
    const int64_t n = std::min(kChunk, file.size() - at);
    file.read(at, n, ids.data());
    for (int64_t i = 0; i < n; ++i) {
      const int32_t id = ids[size_t(i)];
      if (before != eot || eot < 0) {
        if (size_t(id) >= counts.size()) counts.resize(size_t(id) + 1, 0);
        ++counts[size_t(id)], ++total;
      }
      before = id;
    }
  }
  double entropy = 0;
  for (const int64_t c : counts)
    if (c > 0) entropy -= double(c) / double(total) * std::log(double(c) / double(total));
  return entropy;
}

}  // namespace sps
