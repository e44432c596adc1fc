#include "tokenizer/added_tokens.h"

#include "base/error.h"

namespace sps {

namespace {
uint64_t edge(uint32_t node, char c) {
  return uint64_t(node) << 8 | static_cast<unsigned char>(c);
}
}  // namespace

AddedTokens::AddedTokens(std::span<const AddedToken> tokens) {
  for (const AddedToken& token : tokens) {
    SPS_CHECK(!token.text.empty());
    uint32_t node = 0;
    for (const char c : token.text) {
      const auto [child, is_new] = children_.try_emplace(edge(node, c), uint32_t(nodes_.size()));
      if (is_new) nodes_.emplace_back();
      node = child->second;
    }
    SPS_CHECK(nodes_[node].id < 0);
    nodes_[node] = {token.id, token.special};
    const auto first = static_cast<unsigned char>(token.text[0]);
    any_ = begins_[first] = true;
    if (!token.special) any_plain_ = begins_plain_[first] = true;
  }
}

AddedTokens::Found AddedTokens::find(std::string_view text, size_t from, SpecialText special) const {
  const auto& begins = special == SpecialText::parsed ? begins_ : begins_plain_;
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!begins[static_cast<unsigned char>(text[begin])]) continue;
    Found longest{begin, begin, -1};
    uint32_t node = 0;
    for (size_t i = begin; i < text.size(); ++i) {
      const auto child = children_.find(edge(node, text[i]));
      if (child == children_.end()) break;
      node = child->second;
      const bool counts = special == SpecialText::parsed || !nodes_[node].special;
      if (nodes_[node].id >= 0 && counts) longest = {begin, i + 1, nodes_[node].id};
    }
    if (longest.id >= 0) return longest;
  }
  return {text.size(), text.size(), -1};
}

}  // namespace sps
