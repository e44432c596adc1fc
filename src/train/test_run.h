// For tests: a run of a dozen steps of a model of a few hundred numbers, and how to stop and continue it.
#pragma once

#include <csignal>
#include <filesystem>

#include "train/trainer.h"

namespace sps {

// 12 steps of 4 windows of 16 tokens: 2 of warm-up, 4 of decay; nothing is validated or saved before the end.
inline RunConfig tiny_run(const std::filesystem::path& data, const std::filesystem::path& run) {
  RunConfig c;
  c.name = "tiny";
  c.model.family = "sps", c.model.window = 2;
  c.model.layers = 2, c.model.d_model = 16, c.model.heads = 2, c.model.d_ffn = {24}, c.model.context = 16;
  c.train.tokens = 12 * 64, c.train.global_batch = 4, c.train.micro_batch = 2;
  c.train.eval_every_tokens = 0, c.train.eval_tokens = 128;
  c.train.save_every_tokens = 0, c.train.rolling_every_tokens = 0;
  c.optim.lr = 1e-2, c.optim.min_lr = 1e-3;
  c.schedule.warmup_tokens = 2 * 64, c.schedule.decay_tokens = 4 * 64;
  c.data.dir = data.string(), c.run.dir = run.string(), c.run.device = "cpu", c.run.dtype = "f32";
  return c;
}

inline std::vector<Trainer::Step> take_steps(Trainer& trainer, int64_t n) {
  std::vector<Trainer::Step> steps;
  for (int64_t i = 0; i < n; ++i) steps.push_back(trainer.step());
  return steps;
}

// As if a signal had come: saves and returns.
inline void stop(Trainer& trainer) {
  const volatile std::sig_atomic_t signal = SIGTERM;
  trainer.run(&signal);
}

// Trains to `steps` and stops there.
inline void run_part(const RunConfig& config, int64_t steps) {
  Trainer trainer(config);
  take_steps(trainer, steps - trainer.steps());
  stop(trainer);
}

}  // namespace sps
