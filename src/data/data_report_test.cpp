#include "data/data_report.h"

#include <functional>

#include "data/test_tokenizer.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<int32_t>;

constexpr int32_t E = 256;

TokenFile file_of(const TestDir& dir, const Ids& ids) {
  TokenWriter writer(dir / "x.bin", TokenType::u16);
  writer.append(ids);
  writer.commit();
  return TokenFile::open(dir / "x.bin");
}

TEST(TokenStatistics, CountsDocumentsAndTokens) {
  const TestDir dir;
  // Lengths 1, 3, 3, 4 and an unfinished 2.
  const TokenStatistics s = token_statistics(file_of(dir, {E, 5, 6, E, 7, 7, E, 9, 7, 7, E, 5, 9}), E);
  EXPECT_EQ(s.tokens, 13u);
  EXPECT_EQ(s.documents, 4u);
  EXPECT_EQ(s.unfinished_tokens, 2u);
  EXPECT_EQ(s.lengths, (std::map<uint64_t, uint64_t>{{1, 1}, {3, 2}, {4, 1}}));
  EXPECT_DOUBLE_EQ(s.mean_length(), 11.0 / 4);
  EXPECT_EQ(s.length_quantile(0.25), 1u);
  EXPECT_EQ(s.length_quantile(0.5), 3u);
  EXPECT_EQ(s.length_quantile(0.75), 3u);
  EXPECT_EQ(s.length_quantile(0.76), 4u);
  EXPECT_EQ(s.length_quantile(1), 4u);
  EXPECT_EQ(s.length_histogram(), (std::vector<uint64_t>{1, 2, 1}));
  EXPECT_EQ(s.counts, (std::vector<TokenCount>{{7, 4}, {E, 4}, {5, 2}, {9, 2}, {6, 1}}));
}

TEST(TokenStatistics, EmptyFilesAndLargeIds) {
  const TestDir dir;
  const TokenStatistics none = token_statistics(file_of(dir, {}), E);
  EXPECT_EQ(none.documents, 0u);
  EXPECT_EQ(none.mean_length(), 0);
  EXPECT_EQ(none.length_quantile(0.5), 0u);
  EXPECT_TRUE(none.length_histogram().empty());
  // Ids up to the largest there are take no memory that grows with them.
  TokenWriter writer(dir / "y.bin", TokenType::u32, 3);
  writer.append(Ids{INT32_MAX - 1, 3, INT32_MAX - 1});
  writer.commit();
  EXPECT_EQ(token_statistics(TokenFile::open(dir / "y.bin"), E).counts,
            (std::vector<TokenCount>{{INT32_MAX - 1, 2}, {3, 1}}));
}

TEST(TokenStatistics, DocumentsAcrossTheBordersOfReading) {
  const TestDir dir;
  Ids ids(200'000, 1);
  for (const size_t end : {65'535u, 65'536u, 131'080u, 199'999u}) ids[end] = E;
  const TokenStatistics s = token_statistics(file_of(dir, ids), E);
  EXPECT_EQ(s.lengths, (std::map<uint64_t, uint64_t>{{1, 1}, {65'536, 1}, {65'544, 1}, {68'919, 1}}));
  EXPECT_EQ(s.unfinished_tokens, 0u);
}

// Each damage to a sound data set is found and named.
TEST(CheckDataSet, NamesTheFirstFault) {
  for (const char* tokenizer : {"bytes", "bpe"}) {
    const TestDir dir;
    PrepareOptions options;
    options.inputs = {dir.write("in.jsonl", test_documents(100, 1))};
    options.tokenizer = tokenizer == std::string("bytes") ? "bytes" : write_test_bpe(dir, "t.json").string();
    options.out = dir / "good";
    options.val_fraction = 0.2;
    const TokenMeta meta = prepare(options);
    check_data_set(dir / "good");

    const auto fault = [&](const std::function<void(const fs::path&, TokenMeta&)>& damage) {
      fs::remove_all(dir / "bad");
      fs::copy(dir / "good", dir / "bad");
      TokenMeta changed = meta;
      damage(dir / "bad", changed);
      if (changed != meta) write_token_meta(dir / "bad", changed);
      return error_of([&] { check_data_set(dir / "bad"); });
    };
    const auto rewrite = [&](const fs::path& out, const Ids& ids, SplitMeta& split) {
      TokenWriter writer(out / "train.bin", meta.type);
      writer.append(ids);
      split.hash = writer.hash();
      split.tokens = ids.size();
      writer.commit();
    };
    const TokenFile train = TokenFile::open(dir / "good", "train");
    Ids ids(size_t(train.size()));
    train.read(0, train.size(), ids.data());

    EXPECT_PRED2(mentions, fault([](const fs::path& d, TokenMeta&) { fs::remove(d / "meta.json"); }),
                 "no meta.json");
    EXPECT_PRED2(mentions, fault([](const fs::path& d, TokenMeta&) { fs::remove(d / "val.bin"); }),
                 "val.bin");
    EXPECT_PRED2(mentions, fault([](const fs::path& d, TokenMeta&) {
                   fs::resize_file(d / "val.bin", fs::file_size(d / "val.bin") - 2);
                 }),
                 "val.bin: has ");
    EXPECT_PRED2(mentions, fault([](const fs::path& d, TokenMeta&) {
                   std::fstream(d / "train.bin", std::ios::in | std::ios::out | std::ios::binary) << '\1';
                 }),
                 "hash");
    EXPECT_PRED2(mentions, fault([&](const fs::path& d, TokenMeta& m) {
                   Ids changed = ids;
                   changed[1] = meta.vocab_size;
                   rewrite(d, changed, m.train);
                 }),
                 fmt::format("token 1 is {}", meta.vocab_size));
    EXPECT_PRED2(mentions, fault([&](const fs::path& d, TokenMeta& m) {
                   Ids changed = ids;
                   changed.pop_back();
                   rewrite(d, changed, m.train);
                 }),
                 "should be end of text");
    EXPECT_PRED2(mentions, fault([](const fs::path&, TokenMeta& m) { ++m.train.documents; }),
                 "documents, but");
    EXPECT_PRED2(mentions, fault([](const fs::path&, TokenMeta& m) { m.fingerprint = "0"; }),
                 "fingerprint 0");
    EXPECT_PRED2(mentions, fault([](const fs::path&, TokenMeta& m) { ++m.vocab_size; }), "its tokenizer has");
    EXPECT_PRED2(mentions, fault([](const fs::path&, TokenMeta& m) { m.vocab_size = 65537; }),
                 "vocabulary of 65537");
    if (meta.tokenizer == "bytes") {
      EXPECT_PRED2(mentions, fault([](const fs::path&, TokenMeta& m) { ++m.val.text_bytes; }),
                   "bytes of text");
    }
  }
}

}  // namespace
}  // namespace sps
