// Writes a byte-level BPE as the tokenizer.json of Hugging Face's `tokenizers`, which gives the same ids
// there (docs/formats/tokenizer.md). Equal models give equal bytes.
#pragma once

#include <string>

#include "tokenizer/bpe_model.h"

namespace sps {

// Errors name what such a file cannot say: two ids with the same text, text that is not UTF-8, a leading
// space together with splits other than GPT-2's pattern.
std::string to_tokenizer_json(const BpeModel& model);

// The tokenizer_config.json beside it: tells `transformers` which token ends a text.
std::string to_tokenizer_config_json(const BpeModel& model);

}  // namespace sps
