#include "tokenizer/bpe_merger.h"

#include <gtest/gtest.h>

#include <array>
#include <map>

#include "base/rng.h"
#include "tokenizer/test_bpe_trainer.h"

namespace sps {
namespace {

constexpr std::array<int32_t, 256> kPlainBytes = [] {
  std::array<int32_t, 256> ids{};
  for (int b = 0; b < 256; ++b) ids[size_t(b)] = b;
  return ids;
}();

BpeMerger merged(const std::map<std::string, int64_t>& words, const MergeLimits& limits) {
  BpeMerger merger(kPlainBytes);
  for (const auto& [word, count] : words) merger.add_word(word, count);
  merger.run(limits);
  return merger;
}

// Few letters make ties and runs of one letter.
TEST(BpeMerger, EqualsTheSlowTrainer) {
  const Rng rng(1, "merger");
  uint64_t n = 0;
  for (int round = 0; round < 300; ++round) {
    const uint64_t letters = 1 + rng.below(n++, 4), longest = 1 + rng.below(n++, 14);
    std::map<std::string, int64_t> words;
    for (uint64_t w = 0; w <= rng.below(n, 40); ++w) {
      std::string word;
      for (uint64_t i = 0; i <= rng.below(n + 1000 + w, longest); ++i)
        word += char('a' + rng.below(n + 2000 + 100 * w + i, letters));
      words[word] += int64_t(1 + rng.below(n + 9000 + w, 5));
    }
    n += 20000;
    MergeLimits limits{.tokens = int64_t(256 + rng.below(n++, 60)), .never = {}};
    if (round % 3 == 1) limits.min_frequency = int64_t(1 + rng.below(n++, 6));
    if (round % 4 == 1) limits.max_token_bytes = int64_t(1 + rng.below(n++, 6));
    if (round % 5 == 1) limits.never = {"ab", "aa", "abc"};
    const BpeMerger fast = merged(words, limits);
    const SlowBpe slow = slow_bpe(words, kPlainBytes, limits);
    ASSERT_EQ(fast.merges(), slow.merges) << "round " << round;
    ASSERT_EQ(fast.tokens(), slow.tokens) << "round " << round;
  }
}

TEST(BpeMerger, RunsOfOneLetterJoinFromTheLeft) {
  const BpeMerger merger = merged({{"aaaaa", 1}}, {.tokens = 300, .never = {}});
  // [aa aa a]: now (aa, a) and (aa, aa) are equally frequent, and the id of a is smaller.
  const std::vector<Merge> expected{{'a', 'a', 256}, {256, 'a', 257}, {256, 257, 258}};
  EXPECT_EQ(merger.merges(), expected);
  EXPECT_EQ(merger.tokens().back(), "aaaaa");
}

TEST(BpeMerger, TiesGoToTheSmallerIds) {
  const BpeMerger merger = merged({{"zy", 3}, {"ab", 3}, {"ac", 3}, {"qr", 4}}, {.tokens = 259, .never = {}});
  const std::vector<Merge> expected{{'q', 'r', 256}, {'a', 'b', 257}, {'a', 'c', 258}};
  EXPECT_EQ(merger.merges(), expected);
}

TEST(BpeMerger, NothingToJoin) {
  EXPECT_TRUE(merged({}, {.tokens = 300, .never = {}}).merges().empty());
  EXPECT_TRUE(merged({{"a", 5}, {"b", 2}}, {.tokens = 300, .never = {}}).merges().empty());
  EXPECT_TRUE(merged({{"ab", 5}}, {.tokens = 256, .never = {}}).merges().empty());
}

}  // namespace
}  // namespace sps
