#include "tokenizer/load_sentencepiece.h"

#include <cstring>

#include "base/error.h"
#include "tokenizer/load_score_bpe.h"

namespace sps {

namespace {

using Kind = ScoredPiece::Kind;

constexpr std::string_view kSpace = "\u2581";

// The fields of one message, one after the other.
class Fields {
 public:
  Fields(std::string_view bytes, std::string_view what) : rest_(bytes), what_(what) {}

  // The next field; false at the end.
  bool next() {
    if (rest_.empty()) return false;
    const uint64_t tag = varint();
    field_ = tag >> 3;
    switch (tag & 7) {
      case 0:
        number_ = varint();
        return wire_ = Wire::number, true;
      case 1:
        text_ = take(8);
        return wire_ = Wire::other, true;
      case 2:
        text_ = take(varint());
        return wire_ = Wire::text, true;
      case 5:
        text_ = take(4);
        return wire_ = Wire::real, true;
      default:
        bad();
    }
  }
  uint64_t field() const { return field_; }
  // What the field holds; an error if that is of another type.
  uint64_t number() const { return wire_ == Wire::number ? number_ : (bad(), 0); }
  std::string_view text() const { return wire_ == Wire::text ? text_ : (bad(), text_); }
  float real() const {
    float value = 0;
    if (wire_ != Wire::real) bad();
    std::memcpy(&value, text_.data(), sizeof value);
    return value;
  }

 private:
  enum class Wire : uint8_t { number, text, real, other };
  [[noreturn]] void bad() const { fail("{} is damaged, or no model of sentencepiece", what_); }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      value |= uint64_t(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    bad();
  }
  std::string_view take(uint64_t count) {
    if (count > rest_.size()) bad();
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  std::string_view rest_, what_, text_;
  uint64_t field_ = 0, number_ = 0;
  Wire wire_ = Wire::other;
};

ScoredPiece read_piece(std::string_view bytes, size_t id, std::string_view what) {
  enum Type : uint64_t { normal = 1, unknown, control, user_defined, unused, byte };
  ScoredPiece piece;
  uint64_t type = normal;
  for (Fields f(bytes, what); f.next();) {
    if (f.field() == 1) piece.text = f.text();
    if (f.field() == 2) piece.score = f.real();
    if (f.field() == 3) type = f.number();
  }
  if (type == user_defined) fail("{}: piece {} is user-defined, which is not supported", what, id);
  piece.kind = type == normal ? Kind::text : type == byte ? Kind::byte : Kind::control;
  if (type == normal)
    for (size_t at = 0; (at = piece.text.find(kSpace, at)) != std::string::npos; ++at)
      piece.text.replace(at, kSpace.size(), " ");
  return piece;
}

void read_trainer(std::string_view bytes, ScoreBpeModel& model, bool& bpe, std::string_view what) {
  constexpr uint64_t kBpe = 2;
  for (Fields f(bytes, what); f.next();) {
    if (f.field() == 3) bpe = f.number() == kBpe;
    if (f.field() == 41) model.bos = int32_t(f.number());
    if (f.field() == 42) model.eot = int32_t(f.number());
  }
}

void check_normalizer(std::string_view bytes, std::string_view what) {
  bool prefix = true, removes_spaces = true, maps = false;
  for (Fields f(bytes, what); f.next();) {
    if (f.field() == 2) maps = !f.text().empty();
    if (f.field() == 3) prefix = f.number() != 0;
    if (f.field() == 4) removes_spaces = f.number() != 0;
  }
  if (maps) fail("{} normalises the characters of texts, which is not supported", what);
  if (removes_spaces) fail("{} removes spaces from texts, which is not supported", what);
  if (!prefix) fail("{} puts no space before a text, which is not supported", what);
}

}  // namespace

bool is_sentencepiece(std::string_view bytes) {
  return bytes.starts_with('\n');
}

ScoreBpeModel parse_sentencepiece(std::string_view bytes, std::string_view what,
                                  const TokenizerOptions& options) {
  ScoreBpeModel model{.pieces = {}, .bos = 1, .eot = 2};
  std::string_view normalizer;
  bool bpe = false;  // the format's default is a unigram model
  for (Fields f(bytes, what); f.next();) {
    if (f.field() == 1) model.pieces.push_back(read_piece(f.text(), model.pieces.size(), what));
    if (f.field() == 2) read_trainer(f.text(), model, bpe, what);
    if (f.field() == 3) normalizer = f.text();
  }
  if (!bpe) fail("{} is no BPE; of sentencepiece's models only that kind is supported", what);
  check_normalizer(normalizer, what);
  choose_eot(model, options, what);
  return model;
}

}  // namespace sps
