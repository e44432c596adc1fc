// UTF-8, one character at a time. Valid means the shortest form, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstdint>

namespace sps {

enum class Utf8 : uint8_t { valid, invalid, incomplete };

struct Utf8Char {
  Utf8 state = Utf8::invalid;
  // Bytes of the character. Invalid: of the longest piece that begins a character, at least 1, which is what
  // one U+FFFD stands for. Incomplete: all bytes there are; more of them may complete it.
  int length = 1;
  uint32_t code_point = 0;  // if valid
};

// The character at `p`; p < end.
inline Utf8Char read_utf8(const char* p, const char* end) {
  const auto byte = [&](int i) { return uint32_t(static_cast<unsigned char>(p[i])); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {Utf8::valid, 1, first};
  if (first < 0xC2 || first > 0xF4) return {Utf8::invalid, 1, 0};
  const int length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  // The second byte alone decides between short forms, surrogates, too large values and characters.
  const uint32_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const uint32_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  uint32_t code_point = first & (0x7F >> length);
  for (int i = 1; i < length; ++i) {
    if (p + i == end) return {Utf8::incomplete, i, 0};
    if (byte(i) < (i == 1 ? low : 0x80) || byte(i) > (i == 1 ? high : 0xBF)) return {Utf8::invalid, i, 0};
    code_point = code_point << 6 | (byte(i) & 0x3F);
  }
  return {Utf8::valid, length, code_point};
}

}  // namespace sps
