#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "base/progress.h"
#include "base/rng.h"
#include "cli/cli.h"
#include "data/data_report.h"
#include "data/data_tokenizer.h"

namespace sps {

namespace {

constexpr size_t kFrequentTokens = 20;

struct ShowArguments {
  std::string data, split = "train", tokenizer;
  TokenizerOptions tokenizer_options;
  int64_t windows = 3, context = 128;
  uint64_t seed = 1;
  bool json = false;
};

// A stretch of the file as the documents it touches.
struct Window {
  int64_t start;
  std::vector<std::string> texts;
};

std::unique_ptr<Tokenizer> tokenizer_of(const TokenFile& file, const ShowArguments& args) {
  if (!args.tokenizer.empty()) {
    TokenizerOptions options = args.tokenizer_options;
    if (file.meta()) options.eot_id = file.meta()->eot;
    return make_tokenizer(args.tokenizer, options);
  }
  std::unique_ptr<Tokenizer> found;
  if (file.meta()) found = data_set_tokenizer(file.path().parent_path(), *file.meta());
  if (!found)
    usage_error("{} does not come with its tokenizer: name one with --tokenizer", file.path().string());
  return found;
}

std::vector<Window> draw_windows(const TokenFile& file, const Tokenizer& tokenizer,
                                 const ShowArguments& args) {
  std::vector<Window> windows;
  const int64_t length = std::min(args.context, file.size());
  if (length == 0) return windows;
  const Rng rng(args.seed, "windows to show");
  std::vector<int32_t> ids(static_cast<size_t>(length));
  for (int64_t i = 0; i < args.windows; ++i) {
    Window window{int64_t(rng.below(uint64_t(i), uint64_t(file.size() - length + 1))), {""}};
    file.read(window.start, length, ids.data());
    for (size_t at = 0; at < ids.size(); ++at) {
      window.texts.back() +=
          at == 0 ? tokenizer.token_bytes(ids[at]) : tokenizer.text_of(ids[at], ids[at - 1]);
      if (ids[at] == tokenizer.eot() && at + 1 < ids.size()) window.texts.emplace_back();
    }
    windows.push_back(std::move(window));
  }
  return windows;
}

void print_json(const ShowArguments& args, const TokenStatistics& found, double bytes_per_token,
                const Tokenizer& tokenizer, const std::vector<Window>& windows) {
  nlohmann::ordered_json j{{"data", args.data},
                           {"split", args.split},
                           {"tokenizer", tokenizer.name()},
                           {"vocab_size", tokenizer.vocab_size()},
                           {"tokens", found.tokens},
                           {"documents", found.documents},
                           {"bytes_per_token", bytes_per_token},
                           {"length",
                            {{"mean", found.mean_length()},
                             {"median", found.length_quantile(0.5)},
                             {"p90", found.length_quantile(0.9)},
                             {"p99", found.length_quantile(0.99)},
                             {"max", found.length_quantile(1)}}}};
  auto& histogram = j["length"]["histogram"] = nlohmann::ordered_json::array();
  const auto bins = found.length_histogram();
  for (size_t i = 0; i < bins.size(); ++i)
    histogram.push_back({{"from", uint64_t{1} << i}, {"to", (uint64_t{2} << i) - 1}, {"documents", bins[i]}});
  auto& frequent = j["frequent"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < std::min(kFrequentTokens, found.counts.size()); ++i) {
    const auto [id, count] = found.counts[i];
    frequent.push_back({{"id", id}, {"count", count}, {"text", tokenizer.token_bytes(id)}});
  }
  auto& shown = j["windows"] = nlohmann::ordered_json::array();
  for (const Window& window : windows) shown.push_back({{"start", window.start}, {"texts", window.texts}});
  fmt::print("{}\n", dump_json(j));
}

void print_text(const ShowArguments& args, const TokenStatistics& found, double bytes_per_token,
                const Tokenizer& tokenizer, const std::vector<Window>& windows) {
  fmt::print("{} {}: {} tokens in {} documents, {:.2f} bytes a token, tokenizer {} with {} ids\n", args.data,
             args.split, human_count(double(found.tokens)), found.documents, bytes_per_token,
             tokenizer.name(), tokenizer.vocab_size());
  fmt::print("\ntokens of a document: mean {:.1f}, median {}, 90 % {}, 99 % {}, longest {}\n",
             found.mean_length(), found.length_quantile(0.5), found.length_quantile(0.9),
             found.length_quantile(0.99), found.length_quantile(1));
  const auto bins = found.length_histogram();
  const uint64_t most = bins.empty() ? 0 : *std::max_element(bins.begin(), bins.end());
  for (size_t i = 0; i < bins.size(); ++i)
    fmt::print("{:>12} to {:>12} {:>10} {}\n", uint64_t{1} << i, (uint64_t{2} << i) - 1, bins[i],
               std::string(size_t(std::lround(40.0 * double(bins[i]) / double(most))), '#'));
  fmt::print("\nmost frequent tokens\n");
  for (size_t i = 0; i < std::min(kFrequentTokens, found.counts.size()); ++i) {
    const auto [id, count] = found.counts[i];
    fmt::print(
        "{:>8} {:>7.3f} %  {}\n", id, 100.0 * double(count) / double(found.tokens),
        id == tokenizer.eot() ? "(end of text)" : dump_json(nlohmann::json(tokenizer.token_bytes(id))));
  }
  for (const Window& window : windows) {
    fmt::print("\n---- {} tokens from {}\n", std::min(args.context, int64_t(found.tokens)), window.start);
    for (size_t i = 0; i < window.texts.size(); ++i)
      fmt::print("{}{}\n", i > 0 ? "(end of text)\n" : "", window.texts[i]);
  }
}

void show(const ShowArguments& args) {
  if (args.windows < 0) usage_error("--windows {}: expected 0 or more", args.windows);
  if (args.context < 1) usage_error("--context {}: expected at least 1", args.context);
  TokenFile file = TokenFile::open(args.data, args.split);
  const auto tokenizer = tokenizer_of(file, args);
  if (file.vocab_size() == 0) file.set_vocab_size(tokenizer->vocab_size());
  const TokenStatistics found = token_statistics(file, tokenizer->eot());
  uint64_t bytes = 0;
  for (const TokenCount& c : found.counts) bytes += c.count * tokenizer->token_bytes(c.id).size();
  const double bytes_per_token = found.tokens == 0 ? 0 : double(bytes) / double(found.tokens);
  const auto windows = draw_windows(file, *tokenizer, args);
  (args.json ? print_json : print_text)(args, found, bytes_per_token, *tokenizer, windows);
}

}  // namespace

void add_data(CLI::App& app) {
  CLI::App* cmd = app.add_subcommand("data", "Look at token files, or check them");
  cmd->footer("Examples:\n  sps data show data/text --split val --windows 2\n  sps data check data/text");
  cmd->require_subcommand(1);

  auto args = std::make_shared<ShowArguments>();
  CLI::App* shown =
      cmd->add_subcommand("show", "Lengths of documents, frequent tokens, and some of the text");
  shown->add_option("data", args->data, "Folder of token files, or one .bin file")->required();
  shown->add_option("--split", args->split, "train or val")->capture_default_str();
  shown->add_option("--windows", args->windows, "Pieces of text to show")->capture_default_str();
  shown->add_option("--context", args->context, "Tokens of each")->capture_default_str();
  shown->add_option("--seed", args->seed, "Seed of their places")->capture_default_str();
  shown->add_option("--tokenizer", args->tokenizer,
                    "For files that do not come with theirs: bytes, or its file");
  add_tokenizer_options(shown, args->tokenizer_options);
  shown->add_flag("--json", args->json, "Print one JSON object");
  shown->callback([args] { show(*args); });

  auto folder = std::make_shared<std::string>();
  CLI::App* checked = cmd->add_subcommand("check", "Read a data set and compare it with its meta.json");
  checked->add_option("data", *folder, "Folder of token files")->required();
  checked->callback([folder] {
    check_data_set(*folder);
    fmt::print("{}: no fault found\n", *folder);
  });
}

}  // namespace sps
