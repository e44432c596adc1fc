#include "data/data_tokenizer.h"

#include "base/json.h"
#include "base/test_files.h"
#include "data/data_report.h"
#include "data/test_tokenizer.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

PrepareOptions options_for(const TestDir& dir, const std::string& tokenizer, const fs::path& out) {
  PrepareOptions options;
  options.inputs = {dir.write("in.jsonl", test_documents(100, 1))};
  options.tokenizer = tokenizer;
  options.out = out;
  options.val_fraction = 0.2;
  return options;
}

TEST(DataTokenizer, ADataSetBringsItsOwn) {
  const TestDir dir;
  const fs::path file = write_test_bpe(dir, "bpe/tokenizer.json");
  const BpeTokenizer bpe = make_test_bpe();
  const TokenMeta meta = prepare(options_for(dir, file, dir / "out"));
  fs::remove_all(dir / "bpe");
  EXPECT_EQ(meta.tokenizer, bpe.name());
  EXPECT_EQ(meta.fingerprint, bpe.fingerprint());
  EXPECT_EQ(meta.vocab_size, bpe.vocab_size());
  EXPECT_EQ(meta.eot, bpe.eot());
  EXPECT_EQ(read_text(dir / "out/tokenizer.json"), bpe.to_json());

  const auto own = data_set_tokenizer(dir / "out", meta);
  ASSERT_TRUE(own);
  EXPECT_EQ(own->fingerprint(), bpe.fingerprint());
  const TokenFile train = TokenFile::open(dir / "out", "train");
  std::vector<int32_t> ids(size_t(train.size()));
  train.read(0, train.size(), ids.data());
  EXPECT_EQ(own->decode(ids).size(), meta.train.text_bytes);
  EXPECT_LT(meta.train.tokens, meta.train.text_bytes * 3 / 4);

  // It may be given again from where it is now.
  EXPECT_EQ(prepare(options_for(dir, (dir / "out/tokenizer.json").string(), dir / "out")), meta);
}

// The choice of the end of text is in the copy, though no name gives it away and no file stands beside it.
TEST(DataTokenizer, TheEndOfTextGoesWithTheDataSet) {
  const TestDir dir;
  nlohmann::json file = parse_json(make_test_bpe().to_json(), "bpe");
  file["added_tokens"].push_back({{"id", 300}, {"content", "<fin>"}, {"special", true}});
  PrepareOptions options = options_for(dir, dir.write("bpe/tokenizer.json", file.dump()), dir / "out");
  options.tokenizer_options.eot = "<fin>";
  const TokenMeta meta = prepare(options);
  EXPECT_EQ(meta.eot, 300);
  fs::remove_all(dir / "bpe");
  const TokenFile train = TokenFile::open(dir / "out", "train");
  EXPECT_EQ(train.token(train.size() - 1), 300);
  EXPECT_EQ(data_set_tokenizer(dir / "out", meta)->eot(), 300);
  check_data_set(dir / "out");
}

TEST(DataTokenizer, BytesNeedNoFile) {
  const TestDir dir;
  const TokenMeta meta = prepare(options_for(dir, "bytes", dir / "out"));
  EXPECT_FALSE(fs::exists(dir / "out/tokenizer.json"));
  EXPECT_EQ(data_set_tokenizer(dir / "out", meta)->name(), "bytes");
}

TEST(DataTokenizer, AMissingFileIsNoTokenizerAndAnotherOneAnError) {
  const TestDir dir;
  const TokenMeta meta = prepare(options_for(dir, write_test_bpe(dir, "t.json"), dir / "out"));
  fs::remove(dir / "out/tokenizer.json");
  EXPECT_FALSE(data_set_tokenizer(dir / "out", meta));
  write_test_bpe(dir, "out/tokenizer.json", 290);
  const std::string sentence = error_of([&] { data_set_tokenizer(dir / "out", meta); });
  EXPECT_PRED2(mentions, sentence, meta.fingerprint);
  EXPECT_PRED2(mentions, sentence, (dir / "out/tokenizer.json").string());
  TokenMeta other = meta;
  other.tokenizer = "bytes";
  EXPECT_PRED2(mentions, error_of([&] { data_set_tokenizer(dir / "out", other); }), "0278a6e2d5f13c80");
}

// pitfalls A8, for the tokenizer.
TEST(DataTokenizer, AnotherFileOfThatNameIsOnlyReplacedByForce) {
  const TestDir dir;
  const fs::path file = write_test_bpe(dir, "t.json");
  dir.write("out/tokenizer.json", "mine");
  PrepareOptions options = options_for(dir, file, dir / "out");
  EXPECT_PRED2(mentions, error_of([&] { prepare(options); }), (dir / "out/tokenizer.json").string());
  EXPECT_EQ(folder_content(dir / "out").size(), 1u);
  // Bytes do not need the place.
  options.tokenizer = "bytes";
  options.out = dir / "bytes";
  dir.write("bytes/tokenizer.json", "mine");
  prepare(options);
  EXPECT_EQ(read_text(dir / "bytes/tokenizer.json"), "mine");

  options = options_for(dir, file, dir / "out");
  options.force = true;
  prepare(options);
  EXPECT_EQ(read_text(dir / "out/tokenizer.json"), read_text(file));
  // The tokenizer of a data set goes with it.
  options.tokenizer = "bytes";
  prepare(options);
  EXPECT_FALSE(fs::exists(dir / "out/tokenizer.json"));
}

}  // namespace
}  // namespace sps
