#include "tokenizer/bpe_tokenizer.h"

#include <functional>
#include <map>

#include "base/json.h"
#include "base/test_dir.h"
#include "base/test_files.h"
#include "base/threads.h"
#include "tokenizer/test_models.h"

namespace sps {
namespace {

const Tokenizer& gpt2() {
  static const auto tokenizer = make_tokenizer(shared_tokenizer().string());
  return *tokenizer;
}

TEST(BpeTokenizerGolden, EveryLineHasItsIdsAndComesBack) {
  SPS_NEEDS_SHARED_TOKENIZER();
  const std::string lines = read_text(shared_tokenizer() / "golden.jsonl");
  int count = 0;
  for (size_t begin = 0; begin < lines.size();) {
    const size_t end = lines.find('\n', begin);
    const auto line = parse_json(std::string_view(lines).substr(begin, end - begin), "golden.jsonl");
    const auto text = line["text"].get<std::string>();
    const auto ids = line["ids"].get<std::vector<int32_t>>();
    ASSERT_EQ(encoded(gpt2(), text), ids) << line["kind"] << ": " << text.substr(0, 100);
    ASSERT_EQ(gpt2().decode(ids), text);
    begin = end + 1;
    ++count;
  }
  EXPECT_EQ(count, 5318);
}

TEST(BpeTokenizerGolden, DisagreementsFollowTiktoken) {
  SPS_NEEDS_SHARED_TOKENIZER();
  const std::string lines = read_text(shared_tokenizer() / "disagreements.jsonl");
  int count = 0;
  for (size_t begin = 0; begin < lines.size(); ++count) {
    const size_t end = lines.find('\n', begin);
    const auto line = parse_json(std::string_view(lines).substr(begin, end - begin), "disagreements.jsonl");
    EXPECT_EQ(encoded(gpt2(), line["text"].get<std::string>()),
              line["tiktoken_wasm"].get<std::vector<int32_t>>());
    begin = end + 1;
  }
  EXPECT_EQ(count, 3);
}

TEST(BpeTokenizerGolden, FactsOfGpt2) {
  SPS_NEEDS_SHARED_TOKENIZER();
  EXPECT_EQ(gpt2().name(), "bpe-50257");
  EXPECT_EQ(gpt2().vocab_size(), 50257);
  EXPECT_EQ(gpt2().eot(), 50256);
  EXPECT_EQ(gpt2().token_bytes(50256), "");
  EXPECT_EQ(gpt2().token_bytes(15496), "Hello");
}

// peer-faults 22: "\n\n" is a token of GPT-2, "\n\n\n" is none: a run is pairs, and one more if it is odd.
TEST(BpeTokenizerGolden, RunsOfLineBreaks) {
  SPS_NEEDS_SHARED_TOKENIZER();
  for (size_t n = 1; n <= 64; ++n) {
    std::vector<int32_t> expected(n / 2, 628);
    if (n % 2 == 1) expected.push_back(198);
    EXPECT_EQ(encoded(gpt2(), std::string(n, '\n')), expected) << n;
  }
}

// Merges the first pair of the lowest rank again and again, as the definition says.
std::vector<int32_t> merged_by_definition(const BpeModel& model, std::string_view word) {
  std::map<std::pair<int32_t, int32_t>, size_t> ranks;
  for (size_t i = 0; i < model.merges.size(); ++i) ranks[{model.merges[i].left, model.merges[i].right}] = i;
  std::vector<int32_t> ids;
  for (const char c : word) ids.push_back(static_cast<unsigned char>(c));
  while (true) {
    size_t best = model.merges.size(), at = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto found = ranks.find({ids[i], ids[i + 1]});
      if (found != ranks.end() && found->second < best) best = found->second, at = i;
    }
    if (best == model.merges.size()) return ids;
    ids[at] = model.merges[best].result;
    ids.erase(ids.begin() + std::ptrdiff_t(at) + 1);
  }
}

TEST(BpeTokenizer, ShortAndLongWordsAreMergedByTheDefinition) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const BpeModel model = random_model(seed);
    const BpeTokenizer tokenizer(model);
    const Rng rng(seed, "words");
    for (size_t length = 1; length < 130; length += length < 50 ? 1 : 11) {
      std::string word;
      for (size_t i = 0; i < length; ++i)
        word += "abc"[rng.below(length * 1000 + i, length % 3 == 0 ? 1 : 3)];
      ASSERT_EQ(encoded(tokenizer, word), merged_by_definition(model, word)) << seed << " " << word;
      ASSERT_EQ(encoded(tokenizer, word), merged_by_definition(model, word)) << "the second time: " << word;
    }
  }
}

TEST(BpeTokenizer, PartsAreTheWhole) {
  const auto in_parts = [](const Tokenizer& tokenizer, std::string_view text, size_t& parts) {
    std::vector<int32_t> ids;
    parts = 0;
    tokenizer.encode_in_parts(text, [&](std::span<const int32_t> some) {
      ids.insert(ids.end(), some.begin(), some.end());
      ++parts;
    });
    return ids;
  };
  BpeModel model = small_model({{"a", "b"}, {" ", "ab"}});
  model.added.push_back({"<x>", 300, false});
  model.prefix_space = model.nfc = true;
  const BpeTokenizer bpe(model);
  const ByteTokenizer bytes;
  std::string text;
  for (uint64_t i = 0; text.size() < 400'000; ++i) text += strange_text(i, true) + "<x>";
  text += std::string(300'000, 'a');
  for (const Tokenizer* tokenizer :
       {static_cast<const Tokenizer*>(&bpe), static_cast<const Tokenizer*>(&bytes)}) {
    size_t parts = 0;
    EXPECT_EQ(in_parts(*tokenizer, text, parts), encoded(*tokenizer, text));
    EXPECT_GT(parts, 4u);
    EXPECT_EQ(in_parts(*tokenizer, "ab", parts), encoded(*tokenizer, "ab"));
    EXPECT_EQ(parts, 1u);
    EXPECT_TRUE(in_parts(*tokenizer, "", parts).empty());
  }
}

TEST(BpeTokenizer, PathologicalTextsTakeNoLongerPerByte) {
  BpeModel model = small_model({{"a", "a"}, {"aa", "aa"}, {" ", " "}, {"  ", "  "}, {"b", "c"}});
  const BpeTokenizer tokenizer(model);
  const size_t n = 2'000'000;  // quadratic work would take hours
  EXPECT_EQ(encoded(tokenizer, std::string(n, 'a')), std::vector<int32_t>(n / 4, 257));
  EXPECT_EQ(encoded(tokenizer, std::string(n, ' ')), std::vector<int32_t>(n / 4, 259));
  std::string mixed;
  const Rng rng(1, "base64");
  for (size_t i = 0; i < n; ++i) mixed += char('a' + rng.below(i, 26));
  EXPECT_EQ(tokenizer.decode(encoded(tokenizer, mixed)), mixed);
  for (const std::string_view part : {"'", " '", "\n ", "\xFF", "\u0301", "9", "A\u4E2D"}) {
    std::string text;
    while (text.size() < n) text += part;
    for (const std::string_view pattern : {patterns::gpt2, patterns::cl100k, patterns::o200k}) {
      model.splits[0].pattern = pattern;
      const BpeTokenizer other(model);
      EXPECT_EQ(other.decode(encoded(other, text)), text);
    }
  }
}

TEST(BpeTokenizer, AnyBytesComeBack) {
  const BpeTokenizer tokenizer(small_model({{"t", "h"}, {" ", "a"}, {"\xE2", "\x82"}}));
  std::string all;
  for (int b = 0; b < 256; ++b) all += char(b);
  EXPECT_EQ(tokenizer.decode(encoded(tokenizer, all)), all);
  for (uint64_t i = 0; i < 3000; ++i) {
    const std::string text = strange_text(i, true);
    ASSERT_EQ(tokenizer.decode(encoded(tokenizer, text)), text) << i;
  }
}

// peer-faults 26 and 25.
TEST(BpeTokenizer, SpecialTextIsPlainUnlessItIsParsed) {
  const BpeTokenizer tokenizer(small_model({}));
  const std::string text = "a<|endoftext|>b<|endoftext|>";
  EXPECT_EQ(encoded(tokenizer, text).size(), text.size());
  EXPECT_EQ(tokenizer.decode(encoded(tokenizer, text)), text);
  EXPECT_EQ(encoded(tokenizer, text, SpecialText::parsed), (std::vector<int32_t>{'a', 256, 'b', 256}));
  EXPECT_EQ(tokenizer.decode(encoded(tokenizer, text, SpecialText::parsed)), "ab");
  EXPECT_EQ(encoded(tokenizer, "\\n"), (std::vector<int32_t>{'\\', 'n'}));
  EXPECT_EQ(encoded(tokenizer, "<|endoftext|", SpecialText::parsed).size(), 12u);
}

TEST(BpeTokenizer, AddedTokensThatAreNotSpecialAreVocabulary) {
  BpeModel model = small_model({});
  model.added.push_back({"<tool>", 300, false});
  model.added.push_back({"<tool>s", 301, false});
  model.added.push_back({"<tool>set", 302, true});
  const BpeTokenizer tokenizer(model);
  EXPECT_EQ(tokenizer.vocab_size(), 303);
  EXPECT_EQ(encoded(tokenizer, "x<tool><tool>set"), (std::vector<int32_t>{'x', 300, 301, 'e', 't'}));
  EXPECT_EQ(encoded(tokenizer, "<tool>set", SpecialText::parsed), (std::vector<int32_t>{302}));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{300, 302, 301, 280, -1, 303}), "<tool><tool>s");
}

TEST(BpeTokenizer, WholeWordsPrefixSpaceAndNfc) {
  BpeModel model = small_model({{"a", "b"}, {"c", "d"}, {"ab", "cd"}, {"b", "c"}});
  std::swap(model.merges[0], model.merges[3]);  // b c first: "abcd" is not reached by merging
  EXPECT_EQ(encoded(BpeTokenizer(model), "abcd"), (std::vector<int32_t>{'a', 259, 'd'}));
  model.whole_words = true;
  EXPECT_EQ(encoded(BpeTokenizer(model), "abcd"), (std::vector<int32_t>{258}));
  EXPECT_EQ(encoded(BpeTokenizer(model), "abcda"), (std::vector<int32_t>{'a', 259, 'd', 'a'}));
  model.prefix_space = true;
  EXPECT_EQ(encoded(BpeTokenizer(model), "z"), (std::vector<int32_t>{' ', 'z'}));
  EXPECT_EQ(encoded(BpeTokenizer(model), " z"), (std::vector<int32_t>{' ', 'z'}));
  EXPECT_EQ(encoded(BpeTokenizer(model), ""), std::vector<int32_t>{});
  model.prefix_space = false;
  model.nfc = true;
  EXPECT_EQ(encoded(BpeTokenizer(model), "e\u0301"), (std::vector<int32_t>{0xC3, 0xA9}));
}

TEST(BpeTokenizer, ThreadsAndTokenizersDoNotDisturbEachOther) {
  const BpeTokenizer one(small_model({{"a", "b"}})), other(small_model({{"b", "c"}}));
  const int before = thread_count();
  set_thread_count(4);
  std::vector<int> wrong(64, 0);
  parallel_for(64, [&](int64_t piece) {
    for (int i = 0; i < 500; ++i) {
      wrong[size_t(piece)] += encoded(one, "abc") != std::vector<int32_t>{256, 'c'};
      wrong[size_t(piece)] += encoded(other, "abc") != std::vector<int32_t>{'a', 256};
      const std::string text = strange_text(uint64_t(i), true);
      wrong[size_t(piece)] += one.decode(encoded(one, text)) != text;
    }
  });
  set_thread_count(before);
  EXPECT_EQ(wrong, std::vector<int>(64, 0));
}

// Words of the same beginning, lengths around the border of what is remembered, zeros.
TEST(BpeTokenizer, RememberedWordsAreNotMixedUp) {
  BpeModel model = small_model({});
  model.splits.clear();
  const BpeTokenizer tokenizer(model);
  for (int round = 0; round < 2; ++round)
    for (size_t n = 1; n < 30; ++n)
      for (const char c : {'\0', 'x'}) {
        const std::string word(n, c);
        EXPECT_EQ(encoded(tokenizer, word), std::vector<int32_t>(n, c));
        EXPECT_EQ(encoded(tokenizer, std::string_view(word + "yyyyyyyyyyyyyyyyyyyyyyyyyyyyy").substr(0, n)),
                  std::vector<int32_t>(n, c));
      }
}

TEST(BpeTokenizer, FingerprintHasAllThatDecidesIds) {
  const BpeModel model = small_model({{"a", "b"}, {"b", "c"}});
  const std::string fingerprint = BpeTokenizer(model).fingerprint();
  EXPECT_EQ(BpeTokenizer(model).fingerprint(), fingerprint);
  const std::vector<std::function<void(BpeModel&)>> changes = {
      [](BpeModel& m) { std::swap(m.merges[0], m.merges[1]); },
      [](BpeModel& m) { m.merges.pop_back(); },
      [](BpeModel& m) { m.splits[0].pattern = patterns::qwen2; },
      [](BpeModel& m) {
        m.splits.push_back({SplitStep::Kind::digits, ""});
      },
      [](BpeModel& m) { m.prefix_space = true; },
      [](BpeModel& m) { m.nfc = true; },
      [](BpeModel& m) { std::swap(m.tokens['x'], m.tokens['y']); },
      [](BpeModel& m) {
        m.added.push_back({"<x>", 400, true});
      },
      [](BpeModel& m) { m.added[0].text = "</s>"; },
      [](BpeModel& m) { m.eot = m.added[0].id = 300; },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    BpeModel changed = model;
    changes[i](changed);
    EXPECT_NE(BpeTokenizer(changed).fingerprint(), fingerprint) << i;
  }
}

TEST(BpeTokenizer, FingerprintHasNothingElse) {
  BpeModel model = small_model({{"a", "b"}, {"b", "c"}, {"ab", "c"}});
  const std::string fingerprint = BpeTokenizer(model).fingerprint();
  model.whole_words = true;                 // all tokens merge up to themselves
  model.merges.push_back({'a', 257, 258});  // "bc" is never left behind an "a"
  model.splits[0].pattern = patterns::gpt2_tiktoken;
  EXPECT_EQ(BpeTokenizer(model).fingerprint(), fingerprint);
  std::swap(model.merges[0], model.merges[1]);  // now it is, and the other merge is dead
  EXPECT_NE(BpeTokenizer(model).fingerprint(), fingerprint);
  model.merges.pop_back();  // "abc" is no longer made by merges
  model.whole_words = false;
  const std::string without = BpeTokenizer(model).fingerprint();
  model.whole_words = true;
  EXPECT_NE(BpeTokenizer(model).fingerprint(), without);
}

TEST(BpeTokenizer, ModelsThatContradictThemselvesAreErrors) {
  struct Case {
    const char* sentence;
    std::function<void(BpeModel&)> change;
  };
  const std::vector<Case> cases = {
      {"merge 0 has id 9999 on its left", [](BpeModel& m) { m.merges[0].left = 9999; }},
      {"merge 0 has id -1 on its right", [](BpeModel& m) { m.merges[0].right = -1; }},
      {"merge 0 has id 258 on its result", [](BpeModel& m) { m.merges[0].result = 258; }},
      {"has other bytes", [](BpeModel& m) { m.merges[0].result = 'a'; }},
      {"has other bytes", [](BpeModel& m) { m.tokens[256] = "ba"; }},
      {"merge 2 joins ids 97 and 98", [](BpeModel& m) { m.merges.push_back(m.merges[0]); }},
      {"ids 97 and 98 are the same token", [](BpeModel& m) { m.merges.clear(), m.tokens['b'] = "a"; }},
      {"byte 200 has no token", [](BpeModel& m) { m.tokens[200].clear(); }},
      {"end of text, id -1,", [](BpeModel& m) { m.eot = -1; }},
      {"end of text, id 258,", [](BpeModel& m) { m.added[0].special = false; }},
      {"'<|endoftext|>' is there twice",
       [](BpeModel& m) {
         m.added.push_back({"<|endoftext|>", 400, true});
       }},
      {"has id 258, but one before it has 258",
       [](BpeModel& m) {
         m.added.push_back({"<x>", 258, true});
       }},
      {"id 65 is a token and the added token", [](BpeModel& m) { m.added[0].id = m.eot = 'A'; }},
      {"has no text", [](BpeModel& m) { m.added[0].text.clear(); }},
      {"ids end at", [](BpeModel& m) { m.added[0].id = m.eot = INT32_MAX; }},
      {"has 5000 bytes", [](BpeModel& m) { m.added[0].text = std::string(5000, 'x'); }},
      {"is not valid", [](BpeModel& m) { m.splits[0].pattern = "("; }},
  };
  for (const auto& [sentence, change] : cases) {
    BpeModel model = small_model({{"a", "b"}, {"b", "c"}});
    change(model);
    EXPECT_PRED2(mentions, error_of([&] { BpeTokenizer{model}; }), sentence);
  }
}

}  // namespace
}  // namespace sps
