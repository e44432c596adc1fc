// The classes of characters that pre-tokenizers ask for, and NFC.
//
// Classes are those of Unicode 16, white space is the property White_Space (U+0085 is, U+FEFF is not). A byte
// that is not part of valid UTF-8 counts as a character of no class.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/utf8.h"

namespace sps {

struct CharClass {
  enum : uint8_t {
    letter = 1,   // \p{L}
    number = 2,   // \p{N}
    space = 4,    // \s
    upper = 8,    // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]
    lower = 16,   // [\p{Ll}\p{Lm}\p{Lo}\p{M}]
    newline = 32  // [\r\n]
  };
};

class CharTable {
 public:
  static const CharTable& get();  // built at the first call

  uint8_t of(uint32_t code_point) const { return blocks_[block_of_[code_point >> 8]][code_point & 0xFF]; }
  // Classes and length of the character at `p`; p < end.
  uint8_t at(const char* p, const char* end, int& length) const {
    const auto byte = static_cast<unsigned char>(*p);
    length = 1;
    if (byte < 0x80) return blocks_[0][byte];
    const Utf8Char c = read_utf8(p, end);
    if (c.state != Utf8::valid) return 0;
    length = c.length;
    return of(c.code_point);
  }

 private:
  CharTable();
  using Block = std::array<uint8_t, 256>;
  std::array<uint8_t, 0x1100> block_of_;
  std::vector<Block> blocks_;  // different ones; the first is U+0000..U+00FF
};

// `text` in normalisation form C (Unicode as utf8proc has it); bytes that are not UTF-8 stay as they are.
// Returns `text` itself if nothing had to be looked at, else a view of `buffer`.
std::string_view to_nfc(std::string_view text, std::string& buffer);

}  // namespace sps
