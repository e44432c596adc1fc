// Rank files of tiktoken: a line for each token, its bytes in base64, a space, its rank, which is its id.
//
// tiktoken merges the pair whose result has the lowest rank, so every way to put a token together from two
// others is a merge, in the order of the results. A word that is a token is that token.
#pragma once

#include <filesystem>
#include <string_view>

#include "tokenizer/bpe_model.h"
#include "tokenizer/tokenizer.h"

namespace sps {

// The pattern and the special tokens are not in the file. They are known by its name without extension: gpt2,
// r50k_base, p50k_base, cl100k_base, o200k_base, and tokenizer.model for Llama 3. Any other file needs
// options.pattern and options.eot; its end of text has the id after the last.
BpeModel load_tiktoken(const std::filesystem::path& file, const TokenizerOptions& options = {});
// `stem` is what the name without extension would be.
BpeModel parse_tiktoken(std::string_view text, std::string_view what, std::string_view stem,
                        const TokenizerOptions& options = {});

}  // namespace sps
