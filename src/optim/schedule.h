// The learning rate as a function of tokens: linear warm-up, plateau, linear decay to `final`.
//
// A step is rated by t, the tokens trained before it, but at least one batch: the first step is not wasted on
// a rate of zero, and it shares the second one's. With D = total_tokens - decay_tokens:
//
//   t < warmup_tokens              peak * t / warmup_tokens
//   warmup_tokens <= t < D         peak
//   D <= t < total_tokens          final + (1 - (t - D) / decay_tokens) * (peak - final)
//   total_tokens <= t              final (no step is run there), or peak if decay_tokens = 0
//
// The first step at or after D still has the peak or nearly so; the last step stops one batch short of
// `final`.
#pragma once

#include <cstdint>

namespace sps {

struct Schedule {
  double peak = 6e-4;         // optim.lr
  double final = 6e-5;        // optim.min_lr
  int64_t warmup_tokens = 0;  // schedule.warmup_tokens; 0: none
  int64_t decay_tokens = 0;   // schedule.decay_tokens; 0: constant
  int64_t total_tokens = 0;   // train.tokens
  int64_t batch_tokens = 1;   // of one step: train.global_batch times the context

  // Of a run and of a batch, so that their sums and whole steps can be counted.
  static constexpr int64_t kMostTokens = int64_t{1} << 60;

  // Usage error that names the keys, unless 0 <= final <= peak > 0, the counts are not negative, the total is
  // from 1 to kMostTokens, the batch is positive, and warm-up and decay fit into the total.
  void validate() const;

  double lr_at(int64_t tokens) const;  // `tokens`: trained before the step

  int64_t decay_start() const { return total_tokens - decay_tokens; }
  // Steps are run until total_tokens have been trained: the last may pass them.
  int64_t steps() const { return steps_to(total_tokens); }
  int64_t final_tokens() const { return steps() * batch_tokens; }
  // Index of the first step that starts at or after `tokens`.
  int64_t steps_to(int64_t tokens) const { return tokens / batch_tokens + (tokens % batch_tokens != 0); }
};

}  // namespace sps
