#include "tokenizer/tokenizer.h"

#include "base/test_dir.h"

namespace sps {
namespace {

TEST(ByteTokenizer, EveryByteIsItsOwnIdAndComesBack) {
  const auto tokenizer = make_tokenizer("bytes");
  EXPECT_EQ(tokenizer->name(), "bytes");
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->eot(), 256);
  std::string text;
  for (int round = 0; round < 2; ++round)
    for (int b = 0; b < 256; ++b) text += char(b);
  std::vector<int32_t> ids{7};
  tokenizer->encode(text, ids);  // appends
  ASSERT_EQ(ids.size(), 513u);
  EXPECT_EQ(ids[0], 7);
  for (size_t i = 0; i < text.size(); ++i) EXPECT_EQ(ids[i + 1], int32_t(i % 256));
  EXPECT_EQ(tokenizer->decode(std::span(ids).subspan(1)), text);
}

TEST(ByteTokenizer, SpecialAndForeignIdsDecodeToNothing) {
  EXPECT_EQ(ByteTokenizer().decode(std::vector<int32_t>{'a', 256, 300, -1, INT32_MAX, 'b'}), "ab");
}

// peer-faults 25, 26: what looks like a special token or an escape in a document is text.
TEST(ByteTokenizer, TextThatNamesASpecialTokenIsText) {
  for (const std::string text : {"<|endoftext|>", "a\\nb", "\n\n\n"}) {
    std::vector<int32_t> ids;
    ByteTokenizer().encode(text, ids);
    EXPECT_EQ(ids.size(), text.size());
    EXPECT_EQ(ByteTokenizer().decode(ids), text);
  }
}

TEST(MakeTokenizer, UnknownNameIsAUsageError) {
  EXPECT_PRED2(mentions, error_of([] { make_tokenizer("byte"); }), "'byte'");
}

}  // namespace
}  // namespace sps
