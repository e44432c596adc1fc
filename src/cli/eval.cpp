#include "base/json.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/threads.h"
#include "cli/cli.h"
#include "data/data_tokenizer.h"
#include "infer/int8_weights.h"
#include "model/load.h"
#include "score/score.h"

namespace sps {

namespace {

struct EvalArguments {
  std::string checkpoint, data, split = "val", dtype = "auto", weights, device = "auto";
  int64_t tokens = 0, batch = 8;
  int threads = 0;
  bool json = false;
};

// Which keys the rows saw belongs to every likelihood.
std::string bands_text(const ModelConfig& c) {
  std::string text = "xx " + band_text(c.xx);
  if (c.has_pred()) text += ", xp " + band_text(c.xp) + ", px " + band_text(c.px) + ", pp " + band_text(c.pp);
  if (c.sliding_window > 0) text += fmt::format(", sliding window {}", c.sliding_window);
  return text;
}

void eval(const EvalArguments& args) {
  if (args.batch < 1) usage_error("--batch {}: expected at least 1", args.batch);
  if (args.tokens < 0) usage_error("--tokens {}: expected 0 (all) or more", args.tokens);
  if (args.threads > 0) set_thread_count(args.threads);
  TokenFile file = TokenFile::open(args.data, args.split);
  const auto path = find_checkpoint(args.checkpoint);
  const ModelConfig config = checkpoint_model_config(load_checkpoint(path, CheckpointParts::weights));
  const Device device = compute_device(args.device);
  const DType dtype = compute_dtype(args.dtype, device);
  const bool int8 = args.weights == "int8";
  const LoadedModel loaded =
      load_model(path, dtype, args.batch * config.context, device, int8 ? Masters::all : Masters::needed);
  // The store's weights become what 8 bits are read as.
  if (int8) Int8Weights(loaded.model->parameters(), loaded.model->store());
  std::unique_ptr<Tokenizer> tokenizer;
  if (file.meta()) {
    if (file.meta()->eot != config.eot || file.meta()->vocab_size > config.vocab)
      fail("{} was made for {} ids with end-of-text {}, the model has {} and {}", args.data,
           file.meta()->vocab_size, file.meta()->eot, config.vocab, config.eot);
    tokenizer = data_set_tokenizer(file.path().parent_path(), *file.meta());
  }
  file.set_vocab_size(config.vocab);
  const ValidationWindows windows(file, config.context, args.tokens);
  Progress progress("eval", windows.count(), "window");
  const Score score = score_windows(*loaded.model, file, windows, args.batch, tokenizer.get(),
                                    [&](int64_t done) { progress.update(done); });
  progress.finish(windows.count());
  nlohmann::ordered_json j{{"checkpoint", path.string()},
                           {"family", config.family},
                           {"bands", bands_text(config)},
                           {"tokens_trained", loaded.checkpoint.tokens},
                           {"data", args.data},
                           {"split", args.split},
                           {"dtype", dtype_name(dtype)},
                           {"weights", args.weights.empty() ? std::string(dtype_name(dtype)) : args.weights},
                           {"context", config.context},
                           {"windows", windows.count()},
                           {"scored", score.scored},
                           {"nats_per_token", score.nats_per_token()}};
  if (score.bytes > 0) j["bits_per_byte"] = score.bits_per_byte();
  if (args.json) {
    fmt::print("{}\n", dump_json(j));
    return;
  }
  for (const auto& [key, value] : j.items())
    fmt::print("{:<16}{}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
}

}  // namespace

void add_eval(CLI::App& app) {
  auto args = std::make_shared<EvalArguments>();
  CLI::App* cmd = app.add_subcommand("eval", "Likelihood of a token file under a trained model");
  cmd->footer("Example:\n  sps eval runs/xs_sps_w64_20b --data data/text --json");
  cmd->add_option("checkpoint", args->checkpoint, "Checkpoint, or run directory (its latest)")->required();
  cmd->add_option("--data", args->data, "Folder of token files, or one .bin file")->required();
  cmd->add_option("--split", args->split, "train or val")->capture_default_str();
  cmd->add_option("--tokens", args->tokens, "Positions to score; 0 = all")->capture_default_str();
  cmd->add_option("--batch", args->batch, "Windows per pass")->capture_default_str();
  cmd->add_option("--dtype", args->dtype, "auto, bf16, f32, f64")->capture_default_str();
  cmd->add_option("--weights", args->weights,
                  "int8: as 8 bits hold them, to see what that costs; otherwise as dtype")
      ->check(CLI::IsMember({"int8"}));
  cmd->add_option("--device", args->device, "auto (a GPU if there is one), cpu, cuda")->capture_default_str();
  add_threads_option(cmd, args->threads);
  cmd->add_flag("--json", args->json, "Print one JSON object");
  cmd->callback([args] { eval(*args); });
}

}  // namespace sps
