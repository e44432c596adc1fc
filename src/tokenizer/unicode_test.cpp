#include "tokenizer/unicode.h"

#include <gtest/gtest.h>

#include "tokenizer/test_models.h"

namespace sps {
namespace {

TEST(ReadUtf8, TakesEveryCodePointButSurrogates) {
  for (uint32_t c = 0; c < 0x110000; ++c) {
    std::string text;
    append_utf8(text, c);
    const Utf8Char read = read_utf8(text.data(), text.data() + text.size());
    if (c >= 0xD800 && c < 0xE000) {
      ASSERT_EQ(read.state, Utf8::invalid) << c;
      ASSERT_EQ(read.length, 1) << c;
    } else {
      ASSERT_EQ(read.state, Utf8::valid) << c;
      ASSERT_EQ(read.length, int(text.size())) << c;
      ASSERT_EQ(read.code_point, c);
    }
  }
}

TEST(ReadUtf8, InvalidAndIncomplete) {
  struct Case {
    std::string_view bytes;
    Utf8 state;
    int length;
  };
  for (const auto& [bytes, state, length] :
       {Case{"\x80", Utf8::invalid, 1}, Case{"\xC0\x80", Utf8::invalid, 1},
        Case{"\xC1\xBF", Utf8::invalid, 1}, Case{"\xE0\x80\x80", Utf8::invalid, 1},
        Case{"\xF0\x80\x80\x80", Utf8::invalid, 1}, Case{"\xF4\x90\x80\x80", Utf8::invalid, 1},
        Case{"\xF5\x80", Utf8::invalid, 1},
        Case{"\xE4\xB8"
             "a",
             Utf8::invalid, 2},
        Case{"\xF0\x9F\x91"
             "a",
             Utf8::invalid, 3},
        Case{"\xC3", Utf8::incomplete, 1}, Case{"\xE4\xB8", Utf8::incomplete, 2},
        Case{"\xF0\x9F\x91", Utf8::incomplete, 3}}) {
    const Utf8Char read = read_utf8(bytes.data(), bytes.data() + bytes.size());
    EXPECT_EQ(read.state, state) << testing::PrintToString(bytes);
    EXPECT_EQ(read.length, length) << testing::PrintToString(bytes);
  }
}

TEST(CharTable, ClassesOfKnownCharacters) {
  constexpr uint8_t L = CharClass::letter, N = CharClass::number, S = CharClass::space, U = CharClass::upper,
                    W = CharClass::lower, R = CharClass::newline;
  struct Case {
    uint32_t code_point;
    int classes;
  };
  for (const auto& [c, classes] :
       {Case{'A', L | U},    Case{'z', L | W},        Case{'5', N},         Case{' ', S},
        Case{'\n', S | R},   Case{'\r', S | R},       Case{'\v', S},        Case{0x1C, 0},
        Case{'_', 0},        Case{0x85, S},           Case{0xA0, S},        Case{0xAA, L | U | W},
        Case{0xB2, N},       Case{0xDF, L | W},       Case{0x1C5, L | U},   Case{0x301, U | W},
        Case{0x180E, 0},     Case{0x200B, 0},         Case{0x2029, S},      Case{0x2160, N},
        Case{0x3007, N},     Case{0x4E2D, L | U | W}, Case{0xFEFF, 0},      Case{0x1C89, L | U},
        Case{0x1C8A, L | W}, Case{0x116D0, N},        Case{0x1611E, U | W},  // new in Unicode 16
        Case{0x378, 0},      Case{0x1F469, 0},        Case{0x10FFFF, 0}})
    EXPECT_EQ(int(CharTable::get().of(c)), classes) << std::hex << c;
}

std::string nfc(std::string_view text) {
  std::string buffer;
  return std::string(to_nfc(text, buffer));
}

TEST(Nfc, ComposesAndOrders) {
  EXPECT_EQ(nfc("plain \u00E9"), "plain \u00E9");
  EXPECT_EQ(nfc("e\u0301"), "\u00E9");
  EXPECT_EQ(nfc("xe\u0301y e\u0302\u0301"), "x\u00E9y \u1EBF");
  EXPECT_EQ(nfc("\u1112\u1161\u11AB"), "\uD55C");
  EXPECT_EQ(nfc("a\u0301\u0323"), "\u1EA1\u0301");
  EXPECT_EQ(nfc("\u212B\u2126"), "\u00C5\u03A9");
  EXPECT_EQ(nfc("=\u0338"), "\u2260");  // ASCII composes with what follows it
}

TEST(Nfc, OtherBytesStay) {
  EXPECT_EQ(nfc("e\xFF\u0301"), "e\xFF\u0301");
  EXPECT_EQ(nfc("\xE4\xB8"), "\xE4\xB8");
  EXPECT_EQ(nfc("\xF0\x9F\x91 e\u0301\xED\xA0\x80"), "\xF0\x9F\x91 \u00E9\xED\xA0\x80");
  for (uint64_t i = 0; i < 3000; ++i) {
    const std::string once = nfc(strange_text(i, true));
    EXPECT_EQ(nfc(once), once) << i;
  }
}

}  // namespace
}  // namespace sps
