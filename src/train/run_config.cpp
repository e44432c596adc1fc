#include "train/run_config.h"

#include <algorithm>

#include "base/log.h"
#include "model/keys.h"
#include "model/load.h"

namespace sps {

namespace {

void bind_rest(OptionTable& t, RunConfig& c) {
  const auto one = at_least<int64_t>(1);
  t.add("train.tokens", &c.train.tokens, "tokens to train on", one);
  t.add("train.global_batch", &c.train.global_batch, "sequences per optimizer step", one);
  t.add("train.micro_batch", &c.train.micro_batch, "sequences per pass; must divide global_batch", one);
  t.add("train.seed", &c.train.seed, "seed of initial weights and data order", at_least<int64_t>(0));
  t.add("train.eval_every_tokens", &c.train.eval_every_tokens,
        "tokens between validations; 0 = only at the end", at_least<int64_t>(0));
  t.add("train.eval_tokens", &c.train.eval_tokens,
        "positions of the fixed validation set; 0 = all of val.bin", at_least<int64_t>(0));
  t.add("train.save_every_tokens", &c.train.save_every_tokens,
        "tokens between checkpoints that are kept; 0 = none", at_least<int64_t>(0));
  t.add("train.rolling_every_tokens", &c.train.rolling_every_tokens,
        "tokens between rolling checkpoints (the newest is kept); 0 = none", at_least<int64_t>(0));
  t.add("train.chunk_units", &c.train.chunk_units, "consecutive windows that stay together in the shuffle",
        one);
  t.add("train.recompute", &c.train.recompute,
        "made again by the backward pass, to save memory: none, ffn or block; the results are the same");
  t.add("optim.name", &c.optim.name, "adamw");
  t.add("optim.lr", &c.optim.lr, "peak learning rate", above(0.0));
  t.add("optim.min_lr", &c.optim.min_lr, "learning rate at the end of the decay", at_least(0.0));
  t.add("optim.beta1", &c.optim.beta1, "decay of the first moment", between(0.0, 0.9999999));
  t.add("optim.beta2", &c.optim.beta2, "decay of the second moment", between(0.0, 0.9999999));
  t.add("optim.eps", &c.optim.eps, "added to the root of the second moment", above(0.0));
  t.add("optim.weight_decay", &c.optim.weight_decay, "decoupled decay of all matrices", at_least(0.0));
  t.add("optim.clip", &c.optim.clip, "limit of the global gradient norm; 0 = none", at_least(0.0));
  t.add("schedule.warmup_tokens", &c.schedule.warmup_tokens, "tokens of the linear warm-up",
        at_least<int64_t>(0));
  t.add("schedule.decay_tokens", &c.schedule.decay_tokens, "tokens of the final linear decay",
        at_least<int64_t>(0));
  t.add("phase.at", &c.phase.at, "fraction of tokens to train as the standard model first",
        between(0.0, 1.0));
  t.add("freeze.from", &c.freeze.from,
        "checkpoint or run whose state tower is taken and frozen; empty = none");
  t.add("data.dir", &c.data.dir, "token files made by `sps prepare`");
  t.add("run.dir", &c.run.dir, "run directory; empty = runs/<recipe>");
  t.add("run.device", &c.run.device, "auto (a GPU if there is one), cpu, cuda");
  t.add("run.dtype", &c.run.dtype, "auto, bf16, f32 (f64: the slow reference)");
  t.add("run.threads", &c.run.threads, "0 = all cores", at_least<int64_t>(0));
  t.add("run.graphs", &c.run.graphs, "on a GPU: steps as CUDA graphs; the results are the same");
}

// `family=sps` for `model.family=sps`, and the design's `pred.input` for `model.pred_input`.
std::string full_key(const OptionTable& table, const std::string& assignment) {
  const size_t eq = assignment.find('=');
  const std::string key = assignment.substr(0, eq);
  if (eq == std::string::npos || table.has(key)) return assignment;
  if (key == "pred.input") return "model.pred_input" + assignment.substr(eq);
  if (table.has("model." + key)) return "model." + assignment;
  return assignment;
}

}  // namespace

OptionTable bind(RunConfig& config) {
  OptionTable table;
  bind_model(table, config.model);
  bind_rest(table, config);
  return table;
}

std::filesystem::path RunConfig::run_dir() const {
  return run.dir.empty() ? std::filesystem::path("runs") / name : std::filesystem::path(run.dir);
}

Schedule RunConfig::make_schedule() const {
  Schedule s;
  s.peak = optim.lr, s.final = optim.min_lr;
  s.warmup_tokens = schedule.warmup_tokens, s.decay_tokens = schedule.decay_tokens;
  s.total_tokens = train.tokens;
  if (train.global_batch > Schedule::kMostTokens / std::max<int64_t>(1, model.context))
    usage_error("train.global_batch = {} sequences of model.context = {} are more than {} tokens a step",
                train.global_batch, model.context, Schedule::kMostTokens);
  s.batch_tokens = train.global_batch * model.context;
  s.validate();
  return s;
}

RunConfig load_run_config(const std::string& source, const std::vector<std::string>& overrides) {
  RunConfig c;
  const bool file =
      source.ends_with(".toml") || (!looks_like_recipe(source) && std::filesystem::is_regular_file(source));
  if (file) {
    c.name = std::filesystem::path(source).stem().string();
    bind(c).set_from_toml(source);
  } else {
    c = recipe(source);
  }
  OptionTable table = bind(c);
  for (const std::string& assignment : overrides) table.set_assignment(full_key(table, assignment));

  if (c.optim.name != "adamw") usage_error("optim.name = '{}': expected adamw", c.optim.name);
  if (c.run.device != "auto" && c.run.device != "cpu" && c.run.device != "cuda")
    usage_error("run.device = '{}': expected auto, cpu or cuda", c.run.device);
  if (c.train.global_batch % c.train.micro_batch != 0)
    usage_error("train.micro_batch = {} does not divide train.global_batch = {}", c.train.micro_batch,
                c.train.global_batch);
  compute_dtype(c.run.dtype);
  recompute_from_name(c.train.recompute);
  const Schedule schedule = c.make_schedule();
  // Every step asks before it starts whether the second phase has come; this is where the last one starts.
  const auto last = double((schedule.steps() - 1) * schedule.batch_tokens);
  if (c.phase.at * double(c.train.tokens) > last)
    usage_error("phase.at = {}: the prediction tower would never start, expected at most {:.6g}", c.phase.at,
                last / double(c.train.tokens));
  return c;
}

void adopt_vocabulary(const TokenMeta& meta, const std::string& data_dir, ModelKeys& keys) {
  if (keys.eot == -1) keys.eot = meta.eot;
  if (keys.eot != meta.eot)
    usage_error("model.eot = {}: {} was made with the end-of-text id {}", keys.eot, data_dir, meta.eot);
  // One more row than the tokenizer has ids, for the prediction row of pred_input = row.
  constexpr int64_t multiple = 64;
  if (keys.vocab == -1) keys.vocab = (meta.vocab_size + 1 + multiple - 1) / multiple * multiple;
  if (keys.vocab < meta.vocab_size)
    usage_error("model.vocab = {} is too small: the tokenizer of {} has {} ids", keys.vocab, data_dir,
                meta.vocab_size);
}

}  // namespace sps
