#include "tokenizer/long_word.h"

#include <gtest/gtest.h>

#include <string>

#include "base/rng.h"
#include "base/test_memory.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/test_models.h"

namespace sps {
namespace {

// Merged whole, and in windows of `window` bytes.
class Merged {
 public:
  explicit Merged(const BpeModel& model) : tokens_(model.tokens), index_(tokens_), merges_(model.merges) {
    for (int byte = 0; byte < 256; ++byte) byte_ids_[size_t(byte)] = index_.find(std::string(1, char(byte)));
  }
  std::vector<int32_t> whole(std::string_view word) const {
    std::vector<int32_t> ids;
    for (const char c : word) ids.push_back(byte_ids_[static_cast<unsigned char>(c)]);
    ids.resize(merges_.apply(ids).count);
    return ids;
  }
  std::vector<int32_t> in_windows(std::string_view word, size_t window, size_t back) const {
    std::vector<int32_t> ids;
    LongWordMerger(merges_, index_, byte_ids_, window, back).merge(word, [&](std::span<const int32_t> some) {
      ids.insert(ids.end(), some.begin(), some.end());
    });
    return ids;
  }

 private:
  std::vector<std::string> tokens_;
  TokenIndex index_;
  MergeTable merges_;
  std::array<int32_t, 256> byte_ids_{};
};

TEST(LongWord, WindowsChangeNothing) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const Merged merged(random_model(seed));
    const Rng rng(seed, "long words");
    for (const size_t length : {1, 7, 60, 400, 3000}) {
      std::string word;
      for (size_t i = 0; i < length; ++i) word += "abc"[rng.below(length * 10000 + i, 1 + seed % 3)];
      const std::vector<int32_t> expected = merged.whole(word);
      for (const size_t window : {1, 2, 5, 16, 64, 1000})
        for (const size_t back : {1, 3, 32})
          ASSERT_EQ(merged.in_windows(word, window, back), expected)
              << seed << " " << window << " " << back << " " << word;
    }
  }
}

// Each pair is joined before the one to its left, so the last byte of such a run decides all borders before
// it.
TEST(LongWord, BordersThatDependOnBytesFarBehind) {
  const std::string run = "abcdefghijklmnopqrstuvwxyz";
  std::vector<std::pair<std::string, std::string>> merges;
  for (size_t i = run.size() - 1; i > 0; --i) merges.emplace_back(run.substr(i - 1, 1), run.substr(i, 1));
  const Merged merged(small_model(merges));
  for (const size_t length : {25, 26}) {
    std::string word;
    for (int i = 0; i < 40; ++i) word += run.substr(0, length);
    const std::vector<int32_t> expected = merged.whole(word);
    EXPECT_EQ(expected[0], length == 26 ? 256 + 24 : int32_t('a'));
    for (const size_t window : {4, 10, 25, 26, 27, 100})
      for (const size_t back : {1, 2, 8})
        EXPECT_EQ(merged.in_windows(word, window, back), expected) << window;
  }
}

TEST(LongWord, MemoryIsABitForEachByte) {
  BpeModel model = small_model({{"a", "a"}, {"aa", "aa"}, {"b", "c"}, {"bc", "a"}, {"c", "b"}});
  model.splits.clear();
  const BpeTokenizer tokenizer(model);
  std::string word;
  const Rng rng(1, "a long word");
  for (size_t i = 0; i < size_t{16} << 20; ++i) word += "aaaabc"[rng.bits(i) % 6];
  size_t tokens = 0, bytes = 0;
  const uint64_t grown = memory_growth([&] {
    tokenizer.encode_in_parts(word, [&](std::span<const int32_t> ids) {
      tokens += ids.size();
      bytes += tokenizer.decode(ids).size();
    });
  });
  EXPECT_EQ(bytes, word.size());
  EXPECT_LT(grown, word.size() / 8 + (uint64_t{8} << 20));
  EXPECT_EQ(tokens, encoded(tokenizer, word).size());
}

}  // namespace
}  // namespace sps
