#include "tokenizer/byte_alphabet.h"

#include <gtest/gtest.h>

#include <set>

namespace sps {
namespace {

TEST(ByteAlphabet, EveryByteHasACharacterOfItsOwnAndComesBack) {
  std::set<std::string> seen;
  std::string all;
  for (int b = 0; b < 256; ++b) {
    const std::string byte(1, char(b));
    EXPECT_TRUE(seen.insert(to_alphabet(byte)).second) << b;
    EXPECT_EQ(from_alphabet(to_alphabet(byte)), byte) << b;
    all += byte;
  }
  EXPECT_EQ(from_alphabet(to_alphabet(all)), all);
}

TEST(ByteAlphabet, KnownCharacters) {
  EXPECT_EQ(to_alphabet("a b\n"), "a\u0120b\u010A");
  EXPECT_EQ(to_alphabet(std::string_view("\0\x7F\x80\xA0\xAD\xFF", 6)),
            "\u0100\u0121\u0122\u0142\u0143\u00FF");
}

TEST(ByteAlphabet, OtherTextIsNotOfIt) {
  for (const std::string text :
       {" ", "\n", "\u00A0", "\u00AD", "\u0144", "\u20AC", "\x80", "\xC4", "\xC4 ", "\xC1\xA1", "\xFF"})
    EXPECT_EQ(from_alphabet("a" + text), std::nullopt) << text;
  EXPECT_EQ(from_alphabet(""), "");
}

}  // namespace
}  // namespace sps
