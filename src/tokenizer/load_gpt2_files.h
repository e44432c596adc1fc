// GPT-2's two files: tokens and ids in encoder.json (or vocab.json), merges in vocab.bpe (or merges.txt).
#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

#include "tokenizer/bpe_model.h"
#include "tokenizer/eot_config.h"
#include "tokenizer/tokenizer.h"

namespace sps {

// The merges are lines of two tokens with a space between; a first line that begins with "#version" is none.
// The files do not say how texts are split: by options.pattern, or else GPT-2's.
BpeModel load_gpt2_files(const std::filesystem::path& vocab, const std::filesystem::path& merges,
                         const TokenizerOptions& options = {});
// The same from texts; names for errors. `beside`: what other files say of the end of text.
BpeModel parse_gpt2_files(std::string_view vocab, std::string_view vocab_name, std::string_view merges,
                          std::string_view merges_name, const TokenizerOptions& options = {},
                          const std::function<EotChoice()>& beside = {});

}  // namespace sps
