#include "tokenizer/splitter.h"

#include <algorithm>

#include "base/test_dir.h"
#include "tokenizer/test_models.h"
#include "tokenizer/unicode.h"

namespace sps {
namespace {

using Pieces = std::vector<std::string>;

Pieces pieces(const Cutter& cutter, std::string_view text, size_t room = 128) {
  Pieces result;
  std::unique_ptr<CutState> state;
  std::vector<size_t> ends(room);
  for (size_t begin = 0; begin < text.size();) {
    const size_t n = cutter.cut(text, begin, ends, state);
    EXPECT_GT(n, 0u);
    for (size_t i = 0; i < n; begin = ends[i++]) {
      EXPECT_GT(ends[i], begin);
      result.emplace_back(text.substr(begin, ends[i] - begin));
    }
  }
  return result;
}

Pieces pieces(std::string_view pattern, std::string_view text) {
  return pieces(*make_cutter({SplitStep::Kind::pattern, std::string(pattern)}), text);
}

// PCRE2 has an older Unicode than our table; characters on which the two differ are left out of comparisons.
bool same_classes(const Cutter& letters, const Cutter& numbers, const Cutter& marks, uint32_t c) {
  std::string text;
  append_utf8(text, c);
  const auto matches = [&](const Cutter& cutter) { return pieces(cutter, "-" + text + "-").size() == 3; };
  const uint8_t classes = CharTable::get().of(c);
  const bool mark = (classes & CharClass::letter) == 0 && (classes & CharClass::upper) != 0;
  return matches(letters) == ((classes & CharClass::letter) != 0) &&
         matches(numbers) == ((classes & CharClass::number) != 0) && matches(marks) == mark;
}

class KnownPattern : public testing::TestWithParam<std::string_view> {};

TEST_P(KnownPattern, ScannerCutsLikeTheRegularExpression) {
  const auto scanner = make_cutter({SplitStep::Kind::pattern, std::string(GetParam())});
  const auto regex = make_regex_cutter(GetParam());
  const auto letters = make_regex_cutter("\\p{L}"), numbers = make_regex_cutter("\\p{N}"),
             marks = make_regex_cutter("\\p{M}");
  int compared = 0;
  for (uint64_t i = 0; i < 8000; ++i) {
    std::string text;
    // As it is, without the characters that are newer than PCRE2's tables.
    const std::string strange = strange_text(i, i % 2 == 1);
    const char* const end = strange.data() + strange.size();
    for (const char* p = strange.data(); p != end;) {
      const Utf8Char c = read_utf8(p, end);
      if (c.state != Utf8::valid || c.code_point < 0x300 ||
          same_classes(*letters, *numbers, *marks, c.code_point)) {
        text.append(p, size_t(c.length));
        ++compared;
      }
      p += c.length;
    }
    ASSERT_EQ(pieces(*scanner, text), pieces(*regex, text)) << i;
    ASSERT_EQ(pieces(*scanner, text, 1), pieces(*regex, text, 2)) << i;
  }
  EXPECT_GT(compared, 140000);  // hardly any was left out
}

INSTANTIATE_TEST_SUITE_P(All, KnownPattern,
                         testing::Values(patterns::gpt2, patterns::gpt2_tiktoken, patterns::cl100k,
                                         patterns::cl100k_tiktoken, patterns::qwen2, patterns::o200k));

TEST(Splitter, Gpt2Words) {
  EXPECT_EQ(
      pieces(patterns::gpt2, "I'll  say: don'T 12345!? x\n\n y  "),
      (Pieces{"I", "'ll", " ", " say", ":", " don", "'", "T", " 12345", "!?", " x", "\n\n", " y", "  "}));
}

TEST(Splitter, Cl100kWords) {
  EXPECT_EQ(pieces(patterns::cl100k, "I'LL (say) 12345!\r\n\n x \n  "),
            (Pieces{"I", "'LL", " (", "say", ")", " ", "123", "45", "!\r\n\n", " x", " \n", "  "}));
  EXPECT_EQ(pieces(patterns::cl100k_tiktoken, "x \n  "), (Pieces{"x", " \n  "}));
  EXPECT_EQ(pieces(patterns::qwen2, "a 123"), (Pieces{"a", " ", "1", "2", "3"}));
  EXPECT_EQ(pieces(patterns::cl100k, "it'\u017F me"),
            (Pieces{"it", "'\u017F", " me"}));  // the long s folds to s
}

TEST(Splitter, O200kWords) {
  EXPECT_EQ(pieces(patterns::o200k, "HelloWorld's XMLFile 12345 /a//\n"),
            (Pieces{"Hello", "World's", " XMLFile", " ", "123", "45", " /", "a", "//\n"}));
}

// The three cases in which GPT-2 tokenizers disagree: U+0085 is white space, U+FEFF is not.
TEST(Splitter, WhiteSpaceIsUnicodes) {
  EXPECT_EQ(pieces(patterns::gpt2, "a \u0085b"), (Pieces{"a", " ", "\u0085", "b"}));
  EXPECT_EQ(pieces(patterns::gpt2, "a \uFEFFb"), (Pieces{"a", " \uFEFF", "b"}));
  EXPECT_EQ(pieces(*make_regex_cutter("\\s+|[^\\s]+|\\S"), "a\u180Eb\u0085\u3000c"),
            (Pieces{"a\u180Eb", "\u0085\u3000", "c"}));
}

TEST(Splitter, StepsRunOnThePiecesBefore) {
  const auto words = [](const std::vector<SplitStep>& steps, std::string_view text) {
    Pieces result;
    Splitter(steps).for_each(text, [&](std::string_view piece) { result.emplace_back(piece); });
    return result;
  };
  const SplitStep digits{SplitStep::Kind::digits, ""};
  const SplitStep gpt2{SplitStep::Kind::pattern, std::string(patterns::gpt2)};
  EXPECT_EQ(words({digits, gpt2}, "a  12\u00B2 b"), (Pieces{"a", "  ", "1", "2", "\u00B2", " b"}));
  EXPECT_EQ(words({}, "a b"), (Pieces{"a b"}));
  EXPECT_EQ(words({}, ""), Pieces{});
  EXPECT_EQ(words({digits, gpt2}, ""), Pieces{});
  std::string many;
  for (int i = 0; i < 1000; ++i) many += " word 7";
  EXPECT_EQ(words({digits, gpt2}, many).size(), 3000u);
}

TEST(RegexCutter, WhatLiesBetweenMatchesIsAPiece) {
  const auto cutter = make_regex_cutter("ab|x*");  // empty matches do not count
  EXPECT_EQ(pieces(*cutter, "zzabzxxyab"), (Pieces{"zz", "ab", "z", "xx", "y", "ab"}));
  EXPECT_EQ(pieces(*make_regex_cutter("[]x]+"), "a]x["), (Pieces{"a", "]x", "["}));
  EXPECT_EQ(pieces(*make_regex_cutter("a$"), "a\n"), (Pieces{"a\n"}));
}

TEST(RegexCutter, PatternOfATextMatchesExactlyIt) {
  const std::string text = "a.b*[c]\\d \n^$(|)?+{}#-\u4E2D";
  EXPECT_EQ(pieces(*make_regex_cutter(pattern_of_text(text)), "1" + text + "2"), (Pieces{"1", text, "2"}));
}

TEST(RegexCutter, ErrorsNameThePattern) {
  EXPECT_PRED2(mentions, error_of([] { make_regex_cutter("(a"); }), "'(a'");
  EXPECT_PRED2(mentions, error_of([] { make_regex_cutter("[a&&[b]]"); }), "a set within a set");
  EXPECT_PRED2(mentions, error_of([] { make_regex_cutter("[a[b]]"); }), "a set within a set");
  EXPECT_PRED2(mentions, error_of([] { make_regex_cutter(std::string(1 << 20, 'a')); }), "1048576 bytes");
  EXPECT_PRED2(mentions, error_of([] { Splitter(std::vector<SplitStep>(17)); }), "17 steps");
  // Exponential in the length of the text: ends with an error, not never.
  const auto slow = make_regex_cutter("(a+)+(a+)+$");
  EXPECT_PRED2(mentions, error_of([&] { pieces(*slow, std::string(100, 'a') + "!"); }), "(a+)+(a+)+$");
}

TEST(RegexCutter, BytesThatAreNotUtf8HaveNoClass) {
  const auto cutter = make_regex_cutter(patterns::gpt2);
  const std::string text = "a\xFF\xE4\xB8 \xED\xA0\x80 b\xC0\x80\xF0\x9F\x91";
  EXPECT_EQ(pieces(*cutter, text),
            (Pieces{"a", "\xFF\xE4\xB8", " \xED\xA0\x80", " b", "\xC0\x80\xF0\x9F\x91"}));
  EXPECT_EQ(pieces(*cutter, text), pieces(patterns::gpt2, text));
}

}  // namespace
}  // namespace sps
