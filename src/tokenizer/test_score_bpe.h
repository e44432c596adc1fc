// For tests and seeds: a small BPE with scores, and llama2.c's file of one.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "tokenizer/score_bpe.h"

namespace sps {

// The 259 ids that every file of llama2.c begins with, then `pieces` with their scores.
inline ScoreBpeModel score_bpe_model(const std::vector<std::pair<std::string, float>>& pieces) {
  ScoreBpeModel model{.pieces = {}, .bos = 1, .eot = 1};
  for (const char* name : {"<unk>", "\n<s>\n", "\n</s>\n"})
    model.pieces.push_back({name, 0, ScoredPiece::Kind::control});
  for (int byte = 0; byte < 256; ++byte)
    model.pieces.push_back({fmt::format("<0x{:02X}>", byte), 0, ScoredPiece::Kind::byte});
  for (const auto& [text, score] : pieces) model.pieces.push_back({text, score});
  return model;
}

inline ScoreBpeModel small_score_bpe() {
  return score_bpe_model({{" t", -1},    {"he", -2},  {" the", -3}, {"in", -4},   {" th", -5}, {"ing", -6},
                          {"aa", -7},    {"aaa", -7}, {" ", -8},    {"e", -9},    {"t", -10},  {"h", -11},
                          {"i", -12},    {"n", -13},  {"g", -14},   {"a", -15},   {"é", -16},  {"\n", -17},
                          {"日本", -18}, {"日", -19}, {"n\n", -20}, {"\n\n", -21}});
}

inline std::string llama2c_tokenizer_file(const ScoreBpeModel& model) {
  uint32_t longest = 0;
  for (const ScoredPiece& piece : model.pieces) longest = std::max(longest, uint32_t(piece.text.size()));
  std::string bytes(reinterpret_cast<const char*>(&longest), sizeof longest);
  for (const ScoredPiece& piece : model.pieces) {
    const auto length = int32_t(piece.text.size());
    bytes.append(reinterpret_cast<const char*>(&piece.score), sizeof piece.score);
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    bytes += piece.text;
  }
  return bytes;
}

// sentencepiece's model file of one. `normalizer`: its flags for a character map, the space in front, and the
// removal of spaces.
inline std::string sentencepiece_file(const ScoreBpeModel& model, int model_type = 2,
                                      const std::array<bool, 3>& normalizer = {false, true, false}) {
  const auto number = [](int field, uint64_t value) {
    std::string bytes;
    for (uint64_t v : {uint64_t(field) << 3, value}) {
      for (; v >= 0x80; v >>= 7) bytes += char(v | 0x80);
      bytes += char(v);
    }
    return bytes;
  };
  const auto text = [&](int field, std::string_view content) {
    std::string bytes = number(field, content.size());
    bytes[0] = char(bytes[0] | 2);
    return bytes + std::string(content);
  };
  std::string file;
  for (const ScoredPiece& piece : model.pieces) {
    std::string written;
    for (const char c : piece.text) written += c == ' ' ? "\u2581" : std::string(1, c);
    std::string score(1, char(2 << 3 | 5));
    score.append(reinterpret_cast<const char*>(&piece.score), sizeof piece.score);
    const bool plain = piece.kind == ScoredPiece::Kind::text;
    file += text(1, text(1, written) + score +
                        (plain ? "" : number(3, piece.kind == ScoredPiece::Kind::byte ? 6 : 3)));
  }
  file += text(2, number(3, uint64_t(model_type)) + number(41, uint64_t(int64_t{model.bos})) +
                      number(42, uint64_t(int64_t{model.eot})));
  return file +
         text(3, (normalizer[0] ? text(2, "map") : "") + number(3, normalizer[1]) + number(4, normalizer[2]));
}

}  // namespace sps
