// prepare: documents in, a data set of token files out (token_file.h).
//
// Every document becomes its ids followed by one end-of-text id. The result depends on the texts, the
// tokenizer, the seed and val_fraction alone: not on the order or the number of the input files, nor on
// threads.
//   split   a document is for validation iff hash64(seed, text) < val_fraction * 2^64, so equal texts are on
//   one side.
//           With two documents or more neither side stays empty, unless val_fraction is 0.
//   order   within each side by a second hash, which keeps copies of one text apart.
//
// Pass 1 tokenises into a nameless temporary file in the output folder and keeps 24 bytes a document in
// memory; pass 2 writes the documents in their new order. Files appear complete or not at all, meta.json
// last.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/token_file.h"

namespace sps {

struct PrepareOptions {
  std::vector<std::string> inputs;  // files, folders, patterns (documents.h)
  std::string tokenizer = "bytes";
  std::filesystem::path out;  // created if need be
  std::string text_field = "text";
  double val_fraction = 0.01;  // [0, 1)
  uint64_t seed = 42;
  bool force = false;  // replace a data set with other content
};

struct PrepareProgress {
  std::string_view pass;         // "tokenising", "writing"
  uint64_t done = 0, total = 0;  // bytes of this pass
  uint64_t documents = 0;        // in this pass, up to now
};

// Returns what it wrote. Errors leave an existing data set as it was.
TokenMeta prepare(const PrepareOptions& options,
                  const std::function<void(const PrepareProgress&)>& progress = {});

}  // namespace sps
