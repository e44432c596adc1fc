#include "tokenizer/score_bpe.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <queue>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "tokenizer/load_score_bpe.h"
#include "tokenizer/utf8.h"

namespace sps {

namespace {

using Kind = ScoredPiece::Kind;

std::string_view all_bytes() {
  static const std::string all = [] {
    std::string bytes;
    for (int b = 0; b < 256; ++b) bytes += char(b);
    return bytes;
  }();
  return all;
}

uint8_t byte_at(std::string_view text, size_t i) {
  return static_cast<uint8_t>(text[i]);
}

}  // namespace

int byte_of_piece(std::string_view text) {
  unsigned value = 0;
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return -1;
  const auto [end, error] = std::from_chars(text.data() + 3, text.data() + 5, value, 16);
  return error == std::errc() && end == text.data() + 5 ? int(value) : -1;
}

ScoreBpeTokenizer::ScoreBpeTokenizer(ScoreBpeModel model) : model_(std::move(model)) {
  const auto& pieces = model_.pieces;
  if (pieces.size() > size_t(INT32_MAX)) fail("{} pieces are more than ids", pieces.size());
  byte_ids_.fill(-1);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const ScoredPiece& piece = pieces[i];
    if (!std::isfinite(piece.score)) fail("the score of piece {} is not finite", i);
    if (!is_utf8(piece.text)) fail("piece {} is not UTF-8", i);
    if (piece.kind == Kind::byte) {
      const int byte = byte_of_piece(piece.text);
      if (byte < 0) fail("piece {} is '{}', expected a byte such as <0x0A>", i, piece.text);
      if (byte_ids_[size_t(byte)] < 0) byte_ids_[size_t(byte)] = int32_t(i);
    } else if (piece.kind == Kind::text && !piece.text.empty()) {
      ids_.emplace(piece.text, int32_t(i));
      longest_ = std::max(longest_, piece.text.size());
      for (size_t k = 1; k < piece.text.size(); ++k)
        neighbours_[byte_at(piece.text, k - 1)].set(byte_at(piece.text, k));
    }
  }
  for (size_t byte = 0; byte < 256; ++byte)
    if (byte_ids_[byte] < 0) fail("no piece stands for the byte <0x{:02X}>", byte);
  const auto check_control = [&](int32_t id, std::string_view what) {
    if (id < 0 || id >= vocab_size() || !control(id))
      fail("the {} is id {}, which is no control id of the {} pieces", what, id, pieces.size());
  };
  check_control(model_.eot, "end of text");
  if (model_.bos != -1) check_control(model_.bos, "begin of text");
  fingerprint_ = make_fingerprint();
}

std::string ScoreBpeTokenizer::name() const {
  return fmt::format("score-bpe-{}", vocab_size());
}

// Two bytes that no piece has side by side are never in one id, so the sides do not depend on each other.
template <class Take>
void ScoreBpeTokenizer::each_segment(std::string_view text, Take&& take) const {
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin + 1;
    while (end < text.size() && neighbours_[byte_at(text, end - 1)].test(byte_at(text, end))) ++end;
    const std::string_view segment = text.substr(begin, end - begin);
    if (begin == 0)
      take(" " + std::string(segment));
    else
      take(segment);
    begin = end;
  }
}

void ScoreBpeTokenizer::encode_segment(std::string_view text, std::vector<int32_t>& ids) const {
  struct Symbol {
    size_t begin, length;  // 0: joined to the one before
    int64_t before, after;
    int32_t id;
    bool joins;
  };
  std::vector<Symbol> symbols;
  const auto add = [&](size_t begin, size_t length, int32_t id, bool joins) {
    const auto n = int64_t(symbols.size());
    symbols.push_back({begin, length, n - 1, n + 1, id, joins});
  };
  for (size_t at = 0; at < text.size();) {
    const Utf8Char c = read_utf8(text.data() + at, text.data() + text.size());
    const auto length = size_t(c.length);
    const auto found = c.state == Utf8::valid ? ids_.find(text.substr(at, length)) : ids_.end();
    if (found != ids_.end())
      add(at, length, found->second, true);
    else
      for (size_t i = at; i < at + length; ++i) add(i, 1, byte_ids_[byte_at(text, i)], false);
    at += length;
  }
  symbols.back().after = -1;

  struct Candidate {
    float score;
    int64_t left;
    size_t length;
    int32_t id;
    bool operator<(const Candidate& o) const { return score != o.score ? score < o.score : left > o.left; }
  };
  std::priority_queue<Candidate> candidates;
  const auto offer = [&](int64_t left) {
    if (left < 0 || symbols[size_t(left)].after < 0) return;
    const Symbol &a = symbols[size_t(left)], &b = symbols[size_t(a.after)];
    const size_t length = a.length + b.length;
    if (!a.joins || !b.joins || length > longest_) return;
    const auto found = ids_.find(text.substr(a.begin, length));
    if (found == ids_.end()) return;
    candidates.push({model_.pieces[size_t(found->second)].score, left, length, found->second});
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) offer(int64_t(i));
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Symbol& a = symbols[size_t(best.left)];
    // Made before one of the two was joined to another.
    if (a.length == 0 || a.after < 0 || a.length + symbols[size_t(a.after)].length != best.length) continue;
    Symbol& b = symbols[size_t(a.after)];
    a.length = std::exchange(b.length, 0) + a.length;
    a.id = best.id;
    a.after = b.after;
    if (a.after >= 0) symbols[size_t(a.after)].before = best.left;
    offer(a.before);
    offer(best.left);
  }
  for (int64_t i = 0; i >= 0; i = symbols[size_t(i)].after) ids.push_back(symbols[size_t(i)].id);
}

void ScoreBpeTokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  each_segment(text, [&](std::string_view segment) { encode_segment(segment, ids); });
}

void ScoreBpeTokenizer::encode_in_parts(std::string_view text,
                                        const std::function<void(std::span<const int32_t>)>& take) const {
  constexpr size_t kPart = 8192;
  std::vector<int32_t> ids;
  each_segment(text, [&](std::string_view segment) {
    encode_segment(segment, ids);
    if (ids.size() < kPart) return;
    take(ids);
    ids.clear();
  });
  if (!ids.empty()) take(ids);
}

std::string_view ScoreBpeTokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= vocab_size() || control(id)) return {};
  const ScoredPiece& piece = model_.pieces[size_t(id)];
  if (piece.kind == Kind::byte) return all_bytes().substr(size_t(byte_of_piece(piece.text)), 1);
  return piece.text;
}

std::string_view ScoreBpeTokenizer::text_of(int32_t id, int32_t previous) const {
  std::string_view bytes = token_bytes(id);
  const bool first = previous < 0 || previous >= vocab_size() || control(previous);
  if (first && bytes.starts_with(' ')) bytes.remove_prefix(1);
  return bytes;
}

std::string ScoreBpeTokenizer::make_fingerprint() const {
  Hasher hasher;
  const auto number = [&](int64_t n) { hasher.update(&n, sizeof n); };
  const auto text = [&](std::string_view t) {
    number(int64_t(t.size()));
    hasher.update(t.data(), t.size());
  };
  text("score BPE 1");
  number(vocab_size());
  for (const ScoredPiece& piece : model_.pieces) {
    number(int64_t(piece.kind));
    if (piece.kind == Kind::control) continue;  // its text is a name
    text(piece.text);
    const double score = piece.score + 0.0;  // -0 is 0
    if (piece.kind == Kind::text) hasher.update(&score, sizeof score);
  }
  number(model_.bos);
  number(model_.eot);
  return hex(hasher.digest());
}

std::string ScoreBpeTokenizer::to_json() const {
  return to_score_bpe_json(model_);
}

}  // namespace sps
