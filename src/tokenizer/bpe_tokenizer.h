// Byte-level BPE: runs a BpeModel.
#pragma once

#include <array>
#include <memory>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe_model.h"
#include "tokenizer/merge_table.h"
#include "tokenizer/splitter.h"
#include "tokenizer/token_index.h"
#include "tokenizer/tokenizer.h"

namespace sps {

// encode() never gives special tokens unless they are parsed. Added tokens that are not special are
// vocabulary: text that spells one always becomes it. Any bytes can be encoded, and unless the model changes
// texts (nfc, prefix_space) they decode to themselves.
//
// Each thread remembers the words it saw in a table of fixed size, so a word's merges are mostly done once.
class BpeTokenizer final : public Tokenizer {
 public:
  // Error if the model contradicts itself.
  explicit BpeTokenizer(BpeModel model);

  std::string name() const override;  // "bpe-" and the size of the vocabulary
  int32_t vocab_size() const override { return int32_t(bytes_.size()); }
  int32_t eot() const override { return model_.eot; }
  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    encode(text, ids, SpecialText::plain);
  }
  void encode(std::string_view text, std::vector<int32_t>& ids, SpecialText special) const override;
  // Memory: a bit for each byte of a long word, and what a change of the text (nfc, prefix_space) or a
  // pattern that no scanner knows needs, which is a copy of it.
  void encode_in_parts(std::string_view text,
                       const std::function<void(std::span<const int32_t>)>& take) const override;
  std::string_view token_bytes(int32_t id) const override {
    return id >= 0 && id < vocab_size() ? bytes_[size_t(id)] : std::string_view();
  }
  std::string fingerprint() const override { return fingerprint_; }
  std::string to_json() const override;
  const BpeModel& model() const { return model_; }

 private:
  // Where ids go: into a vector that is handed on and emptied now and then, if somebody takes them.
  struct Output {
    std::vector<int32_t>& ids;
    const std::function<void(std::span<const int32_t>)>* take = nullptr;
    size_t limit = SIZE_MAX;
    void hand_on() {
      if (ids.size() < limit) return;
      (*take)(ids);
      ids.clear();
    }
  };
  void encode(std::string_view text, Output& out, SpecialText special) const;
  void encode_between(std::string_view text, Output& out) const;  // added tokens
  void encode_words(std::string_view text, Output& out) const;
  void encode_word(std::string_view word, Output& out) const;  // without looking at the cache
  MergeTable::Applied merge_bytes(std::string_view word, std::vector<int32_t>& ids) const;  // appends
  void drop_dead_merges();
  std::string make_fingerprint() const;

  BpeModel model_;
  TokenIndex index_;
  MergeTable merges_;
  Splitter splitter_;
  AddedTokens added_;
  std::array<int32_t, 256> byte_ids_;
  std::vector<std::string_view> bytes_;  // of each id
  std::vector<uint8_t> merges_up_;       // whether a token's bytes alone merge up to it
  std::vector<Merge> live_merges_;       // what merges_ is made of
  size_t longest_token_ = 0;             // bytes
  std::string fingerprint_;
  uint32_t number_;  // of this object, for the words that threads remember
};

}  // namespace sps
