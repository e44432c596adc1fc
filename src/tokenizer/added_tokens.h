// Finds added tokens in a text: the leftmost, and of those that begin there the longest.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>

#include "tokenizer/bpe_model.h"
#include "tokenizer/tokenizer.h"

namespace sps {

class AddedTokens {
 public:
  // Texts must differ and not be empty.
  explicit AddedTokens(std::span<const AddedToken> tokens);

  // Whether a text may hold any at all: special ones count only where they are parsed.
  bool any(SpecialText special) const { return special == SpecialText::parsed ? any_ : any_plain_; }

  struct Found {
    size_t begin, end;
    int32_t id;  // -1: none from there on
  };
  Found find(std::string_view text, size_t from, SpecialText special) const;

 private:
  // A trie. The children of a node are in one table: (node, byte) -> node; node 0 is the root.
  struct Node {
    int32_t id = -1;
    bool special = false;
  };
  std::vector<Node> nodes_{1};
  std::unordered_map<uint64_t, uint32_t> children_;
  std::array<bool, 256> begins_{}, begins_plain_{};
  bool any_ = false, any_plain_ = false;
};

}  // namespace sps
