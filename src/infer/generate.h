// Text generation by running the whole sequence through the model for every new token: slow and plainly right. It is
// the truth that cached decoding is held to.
#pragma once

#include <functional>

#include "infer/sampling.h"
#include "model/model.h"

namespace sps {

struct GenerateOptions {
  int64_t max_new = 128;
  SamplingOptions sampling;
  int64_t ids = 0;          // ids that may be drawn: [0, ids), the tokenizer's; 0: all
  bool stop_at_eot = true;  // an end-of-text that is drawn ends the text (it is not returned)
};

// Returns the new ids; `each` sees every one as it is drawn. The prompt may be empty: then it is one end-of-text, as
// between documents. Usage error if prompt and new tokens do not fit the model's context.
std::vector<int32_t> generate(Model& model, std::span<const int32_t> prompt, const GenerateOptions& options,
                              const std::function<void(int32_t)>& each = {});

}  // namespace sps
