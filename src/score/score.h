// Corpus likelihood: what a model gives the positions of a set of windows. Validation during training and
// `sps eval --data` report the same numbers because both are this function.
#pragma once

#include <functional>

#include "data/sampler.h"
#include "data/token_file.h"
#include "tokenizer/tokenizer.h"
#include "model/model.h"

namespace sps {

struct Score {
  double nll = 0;       // nats, summed over the scored positions
  int64_t scored = 0;   // positions with a target (inputs that are end of text carry none)
  int64_t bytes = 0;    // bytes of text that the scored targets stand for; 0 without a tokenizer
  double nats_per_token() const { return scored > 0 ? nll / double(scored) : 0; }
  double bits_per_byte() const;
};

// Scores the windows in batches of at most `batch` sequences; batch * context <= the model's max_rows. The sum is
// taken window by window, so it does not depend on the batch. `tokenizer` may be null.
Score score_windows(Model& model, const TokenFile& file, const ValidationWindows& windows, int64_t batch,
                    const Tokenizer* tokenizer, const std::function<void(int64_t done)>& progress = {});

}  // namespace sps
