// prepare: documents in, a data set of token files out (token_file.h).
//
// Every document becomes its ids followed by one end-of-text id. The result depends on the documents, the
// tokenizer, the seed and val_fraction alone: not on the order or the number of the input files, nor on
// threads, nor on interruptions.
//   split   a document is for validation iff hash64(seed, key) < val_fraction * 2^64. Its key is its text, so
//   that
//           equal texts are on one side, or its id. With two documents or more neither side stays empty,
//           unless val_fraction is 0.
//   order   within each side by a second hash, which keeps copies of one text apart.
//
// Pass 1 (prepare_tokenise.cpp) tokenises into the hidden folder OUT/.prepare and notes every few seconds how
// far it is; pass 2 (prepare_order.cpp) sorts the documents and writes them in their new order. Started again
// with the same inputs, tokenizer, seed and fields, pass 1 goes on from its last note and a pass 2 that did
// not end begins anew. Files appear complete or not at all, meta.json last.
//
// Memory: some 250 MB, and about six times the text of the largest document.
// Disk while it runs: twice the token files, 40 bytes a document, and as much again where these are sorted.
// After the first space_sample_bytes of the input it is known how much that will be; if the disk has less
// than half of it free, which no error of the estimate explains, that is an Error at once, and if it has less
// than all of it a warning.
#pragma once

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/token_file.h"
#include "tokenizer/tokenizer.h"

namespace sps {

struct PrepareOptions {
  std::vector<std::string> inputs;  // files, folders, patterns (documents.h)
  std::string tokenizer = "bytes";  // make_tokenizer()
  TokenizerOptions tokenizer_options{};
  std::filesystem::path out;  // created if need be
  std::string text_field = "text", id_field = "id";
  SplitBy split_by = SplitBy::text;
  TokenFormat format = TokenFormat::sps;
  double val_fraction = 0.01;  // [0, 1)
  uint64_t seed = 42;
  bool force = false;                    // replace a data set with other content
  double save_seconds = 5;               // between two notes of pass 1
  size_t sort_bytes = size_t{64} << 20;  // memory for sorting; the result does not depend on it
  uint64_t space_sample_bytes = uint64_t{16} << 20;
  // Bytes that are free on the disk of a folder; empty: as the system says.
  std::function<uint64_t(const std::filesystem::path&)> free_bytes{};
};

struct PrepareProgress {
  std::string_view pass;         // "tokenising", "sorting", "writing"
  uint64_t done = 0, total = 0;  // bytes of this pass: of the inputs, of records, of tokens; total 0: unknown
  uint64_t documents = 0;        // in this pass, up to now
};
using PrepareReport = std::function<void(const PrepareProgress&)>;

// Returns what it wrote. Errors leave an existing data set as it was.
TokenMeta prepare(const PrepareOptions& options, const PrepareReport& progress = {});

// The same, or nothing if `stop` became other than 0 meanwhile: then what is done is kept and the same call
// goes on from there, unless documents came from standard input.
std::optional<TokenMeta> prepare_until(const PrepareOptions& options, const volatile std::sig_atomic_t* stop,
                                       const PrepareReport& progress = {});

}  // namespace sps
