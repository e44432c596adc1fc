// The tokenizer of a data set: known by its name ("bytes"), or in the folder's own tokenizer.json.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "data/token_file.h"
#include "tokenizer/tokenizer.h"

namespace sps {

inline constexpr const char* kDataTokenizerFile = "tokenizer.json";

// The tokenizer that made the ids in `folder`, or null if it is not there. An error if the one that is there
// gives other ids.
std::unique_ptr<Tokenizer> data_set_tokenizer(const std::filesystem::path& folder, const TokenMeta& meta);

}  // namespace sps
