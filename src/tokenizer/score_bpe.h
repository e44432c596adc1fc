// BPE whose pieces have scores, as sentencepiece trains it and llama2.c stores it: there is no list of
// merges; of all neighbouring pairs whose joined text is a piece the one with the highest score is joined,
// the leftmost of equal ones, until there is none.
//
//   1. A text that is not empty gets a space in front, which decoding takes off again.
//   2. It is cut into characters. One that is no piece, and bytes that are no UTF-8, become byte ids <0xNN>,
//      which are never joined.
//   3. Pairs are joined as said.
//
// Any bytes can be encoded and decode to themselves. Control ids (unknown, begin and end of text) never come
// out of a text. Source: Kudo and Richardson, "SentencePiece", EMNLP 2018 (BPE); run.c and tokenizer.py of
// llama2.c for the file and for what is decoded.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace sps {

struct ScoredPiece {
  enum class Kind : uint8_t {
    text,     // UTF-8, spaces are spaces
    byte,     // written "<0xNN>": that one byte
    control,  // decodes to nothing; its text is a name
  };
  std::string text;
  float score = 0;
  Kind kind = Kind::text;
  bool operator==(const ScoredPiece&) const = default;
};

struct ScoreBpeModel {
  std::vector<ScoredPiece> pieces;  // the index is the id; of equal texts the first one is used
  int32_t bos = -1;                 // begin of text, a control id; -1: none
  int32_t eot = -1;                 // end of text, a control id; may be bos
  bool operator==(const ScoreBpeModel&) const = default;
};

// "<0x0A>" -> 10; -1 for any other text.
int byte_of_piece(std::string_view text);

class ScoreBpeTokenizer final : public Tokenizer {
 public:
  // Error if the model contradicts itself: a byte without an id, text that is not UTF-8, a score that is not
  // finite, an end of text that is no control id.
  explicit ScoreBpeTokenizer(ScoreBpeModel model);

  std::string name() const override;  // "score-bpe-" and the size of the vocabulary
  int32_t vocab_size() const override { return int32_t(model_.pieces.size()); }
  int32_t eot() const override { return model_.eot; }
  int32_t bos() const override { return model_.bos; }
  void encode(std::string_view text, std::vector<int32_t>& ids) const override;
  // No text spells a control id.
  void encode(std::string_view text, std::vector<int32_t>& ids, SpecialText /*special*/) const override {
    encode(text, ids);
  }
  void encode_in_parts(std::string_view text,
                       const std::function<void(std::span<const int32_t>)>& take) const override;
  std::string_view token_bytes(int32_t id) const override;
  // Without the leading space where nothing or a control id stands before.
  std::string_view text_of(int32_t id, int32_t previous) const override;
  std::string fingerprint() const override { return fingerprint_; }
  std::string to_json() const override;  // load_score_bpe.h reads it
  const ScoreBpeModel& model() const { return model_; }

 private:
  bool control(int32_t id) const { return model_.pieces[size_t(id)].kind == ScoredPiece::Kind::control; }
  // Calls take(segment) for parts of the text that no piece crosses, in order; the first has the space.
  template <class Take>
  void each_segment(std::string_view text, Take&& take) const;
  void encode_segment(std::string_view text, std::vector<int32_t>& ids) const;  // appends
  std::string make_fingerprint() const;

  ScoreBpeModel model_;
  std::array<int32_t, 256> byte_ids_{};
  std::unordered_map<std::string_view, int32_t> ids_;  // of text pieces
  size_t longest_ = 0;                                 // bytes of a text piece
  std::array<std::bitset<256>, 256> neighbours_;       // [a][b]: some piece holds the bytes a, b
  std::string fingerprint_;
};

}  // namespace sps
