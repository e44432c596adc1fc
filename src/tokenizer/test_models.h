// For tests: small models, GPT-2's files if the shared data is there, and strange texts.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/rng.h"
#include "tokenizer/bpe_model.h"
#include "tokenizer/splitter.h"
#include "tokenizer/tokenizer.h"

namespace sps {

// The 256 bytes are ids 0..255; then a token for each merge, written "left|right"; then <|endoftext|>.
inline BpeModel small_model(const std::vector<std::pair<std::string, std::string>>& merges) {
  BpeModel model;
  for (int b = 0; b < 256; ++b) model.tokens.push_back(std::string(1, char(b)));
  const auto find = [&](const std::string& token) {
    return int32_t(std::find(model.tokens.begin(), model.tokens.end(), token) - model.tokens.begin());
  };
  for (const auto& [left, right] : merges) {
    model.merges.push_back({find(left), find(right), int32_t(model.tokens.size())});
    model.tokens.push_back(left + right);
  }
  model.splits.push_back({SplitStep::Kind::pattern, std::string(patterns::gpt2)});
  model.eot = int32_t(model.tokens.size());
  model.added.push_back({"<|endoftext|>", model.eot, true});
  model.tokens.emplace_back();
  return model;
}

// Twelve random merges of a, b and c; with an odd seed in any order.
inline BpeModel random_model(uint64_t seed) {
  const Rng rng(seed, "model");
  std::vector<std::string> parts{"a", "b", "c"};
  std::vector<std::pair<std::string, std::string>> merges;
  for (uint64_t i = 0; merges.size() < 12; i += 2) {
    const std::string left = parts[rng.below(i, parts.size())], right = parts[rng.below(i + 1, parts.size())];
    if (std::find(parts.begin(), parts.end(), left + right) != parts.end()) continue;
    merges.emplace_back(left, right);
    parts.push_back(left + right);
  }
  // Any order: a merge may come before the ones that make its parts.
  BpeModel model = small_model(merges);
  for (size_t i = model.merges.size() - 1; i > 0 && seed % 2 == 1; --i)
    std::swap(model.merges[i], model.merges[rng.below(1000 + i, i + 1)]);
  model.splits.clear();
  return model;
}

inline std::vector<int32_t> encoded(const Tokenizer& tokenizer, std::string_view text,
                                    SpecialText special = SpecialText::plain) {
  std::vector<int32_t> ids;
  tokenizer.encode(text, ids, special);
  return ids;
}

inline std::filesystem::path shared_tokenizer() {
  return std::filesystem::path(SPS_SOURCE_DIR) / "../shared/data/tokenizer";
}

#define SPS_NEEDS_SHARED_TOKENIZER()                    \
  if (!std::filesystem::exists(shared_tokenizer()))     \
  GTEST_SKIP() << "the shared tokenizer files are not " \
                  "there"

inline void append_utf8(std::string& text, uint32_t c) {
  if (c < 0x80) {
    text += char(c);
  } else if (c < 0x800) {
    text += char(0xC0 | c >> 6);
    text += char(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    text += char(0xE0 | c >> 12);
    text += char(0x80 | (c >> 6 & 0x3F));
    text += char(0x80 | (c & 0x3F));
  } else {
    text += char(0xF0 | c >> 18);
    text += char(0x80 | (c >> 12 & 0x3F));
    text += char(0x80 | (c >> 6 & 0x3F));
    text += char(0x80 | (c & 0x3F));
  }
}

// Text `i`: characters that pre-tokenizers treat in different ways, mixed; a few bytes are not UTF-8 if asked
// for.
inline std::string strange_text(uint64_t i, bool invalid_bytes) {
  static constexpr std::string_view kAscii =
      "    \n\n\r\t\v\f'''stmdlrveSTMDLRVEabcXYZ0123456789.,/!_-\x1C\x7F";
  static constexpr uint32_t kOthers[] = {
      0x85,   0xA0,   0xAD,   0xB2,   0xBD,   0xDF,   0xE9,    0xC9,    0x17F,   0x1C5,   0x2B0,   0x300,
      0x301,  0x345,  0x378,  0x3A3,  0x5D0,  0x660,  0x966,   0x1680,  0x180E,  0x2000,  0x200A,  0x200B,
      0x200D, 0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x212A,  0x2160,  0x20AC,  0x3000,  0x3007,  0x4E2D,
      0xAC00, 0xD7A3, 0xE000, 0xFEFF, 0xFFFD, 0xFFFF, 0x1D7CE, 0x1F469, 0x1F3FD, 0x20000, 0xE0100, 0x10FFFF};
  const Rng rng(7, "strange text " + std::to_string(i));
  std::string text;
  const uint64_t length = 1 + rng.below(0, 40);
  for (uint64_t at = 1; at <= length; ++at) {
    const uint64_t kind = rng.below(2 * at, 100), pick = rng.bits(2 * at + 1);
    if (kind < 60) {
      text += kAscii[pick % kAscii.size()];
    } else if (kind < 85) {
      append_utf8(text, kOthers[pick % std::size(kOthers)]);
    } else if (kind < 95 || !invalid_bytes) {
      const auto c = uint32_t(pick % 0x110000);
      append_utf8(text, c >= 0xD800 && c < 0xE000 ? c - 0xD800 : c);
    } else {
      text += char(0x80 | (pick & 0x7F));
    }
  }
  return text;
}

}  // namespace sps
