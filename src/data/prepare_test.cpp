#include <algorithm>
#include <cmath>
#include <map>

#include "base/threads.h"
#include "data/test_prepare.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

// The documents of a file of byte tokens, in order.
std::vector<std::string> documents_of(const fs::path& out, std::string_view split) {
  const TokenFile file = TokenFile::open(out, split);
  file.verify();
  std::vector<std::string> documents;
  std::string text;
  for (int64_t i = 0; i < file.size(); ++i) {
    const int32_t id = file.token(i);
    if (id != 256) {
      text += char(id);
      continue;
    }
    documents.push_back(text);
    text.clear();
  }
  EXPECT_EQ(text, "") << "the last document has no end of text";
  return documents;
}

std::vector<std::string> sorted(std::vector<std::string> texts) {
  std::sort(texts.begin(), texts.end());
  return texts;
}

std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(Prepare, EveryDocumentIsThereOnceAndEndsInEndOfText) {
  const TestDir dir;
  const auto texts = random_texts(3000);
  dir.write("a.jsonl", json_lines(texts));
  const TokenMeta meta = prepare(options_for({dir / "a.jsonl"}, dir / "out/deep", 0.1));
  const auto train = documents_of(dir / "out/deep", "train"), val = documents_of(dir / "out/deep", "val");
  EXPECT_EQ(sorted(joined(train, val)), sorted(texts));
  EXPECT_EQ(meta.train.documents, train.size());
  EXPECT_EQ(meta.val.documents, val.size());
  EXPECT_EQ(meta, *read_token_meta(dir / "out/deep"));
  // A share of 0.1 of 3000: the standard deviation is 16.4, so this fails for one seed in 10^9.
  EXPECT_NEAR(double(val.size()), 300, 6 * 16.5);
  // Shuffled: the order is neither the input's nor sorted.
  EXPECT_FALSE(std::is_sorted(train.begin(), train.end()));
  std::vector<std::string> in_order;
  for (const auto& text : texts)
    if (std::find(train.begin(), train.end(), text) != train.end()) in_order.push_back(text);
  EXPECT_NE(train, in_order);
  // 3 files and nothing else.
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / "out/deep"), fs::directory_iterator()), 3);
}

// peer-faults 13: the same bytes for any number of threads, and for any order and grouping of the inputs.
TEST(Prepare, BytesDependOnTheTextsAlone) {
  const TestDir dir;
  auto texts = random_texts(2500);
  texts.push_back(texts[3]);
  texts.push_back(texts[3]);
  dir.write("one.jsonl", json_lines(texts));
  std::reverse(texts.begin(), texts.end());
  dir.write("two/b.jsonl", json_lines({texts.begin(), texts.begin() + 700}));
  dir.write("two/a.jsonl", json_lines({texts.begin() + 700, texts.end() - 1}));
  dir.write("two/c.txt", texts.back());

  const int threads = thread_count();
  std::vector<TokenMeta> metas;
  for (const int n : {1, 8}) {
    set_thread_count(n);
    for (const char* input : {"one.jsonl", "two"}) {
      const fs::path out = dir / ("out" + std::to_string(metas.size()));
      metas.push_back(prepare(options_for({dir / input}, out)));
      EXPECT_EQ(read_text(out / "train.bin"), read_text(dir / "out0/train.bin"));
      EXPECT_EQ(read_text(out / "val.bin"), read_text(dir / "out0/val.bin"));
      EXPECT_EQ(metas.back().train, metas[0].train);
      EXPECT_EQ(metas.back().val, metas[0].val);
    }
  }
  set_thread_count(threads);
}

TEST(Prepare, GoldenHashes) {
  const TestDir dir;
  dir.write("a.jsonl", json_lines(random_texts(500)));
  const TokenMeta meta = prepare(options_for({dir / "a.jsonl"}, dir / "out", 0.05));
  EXPECT_EQ(meta.train.hash, "735daf40332ff521");
  EXPECT_EQ(meta.val.hash, "1e6cba0295f3e64d");
}

TEST(Prepare, AnotherSeedGivesAnotherSplitAndOrder) {
  const TestDir dir;
  dir.write("a.jsonl", json_lines(random_texts(500)));
  PrepareOptions options = options_for({dir / "a.jsonl"}, dir / "out1", 0.2);
  prepare(options);
  options.seed = 43;
  options.out = dir / "out2";
  prepare(options);
  EXPECT_NE(sorted(documents_of(dir / "out1", "val")), sorted(documents_of(dir / "out2", "val")));
}

TEST(Prepare, TheSplitOfADocumentDoesNotDependOnTheOthers) {
  const TestDir dir;
  const auto texts = random_texts(2000);
  dir.write("all.jsonl", json_lines(texts));
  dir.write("some.jsonl", json_lines({texts.begin(), texts.begin() + 1000}));
  prepare(options_for({dir / "all.jsonl"}, dir / "all", 0.1));
  prepare(options_for({dir / "some.jsonl"}, dir / "some", 0.1));
  const auto all = sorted(documents_of(dir / "all", "val")), some = sorted(documents_of(dir / "some", "val"));
  EXPECT_GT(some.size(), 0u);
  EXPECT_TRUE(std::includes(all.begin(), all.end(), some.begin(), some.end()));
}

TEST(Prepare, CopiesOfATextAreOnOneSideAndApart) {
  const TestDir dir;
  std::vector<std::string> texts;
  for (const auto& text : random_texts(100)) texts.insert(texts.end(), 20, text);
  dir.write("a.jsonl", json_lines(texts));
  prepare(options_for({dir / "a.jsonl"}, dir / "out", 0.3));
  std::map<std::string, int> sides;
  for (const auto& text : documents_of(dir / "out", "train")) sides[text] |= 1;
  for (const auto& text : documents_of(dir / "out", "val")) sides[text] |= 2;
  for (const auto& [text, side] : sides) EXPECT_NE(side, 3) << text;
  const auto train = documents_of(dir / "out", "train");
  int neighbours = 0;
  for (size_t i = 1; i < train.size(); ++i) neighbours += train[i] == train[i - 1];
  EXPECT_LT(neighbours, 60);  // 20 are expected of a random order, 1330 if the copies stood together
}

TEST(Prepare, NeitherSideIsEmptyFromTwoDocumentsOn) {
  const TestDir dir;
  int n = 0;
  const auto sizes = [&](const std::vector<std::string>& texts, double val_fraction) {
    const fs::path in = dir.write(std::to_string(n) + ".jsonl", json_lines(texts));
    const TokenMeta meta = prepare(options_for({in}, dir / ("out" + std::to_string(n++)), val_fraction));
    return std::pair(meta.train.documents, meta.val.documents);
  };
  using Sizes = std::pair<uint64_t, uint64_t>;
  EXPECT_EQ(sizes({"a", "b", "c"}, 1e-9), (Sizes{2, 1}));
  EXPECT_EQ(sizes({"a", "b", "c"}, 1 - 1e-9), (Sizes{1, 2}));
  EXPECT_EQ(sizes({"a", "a", "a"}, 1e-9), (Sizes{2, 1}));  // copies have to part here
  EXPECT_EQ(sizes({"a", "a", "a"}, 1 - 1e-9), (Sizes{2, 1}));
  const Sizes copies = sizes({"a", "a", "b", "b"}, 1e-9);
  EXPECT_EQ(copies, (Sizes{2, 2}));
  EXPECT_EQ(sizes({"a"}, 1 - 1e-9), (Sizes{1, 0}));
  EXPECT_EQ(sizes({"a", "b"}, 0), (Sizes{2, 0}));  // asked for
}

TEST(Prepare, NoTextIsOneSentenceAndLeavesNoFolder) {
  const TestDir dir;
  dir.write("in/a.txt", "");
  dir.write("in/b.jsonl", "\n{\"text\":\"\"}\n");
  const std::string sentence = error_of([&] { prepare(options_for({dir / "in"}, dir / "out")); });
  EXPECT_PRED2(mentions, sentence, "no text");
  EXPECT_PRED2(mentions, sentence, "2 files, 2 empty documents");
  EXPECT_FALSE(fs::exists(dir / "out"));
}

TEST(Prepare, AnErrorInTheMiddleLeavesTheOldDataSet) {
  const TestDir dir;
  dir.write("good.jsonl", json_lines(random_texts(50)));
  dir.write("bad.jsonl", json_lines(random_texts(60)) + "oops\n");
  prepare(options_for({dir / "good.jsonl"}, dir / "out"));
  const std::string train = read_text(dir / "out/train.bin"), meta = read_text(dir / "out/meta.json");
  PrepareOptions bad = options_for({dir / "bad.jsonl"}, dir / "out");
  bad.force = true;
  EXPECT_PRED2(mentions, error_of([&] { prepare(bad); }), "bad.jsonl:61");
  EXPECT_EQ(read_text(dir / "out/train.bin"), train);
  EXPECT_EQ(read_text(dir / "out/meta.json"), meta);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / "out"), fs::directory_iterator()), 3);
  bad.out = dir / "new";
  EXPECT_PRED2(mentions, error_of([&] { prepare(bad); }), "bad.jsonl:61");
  EXPECT_FALSE(fs::exists(dir / "new"));
}

TEST(Prepare, AFailureToReplaceNeverLeavesAMixture) {
  const TestDir dir;
  dir.write("a.jsonl", json_lines(random_texts(50)));
  PrepareOptions options = options_for({dir / "a.jsonl"}, dir / "out");
  options.force = true;
  // The first file cannot be replaced: everything stays.
  dir.write("out/train.bin/x", "");
  dir.write("out/meta.json", "old");
  EXPECT_PRED2(mentions, error_of([&] { prepare(options); }), "train.bin");
  EXPECT_EQ(read_text(dir / "out/meta.json"), "old");
  EXPECT_FALSE(fs::exists(dir / "out/val.bin"));
  // The second cannot: readers refuse the folder.
  fs::remove_all(dir / "out");
  dir.write("out/val.bin/x", "");
  EXPECT_PRED2(mentions, error_of([&] { prepare(options); }), "val.bin");
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir / "out"); }), "unfinished");
  // And the next run makes it whole, without --force.
  fs::remove_all(dir / "out/val.bin");
  options.force = false;
  prepare(options);
  TokenFile::open(dir / "out").verify();
}

// pitfalls A8: data files that exist already are not overwritten in passing.
TEST(Prepare, AnotherDataSetIsOnlyReplacedByForce) {
  const TestDir dir;
  dir.write("a.jsonl", json_lines(random_texts(50)));
  dir.write("b.jsonl", json_lines(random_texts(51)));
  const TokenMeta first = prepare(options_for({dir / "a.jsonl"}, dir / "out"));
  EXPECT_EQ(prepare(options_for({dir / "a.jsonl"}, dir / "out")), first);  // the same again is fine

  PrepareOptions other = options_for({dir / "b.jsonl"}, dir / "out");
  EXPECT_PRED2(mentions, error_of([&] { prepare(other); }), "--force");
  PrepareOptions seed = options_for({dir / "a.jsonl"}, dir / "out");
  seed.seed = 1;
  EXPECT_PRED2(mentions, error_of([&] { prepare(seed); }), "the seed 42, not 1");
  EXPECT_PRED2(mentions, error_of([&] { prepare(options_for({dir / "a.jsonl"}, dir / "out", 0.5)); }),
               "val_fraction 0.01, not 0.5");
  EXPECT_EQ(*read_token_meta(dir / "out"), first);
  TokenFile::open(dir / "out").verify();

  other.force = true;
  EXPECT_NE(prepare(other), first);
  EXPECT_EQ(read_token_meta(dir / "out")->train.documents + read_token_meta(dir / "out")->val.documents, 51u);

  dir.write("foreign/val.bin", "abcd");
  EXPECT_PRED2(mentions, error_of([&] { prepare(options_for({dir / "a.jsonl"}, dir / "foreign")); }),
               "--force");
  EXPECT_EQ(read_text(dir / "foreign/val.bin"), "abcd");
}

TEST(Prepare, WrongOptionsAreUsageErrors) {
  const TestDir dir;
  const std::string in = dir.write("a.txt", "a");
  for (const double fraction : {-0.1, 1.0, 7.0, std::nan("")})
    EXPECT_PRED2(mentions, error_of([&] { prepare(options_for({in}, dir / "out", fraction)); }),
                 "val_fraction");
  PrepareOptions options = options_for({in}, dir / "out");
  options.tokenizer = "gpt5";
  EXPECT_PRED2(mentions, error_of([&] { prepare(options); }), "gpt5");
  EXPECT_PRED2(mentions, error_of([&] { prepare(options_for({in}, dir / "a.txt")); }),
               (dir / "a.txt").string());
  EXPECT_FALSE(fs::exists(dir / "out"));
}

TEST(Prepare, ReportsProgressUpToTheEnd) {
  const TestDir dir;
  dir.write("a.jsonl", json_lines(random_texts(3000)));
  std::vector<PrepareProgress> calls;
  prepare(options_for({dir / "a.jsonl"}, dir / "out"), [&](const PrepareProgress& p) { calls.push_back(p); });
  std::map<std::string_view, PrepareProgress> last;
  for (const PrepareProgress& call : calls) {
    EXPECT_GE(call.done, last[call.pass].done);
    last[call.pass] = call;
  }
  ASSERT_EQ(last.size(), 3u);
  for (const auto& [pass, state] : last) {
    EXPECT_EQ(state.done, state.total) << pass;
    EXPECT_EQ(state.documents, 3000u) << pass;
  }
  EXPECT_EQ(last["tokenising"].total, fs::file_size(dir / "a.jsonl"));
}

// Sorting in runs on the disk gives what sorting in memory gives.
TEST(Prepare, AnyMemoryForSortingGivesTheSameBytes) {
  const TestDir dir;
  auto texts = random_texts(500);
  dir.write("a.jsonl", json_lines(texts));
  PrepareOptions options = options_for({dir / "a.jsonl"}, dir / "out", 0.05);
  options.sort_bytes = 1000;
  const TokenMeta meta = prepare(options);
  EXPECT_EQ(meta.train.hash, "735daf40332ff521");  // of GoldenHashes
  EXPECT_EQ(meta.val.hash, "1e6cba0295f3e64d");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / "out"), fs::directory_iterator()), 3);
}

TEST(Prepare, SplittingByIdKeepsADocumentsSideWhenItsTextChanges) {
  const TestDir dir;
  const auto texts = random_texts(600);
  const auto lines = [&](const std::string& more, bool reversed) {
    std::vector<std::string> all;
    for (size_t i = 0; i < texts.size(); ++i)
      all.push_back(fmt::format("{{\"key\":\"d{}\",\"text\":\"{:03} {}{}\"}}\n", i, i, texts[i], more));
    if (reversed) std::reverse(all.begin(), all.end());
    std::string joined;
    for (const auto& line : all) joined += line;
    return joined;
  };
  const auto run = [&](const std::string& name, const std::string& more, bool reversed) {
    PrepareOptions options =
        options_for({dir.write(name + ".jsonl", lines(more, reversed))}, dir / name, 0.2);
    options.split_by = SplitBy::id;
    options.id_field = "key";
    return prepare(options);
  };
  const TokenMeta first = run("a", "", false), edited = run("b", " edited", false),
                  reversed = run("c", "", true);
  EXPECT_EQ(first.split_by, SplitBy::id);
  EXPECT_EQ(first.train, reversed.train);
  EXPECT_EQ(first.val, reversed.val);
  const auto numbers = [&](const std::string& name) {
    std::vector<std::string> all;
    for (const auto& text : documents_of(dir / name, "val")) all.push_back(text.substr(0, 3));
    return sorted(all);
  };
  EXPECT_EQ(numbers("a"), numbers("b"));
  EXPECT_GT(numbers("a").size(), 60u);
  // By text, other texts are chosen.
  prepare(options_for({dir / "b.jsonl"}, dir / "d", 0.2));
  EXPECT_NE(numbers("d"), numbers("b"));
}

TEST(Prepare, FormatsForOtherPrograms) {
  const TestDir dir;
  dir.write("a.jsonl", json_lines(random_texts(300)));
  prepare(options_for({dir / "a.jsonl"}, dir / "sps"));
  for (const TokenFormat format : {TokenFormat::raw, TokenFormat::llmc}) {
    const fs::path out = dir / token_format_name(format);
    PrepareOptions options = options_for({dir / "a.jsonl"}, out);
    options.format = format;
    const TokenMeta meta = prepare(options);
    EXPECT_EQ(meta.format, format);
    for (const char* split : {"train", "val"}) {
      const std::string name = fmt::format("{}.bin", split), bare = read_text(dir / "sps" / name),
                        file = read_text(out / name);
      EXPECT_EQ(file.size(), bare.size() + (format == TokenFormat::llmc ? 1024 : 0));
      EXPECT_TRUE(file.ends_with(bare)) << name;
      EXPECT_EQ(documents_of(out, split), documents_of(dir / "sps", split));
      // A copy without its description is understood as well.
      fs::create_directory(out / "copy");
      fs::copy_file(out / name, out / "copy" / name, fs::copy_options::overwrite_existing);
      EXPECT_EQ(documents_of(out / "copy", split), documents_of(dir / "sps", split));
    }
    PrepareOptions other = options;
    other.format = TokenFormat::sps;
    EXPECT_PRED2(mentions, error_of([&] { prepare(other); }),
                 fmt::format("the format {}, not sps", token_format_name(format)));
  }
}

TEST(Prepare, DescribesItsInputs) {
  const TestDir dir;
  dir.write("in/a.txt", "abc");
  dir.write("in/b.jsonl", "{\"text\":\"\"}\n{\"text\":\"de\"}\n{\"text\":\"\"}\n");
  const TokenMeta meta = prepare(options_for({dir / "in"}, dir / "out", 0.5));
  EXPECT_EQ(meta.empty_documents, 2u);
  EXPECT_EQ(meta.train.text_bytes + meta.val.text_bytes, 5u);
  EXPECT_EQ(meta.files,
            (std::vector<InputMeta>{{(dir / "in/a.txt").string(), 3},
                                    {(dir / "in/b.jsonl").string(), fs::file_size(dir / "in/b.jsonl")}}));
}

}  // namespace
}  // namespace sps
