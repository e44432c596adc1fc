#include "tokenizer/stream_decoder.h"

#include <gtest/gtest.h>

#include "tokenizer/test_models.h"
#include "tokenizer/utf8.h"

namespace sps {
namespace {

// peer-faults 98: a character spread over tokens.
TEST(StreamDecoder, HoldsBackUntilACharacterIsWhole) {
  const ByteTokenizer tokenizer;
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.feed('a'), "a");
  EXPECT_EQ(decoder.feed(0xF0), "");
  EXPECT_EQ(decoder.feed(0x9F), "");
  EXPECT_EQ(decoder.feed(0x98), "");
  EXPECT_EQ(decoder.feed(256), "");  // special: no bytes, and does not break the character
  EXPECT_EQ(decoder.feed(0x80), "\U0001F600");
  EXPECT_EQ(decoder.flush(), "");
}

TEST(StreamDecoder, WhatCannotBecomeUtf8IsReplacedAtOnce) {
  const ByteTokenizer tokenizer;
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.feed(0x80), "\uFFFD");
  EXPECT_EQ(decoder.feed(0xE4), "");
  EXPECT_EQ(decoder.feed(0xB8), "");
  EXPECT_EQ(decoder.feed('a'), "\uFFFDa");
  EXPECT_EQ(decoder.feed(0xE0), "");
  EXPECT_EQ(decoder.feed(0x80), "\uFFFD\uFFFD");
  EXPECT_EQ(decoder.feed(0xC3), "");
  EXPECT_EQ(decoder.flush(), "\uFFFD");
  EXPECT_EQ(decoder.flush(), "");
}

TEST(StreamDecoder, GivesTheWholeTextWhateverThePieces) {
  const ByteTokenizer tokenizer;
  for (uint64_t i = 0; i < 2000; ++i) {
    const std::string text = strange_text(i, true);
    StreamDecoder at_once(tokenizer), in_bytes(tokenizer);
    std::string whole = at_once.feed(text);
    whole += at_once.flush();
    std::string pieces;
    for (const char c : text) {
      const std::string piece = in_bytes.feed(static_cast<unsigned char>(c));
      const char* const end = piece.data() + piece.size();
      for (const char* p = piece.data(); p != end;) {
        const Utf8Char read = read_utf8(p, end);
        ASSERT_EQ(read.state, Utf8::valid);
        p += read.length;
      }
      pieces += piece;
    }
    pieces += in_bytes.flush();
    ASSERT_EQ(pieces, whole) << i;
    const std::string valid = strange_text(i, false);
    ASSERT_EQ(at_once.feed(valid), valid) << i;
  }
}

}  // namespace
}  // namespace sps
