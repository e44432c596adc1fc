// GPT-2's printable alphabet: vocabulary files write every byte as one visible character, so that they are
// valid JSON and lines never break. Bytes that are visible in Latin-1 stand for themselves (33..126,
// 161..172, 174..255); the other 68 are U+0100, U+0101, ... in the order of their values, so a space is
// U+0120.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sps {

namespace byte_alphabet_detail {

inline constexpr int kFirst = 0x21, kLast = 0x143;  // code points of the alphabet

struct Tables {
  std::array<uint16_t, 256> code_point{};
  std::array<int16_t, kLast + 1> byte{};  // -1: not in the alphabet
};

constexpr Tables make_tables() {
  Tables tables;
  for (auto& byte : tables.byte) byte = -1;
  int next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool visible = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    const int code_point = visible ? b : next++;
    tables.code_point[b] = uint16_t(code_point);
    tables.byte[code_point] = int16_t(b);
  }
  return tables;
}

inline constexpr Tables kTables = make_tables();

}  // namespace byte_alphabet_detail

// UTF-8 with one character for each byte.
inline std::string to_alphabet(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() + bytes.size() / 4);
  for (const char c : bytes) {
    const unsigned code_point = byte_alphabet_detail::kTables.code_point[static_cast<unsigned char>(c)];
    if (code_point < 0x80) {
      text += char(code_point);
    } else {
      text += char(0xC0 | (code_point >> 6));
      text += char(0x80 | (code_point & 0x3F));
    }
  }
  return text;
}

// The bytes again; nothing if a character is not of the alphabet or the text is not UTF-8.
inline std::optional<std::string> from_alphabet(std::string_view text) {
  using namespace byte_alphabet_detail;
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned code_point = static_cast<unsigned char>(text[i]);
    if (code_point >= 0x80) {
      if (code_point < 0xC2 || code_point > 0xDF || i + 1 == text.size()) return std::nullopt;
      const unsigned next = static_cast<unsigned char>(text[++i]);
      if ((next & 0xC0) != 0x80) return std::nullopt;
      code_point = (code_point & 0x1F) << 6 | (next & 0x3F);
    }
    if (code_point < unsigned(kFirst) || code_point > unsigned(kLast)) return std::nullopt;
    if (kTables.byte[code_point] < 0) return std::nullopt;
    bytes += char(kTables.byte[code_point]);
  }
  return bytes;
}

}  // namespace sps
