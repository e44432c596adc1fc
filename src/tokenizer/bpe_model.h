// A byte-level BPE tokenizer as plain data: what the loaders make, the trainer trains, the writer writes and
// BpeTokenizer (bpe_tokenizer.h) runs. Tokens are bytes here; the printable alphabet of GPT-2's files exists
// only inside the loaders and the writer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sps {

// Two neighbours that may become one token. The earlier in the list, the sooner.
struct Merge {
  int32_t left, right, result;
  bool operator==(const Merge&) const = default;
};

// One step of cutting a text into the words that merges do not cross. Steps run in order, each on the pieces
// the one before left.
struct SplitStep {
  enum class Kind : uint8_t {
    pattern,  // every match of the pattern is a piece, and so is what lies between two matches
    digits,   // every number character is a piece of its own
  };
  Kind kind = Kind::pattern;
  std::string pattern;  // a regular expression over characters, for Kind::pattern
  bool operator==(const SplitStep&) const = default;
};

struct AddedToken {
  std::string text;
  int32_t id = 0;
  bool special = true;  // decodes to no bytes; else to its text
  bool operator==(const AddedToken&) const = default;
};

struct BpeModel {
  // Bytes of each id, for all ids; empty where the id is an added token or unused.
  std::vector<std::string> tokens;
  std::vector<Merge> merges;
  std::vector<SplitStep> splits;
  bool whole_words = false;       // a word that is a token is not merged up from its bytes ("ignore_merges")
  bool prefix_space = false;      // a text that does not begin with a space gets one
  bool nfc = false;               // texts are normalised to NFC first
  std::vector<AddedToken> added;  // sorted by id
  int32_t eot = -1;               // end of text: an added token
  bool operator==(const BpeModel&) const = default;
};

}  // namespace sps
