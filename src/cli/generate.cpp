#include <cstdio>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "base/threads.h"
#include "cli/cli.h"
#include "infer/generate.h"
#include "model/load.h"
#include "tokenizer/stream_decoder.h"
#include "tokenizer/tokenizer.h"

namespace sps {

namespace {

struct GenerateArguments {
  std::string checkpoint, prompt, tokenizer, dtype = "auto", device = "auto";
  GenerateOptions options;
  int threads = 0;
  bool json = false;
};

// The one that was asked for, the checkpoint's own, or bytes where the model was trained on those.
std::unique_ptr<Tokenizer> tokenizer_for(const std::string& given, const LoadedModel& loaded) {
  const int32_t eot = loaded.model->config().eot;
  std::string source = given;
  if (source.empty() && loaded.checkpoint.has_tokenizer)
    source = (loaded.checkpoint.path / kTokenizerFile).string();
  if (source.empty() && eot == ByteTokenizer().eot()) source = ByteTokenizer().name();
  if (source.empty())
    fail("{} does not come with its tokenizer: name one with --tokenizer", loaded.checkpoint.path.string());
  // The data set may have been made with another end of text than the tokenizer's files give away.
  auto tokenizer = make_tokenizer(source, {.eot_id = eot});
  if (tokenizer->eot() != eot)
    fail("{} was trained with the end-of-text id {}, the tokenizer '{}' has {}",
         loaded.checkpoint.path.string(), eot, source, tokenizer->eot());
  if (tokenizer->vocab_size() > loaded.model->config().vocab)
    fail("{} was trained with {} ids, the tokenizer '{}' has {}", loaded.checkpoint.path.string(),
         loaded.model->config().vocab, source, tokenizer->vocab_size());
  return tokenizer;
}

void run_generate(GenerateArguments& args) {
  check(args.options.sampling);
  if (args.threads > 0) set_thread_count(args.threads);
  const Device device = compute_device(args.device);
  const DType dtype = compute_dtype(args.dtype, device);
  const LoadedModel loaded = load_model(args.checkpoint, dtype, 0, device);
  const auto tokenizer = tokenizer_for(args.tokenizer, loaded);
  args.options.ids = tokenizer->vocab_size();
  std::vector<int32_t> prompt;
  if (const int64_t bos = loaded.model->config().bos; bos >= 0) prompt.push_back(int32_t(bos));
  tokenizer->encode(args.prompt, prompt);
  StreamDecoder decoder(*tokenizer, prompt.empty() ? -1 : prompt.back());
  std::string text;
  // The text appears as it is drawn, after the prompt; nothing does if there is an error instead.
  bool begun = false;
  const auto begin = [&] {
    if (!std::exchange(begun, true)) fmt::print("{}", args.prompt);
  };
  const auto show = [&](const std::string& piece) {
    text += piece;
    if (args.json) return;
    begin();
    fmt::print("{}", piece);
    std::fflush(stdout);
  };
  const std::vector<int32_t> ids =
      generate(*loaded.model, prompt, args.options, [&](int32_t id) { show(decoder.feed(id)); });
  show(decoder.flush());
  if (args.json)
    fmt::print("{}\n", dump_json(nlohmann::ordered_json{{"prompt", args.prompt},
                                                        {"prompt_tokens", prompt.size()},
                                                        {"new_tokens", ids.size()},
                                                        {"text", text}}));
  else
    begin(), fmt::print("\n");
}

}  // namespace

void add_generate(CLI::App& app) {
  auto args = std::make_shared<GenerateArguments>();
  CLI::App* cmd = app.add_subcommand("generate", "Continue a prompt");
  cmd->footer(
      "Example:\n  sps generate runs/demo_sps_w16_tok_4m --prompt 'The list' --tokens 200 --temperature 0.8");
  cmd->add_option("checkpoint", args->checkpoint, "Checkpoint, or run directory (its latest)")->required();
  cmd->add_option("-p,--prompt", args->prompt, "Text to continue; empty starts a new document");
  cmd->add_option("-n,--tokens", args->options.max_new, "New tokens at the most")->capture_default_str();
  cmd->add_option("--temperature", args->options.sampling.temperature, "0 = always the most likely token")
      ->capture_default_str();
  cmd->add_option("--top-k", args->options.sampling.top_k, "Only the k most likely tokens; 0 = all")
      ->capture_default_str();
  cmd->add_option("--top-p", args->options.sampling.top_p, "Only the smallest set with this probability")
      ->capture_default_str();
  cmd->add_option("--seed", args->options.sampling.seed, "Seed of the draws")->capture_default_str();
  cmd->add_option("--tokenizer", args->tokenizer,
                  "bytes, or a tokenizer's file; otherwise the checkpoint's own");
  cmd->add_option("--dtype", args->dtype, "auto, bf16, f32, f64")->capture_default_str();
  cmd->add_option("--device", args->device, "auto (a GPU if there is one), cpu, cuda")->capture_default_str();
  cmd->add_option("--threads", args->threads, "0 = all cores")->capture_default_str();
  cmd->add_flag("--json", args->json, "Print one JSON object");
  cmd->callback([args] { run_generate(*args); });
}

}  // namespace sps
