#include "tokenizer/bpe_trainer.h"

#include <gtest/gtest.h>

#include <array>
#include <map>

#include "base/rng.h"
#include "base/test_dir.h"
#include "base/threads.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/load_tokenizer_json.h"
#include "tokenizer/save_tokenizer_json.h"
#include "tokenizer/test_bpe_trainer.h"

namespace sps {
namespace {

// Texts of words of a few letters, among them ones of several bytes; frequent words are short.
std::vector<std::string> random_texts(uint64_t seed, size_t count) {
  constexpr const char* kLetters[] = {"a", "b", "c", "d", "é", "ж", "語"};
  const Rng rng(seed, "texts");
  std::vector<std::string> texts(count);
  uint64_t n = 0;
  for (std::string& text : texts)
    for (uint64_t words = rng.below(n++, 30); words > 0; --words) {
      const uint64_t longest = 1 + rng.below(n++, 8);
      for (uint64_t letters = 1 + rng.below(n++, longest); letters > 0; --letters)
        text += kLetters[rng.below(n++, std::size(kLetters))];
      text += ' ';
    }
  return texts;
}

// GPT-2's pattern on such texts: a word takes the space before it along, the last space stands alone.
std::map<std::string, int64_t> words_of(const std::vector<std::string>& texts) {
  std::map<std::string, int64_t> words;
  for (const std::string& text : texts)
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find(' ', begin + 1), text.size());
      ++words[text.substr(begin, end - begin)];
      begin = end;
    }
  return words;
}

BpeModel trained(BpeTrainerOptions options, const std::vector<std::string>& texts) {
  BpeTrainer trainer(std::move(options));
  trainer.add(texts);
  return trainer.train();
}

const BpeTrainerOptions kSmall{.vocab_size = 400, .pattern = "gpt2", .special = {}};

TEST(BpeTrainer, EqualsTheSlowTrainer) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const auto texts = random_texts(seed, 20);
    BpeTrainerOptions options = kSmall;
    options.min_frequency = int64_t(1 + seed % 3);
    options.vocab_size = 300 + 20 * int64_t(seed);
    options.special.assign(seed % 2, "<pad>");
    const BpeModel model = trained(options, texts);

    std::array<int32_t, 256> byte_ids{};
    int32_t id = 0;
    for (const auto& [first, last] :
         {std::pair{33, 126}, {161, 172}, {174, 255}, {0, 32}, {127, 160}, {173, 173}})
      for (int b = first; b <= last; ++b) byte_ids[size_t(b)] = id++;
    const MergeLimits limits{.tokens = options.vocab_size - 1 - int64_t(options.special.size()),
                             .min_frequency = options.min_frequency,
                             .never = {}};
    const SlowBpe slow = slow_bpe(words_of(texts), byte_ids, limits);
    EXPECT_EQ(model.merges, slow.merges) << "seed " << seed;
    std::vector<std::string> tokens = slow.tokens;
    tokens.resize(tokens.size() + model.added.size());
    EXPECT_EQ(model.tokens, tokens) << "seed " << seed;
    EXPECT_EQ(model.eot, int32_t(slow.tokens.size()));
  }
}

TEST(BpeTrainer, ThreadsBatchesAndOrderChangeNothing) {
  auto texts = random_texts(1, 200);
  const int before = thread_count();
  set_thread_count(1);
  const BpeModel model = trained(kSmall, texts);
  EXPECT_EQ(model.tokens.size(), 400u);
  set_thread_count(3);
  EXPECT_EQ(trained(kSmall, texts), model);
  EXPECT_EQ(to_tokenizer_json(trained(kSmall, texts)), to_tokenizer_json(model));
  std::reverse(texts.begin(), texts.end());
  BpeTrainer trainer(kSmall);
  for (size_t i = 0; i < texts.size(); i += 10) trainer.add(std::span(texts).subspan(i, 10));
  EXPECT_EQ(trainer.train(), model);
  set_thread_count(before);
}

TEST(BpeTrainer, SpecialTokens) {
  BpeTrainerOptions options = kSmall;
  options.vocab_size = 262;
  options.eot = "<end>";
  options.special = {"<pad>", "ab"};
  // Ordinary text spells all three, and " ab" must do without "ab".
  const BpeModel model = trained(options, {"<end><pad> ab ab ab ab", "<end><pad>abab"});
  EXPECT_EQ(model.tokens.size(), 262u);
  EXPECT_EQ(model.eot, 259);
  const std::vector<AddedToken> expected{{"<end>", 259, true}, {"<pad>", 260, true}, {"ab", 261, true}};
  EXPECT_EQ(model.added, expected);
  for (const Merge& m : model.merges) {
    EXPECT_LT(m.result, model.eot);
    EXPECT_NE(model.tokens[size_t(m.result)], "ab");
    EXPECT_EQ(model.tokens[size_t(m.left)] + model.tokens[size_t(m.right)], model.tokens[size_t(m.result)]);
  }
}

// What was trained is written, read and run: ids are those of the model, and text cannot become a special
// token.
TEST(BpeTrainer, TheTrainedModelRuns) {
  const auto texts = random_texts(3, 100);
  BpeTrainerOptions options = kSmall;
  options.pattern = "llama3";
  options.special = {"<pad>"};
  const BpeModel model = trained(options, texts);
  EXPECT_EQ(parse_tokenizer_json(to_tokenizer_json(model), "written"), model);
  const BpeTokenizer tokenizer(model);
  size_t bytes = 0, tokens = 0;
  for (const std::string& text : texts) {
    std::vector<int32_t> ids;
    tokenizer.encode(text, ids);
    EXPECT_EQ(tokenizer.decode(ids), text);
    bytes += text.size(), tokens += ids.size();
  }
  EXPECT_LT(2 * tokens, bytes);
  std::vector<int32_t> ids;
  tokenizer.encode("<|endoftext|><pad>", ids);
  for (const int32_t id : ids) EXPECT_LT(id, model.eot);
  EXPECT_EQ(tokenizer.decode(ids), "<|endoftext|><pad>");
  ids.clear();
  tokenizer.encode("a<|endoftext|><pad>", ids, SpecialText::parsed);
  EXPECT_EQ(std::vector<int32_t>(ids.end() - 2, ids.end()), (std::vector<int32_t>{model.eot, model.eot + 1}));
}

TEST(BpeTrainer, FrequenciesAndLengths) {
  const std::vector<std::string> texts{"abc abc abc xyz xyz"};
  BpeTrainerOptions options = kSmall;
  options.min_frequency = 3;
  for (const Merge& m : trained(options, texts).merges)
    EXPECT_EQ(trained(options, texts).tokens[size_t(m.result)].find('x'), std::string::npos);
  options.min_frequency = 2;
  options.max_token_bytes = 2;
  for (const std::string& token : trained(options, texts).tokens) EXPECT_LE(token.size(), 2u);
}

// A text that is too small gives what it has: the numbers of tokens stay dense, end of text follows them.
TEST(BpeTrainer, TooLittleText) {
  const BpeModel model = trained(kSmall, {"ab ab"});
  EXPECT_EQ(model.tokens.size(), 258u);  // "ab" twice; " ab" once only
  EXPECT_EQ(model.eot, 257);
  EXPECT_EQ(trained(kSmall, {"x"}).tokens.size(), 257u);
  EXPECT_PRED2(mentions, error_of([] { trained(kSmall, {""}); }), "no text");
  EXPECT_PRED2(mentions, error_of([] { BpeTrainer(kSmall).train(); }), "no text");
}

TEST(BpeTrainer, ALongWordIsCountedInParts) {
  BpeTrainerOptions options = kSmall;
  options.max_word_bytes = 4;
  std::string word;
  for (int i = 0; i < 100; ++i) word += "é";
  BpeTrainer trainer(options);
  trainer.add(std::vector<std::string>{word, std::string(1000, '\xA9')});  // the second is no UTF-8
  EXPECT_EQ(trainer.stats().words, 2u);
  EXPECT_EQ(trainer.stats().different_words, 2u);
  for (const std::string& token : trainer.train().tokens) EXPECT_LE(token.size(), 4u);
}

TEST(BpeTrainer, AFullTableDropsRareWords) {
  BpeTrainerOptions options = kSmall;
  options.table_bytes = 20000;
  std::vector<std::string> texts;
  for (int i = 0; i < 3000; ++i) texts.push_back("often " + std::to_string(1000000 + i));
  const int before = thread_count();
  std::vector<BpeModel> models;
  for (const int threads : {1, 3}) {
    set_thread_count(threads);
    BpeTrainer trainer(options);
    for (size_t i = 0; i < texts.size(); i += 100) trainer.add(std::span(texts).subspan(i, 100));
    const BpeTrainerStats& stats = trainer.stats();
    EXPECT_EQ(stats.texts, 3000u);
    EXPECT_EQ(stats.words, 6000u);
    EXPECT_GT(stats.dropped_words, 2000u);
    EXPECT_EQ(stats.dropped_words + stats.different_words, 3001u);
    EXPECT_EQ(stats.dropped_frequency, 1u);
    models.push_back(trainer.train());
  }
  set_thread_count(before);
  EXPECT_EQ(models[0], models[1]);
  EXPECT_NE(std::find(models[0].tokens.begin(), models[0].tokens.end(), "often"), models[0].tokens.end());
}

TEST(BpeTrainer, WrongOptions) {
  const auto error = [](auto change) {
    BpeTrainerOptions options = kSmall;
    change(options);
    return error_of([&] { BpeTrainer{options}; });
  };
  using Options = BpeTrainerOptions;
  EXPECT_PRED2(mentions, error([](Options& o) { o.vocab_size = 256; }), "256, but at least 257");
  EXPECT_PRED2(mentions, error([](Options& o) { o.special = {"<|endoftext|>"}; }), "twice");
  EXPECT_PRED2(mentions, error([](Options& o) { o.special = {""}; }), "empty");
  EXPECT_PRED2(mentions, error([](Options& o) { o.eot = "\xFF"; }), "UTF-8");
  EXPECT_PRED2(mentions, error([](Options& o) { o.eot = to_alphabet(" "); }), "single byte");
  EXPECT_PRED2(mentions, error([](Options& o) { o.pattern = "gpt3"; }), "'gpt3'; known: gpt2, llama3");
  EXPECT_PRED2(mentions, error([](Options& o) { o.pattern = "(a"; }), "(a");
  EXPECT_PRED2(mentions, error([](Options& o) { o.min_frequency = 0; }), "min_frequency is 0");
  EXPECT_PRED2(mentions, error([](Options& o) { o.max_token_bytes = 0; }), "max_token_bytes");
  EXPECT_PRED2(mentions, error([](Options& o) { o.max_word_bytes = 3; }), "max_word_bytes");
}

TEST(BpeTrainer, PatternsByNameAndByExpression) {
  EXPECT_EQ(named_pattern("\\S+").at(0).pattern, "\\S+");
  EXPECT_NE(named_pattern("gpt2"), named_pattern("llama3"));
  BpeTrainerOptions options = kSmall;
  options.pattern = "[ab]+";  // what lies between matches is a word too
  BpeTrainer trainer(options);
  trainer.add(std::vector<std::string>{"abc123ab"});
  EXPECT_EQ(trainer.stats().words, 3u);
  EXPECT_EQ(trainer.stats().different_words, 2u);
}

}  // namespace
}  // namespace sps
