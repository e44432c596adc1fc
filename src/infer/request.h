// What generation is asked for, and the rules that the slow and the cached way of doing it share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "infer/sampling.h"
#include "model/config.h"

namespace sps {

struct GenerateOptions {
  int64_t max_new = 128;
  SamplingOptions sampling;
  int64_t ids = 0;  // ids that may be drawn: [0, ids), the tokenizer's; 0: all
  bool stop_at_eot =
      true;  // an end-of-text that is drawn ends the text (it is not returned); else none is drawn
};

// The prompt's ids; of an empty prompt one end-of-text, as between documents. Usage error if an id is none of
// the model's, an option makes no sense, or prompt and new tokens do not fit the model's context.
std::vector<int32_t> checked_prompt(const ModelConfig& config, std::span<const int32_t> prompt,
                                    const GenerateOptions& options);

// By id: true for what is never drawn. Ids that are no text: beyond options.ids, and the row that predictions
// start from.
std::vector<bool> forbidden_ids(const ModelConfig& config, const GenerateOptions& options);

}  // namespace sps
