// The ids of token files that no meta.json describes, looked at before a model trains on them.
#pragma once

#include <filesystem>
#include <span>

#include "data/token_file.h"

namespace sps {

// Error, naming the first one, unless all ids of the files are below their vocab_size(). Files that a
// meta.json describes and files whose type holds no larger id are left out. The others are read whole, on all
// threads; `note` then says for which files as they are now that was done, so that it is not done again
// (resumed runs). A note that cannot be used or written is done without.
void check_ids(std::span<const TokenFile* const> files, const std::filesystem::path& note);

}  // namespace sps
