#include "optim/schedule.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace sps {

void Schedule::validate() const {
  if (!(peak > 0) || !std::isfinite(peak)) usage_error("optim.lr is {}, expected a number above 0", peak);
  if (!(final >= 0 && final <= peak))
    usage_error("optim.min_lr is {}, expected a number from 0 to optim.lr, which is {}", final, peak);
  if (total_tokens < 1) usage_error("train.tokens is {}, expected an integer of at least 1", total_tokens);
  if (total_tokens > kMostTokens)
    usage_error("train.tokens is {}, expected an integer of at most {}", total_tokens, kMostTokens);
  if (batch_tokens < 1)
    usage_error("train.global_batch makes batches of {} tokens, expected at least 1", batch_tokens);
  if (warmup_tokens < 0)
    usage_error("schedule.warmup_tokens is {}, expected an integer of at least 0", warmup_tokens);
  if (decay_tokens < 0)
    usage_error("schedule.decay_tokens is {}, expected an integer of at least 0", decay_tokens);
  if (warmup_tokens > total_tokens || decay_tokens > total_tokens - warmup_tokens)
    usage_error(
        "schedule.warmup_tokens is {} and schedule.decay_tokens is {}, expected a sum of at most "
        "train.tokens, which is {}",
        warmup_tokens, decay_tokens, total_tokens);
}

double Schedule::lr_at(int64_t tokens) const {
  const int64_t t = std::max(tokens, batch_tokens);
  if (t < warmup_tokens) return peak * (double(t) / double(warmup_tokens));
  if (decay_tokens == 0 || t < decay_start()) return peak;
  if (t >= total_tokens) return final;
  return final + (1 - double(t - decay_start()) / double(decay_tokens)) * (peak - final);
}

}  // namespace sps
