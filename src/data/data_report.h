// What a token file holds, for people: lengths of documents, frequencies of tokens; and whether a data set is
// sound.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <vector>

#include "data/token_file.h"

namespace sps {

struct TokenCount {
  int32_t id = 0;
  uint64_t count = 0;
  bool operator==(const TokenCount&) const = default;
};

struct TokenStatistics {
  uint64_t tokens = 0, documents = 0;  // documents: end-of-text ids
  uint64_t unfinished_tokens = 0;      // after the last end of text
  std::map<uint64_t, uint64_t>
      lengths;                     // tokens of a document with its end of text -> how many have that many
  std::vector<TokenCount> counts;  // of every id that occurs, the most frequent first, then by id

  double mean_length() const;
  // The smallest length that at least this share (0, 1] of the documents do not exceed; 0 without documents.
  uint64_t length_quantile(double share) const;
  // Documents of 2^i up to, not including, 2^(i+1) tokens; as many entries as the longest needs.
  std::vector<uint64_t> length_histogram() const;
};

// Reads the whole file. Memory: 16 bytes for each id and each length that occurs, not for each token.
TokenStatistics token_statistics(const TokenFile& file, int32_t eot);

// Reads everything in the folder and compares it with meta.json. Error: the first thing that does not fit.
void check_data_set(const std::filesystem::path& folder);

}  // namespace sps
