// The ids of sps against those of tiktoken and of Hugging Face's tokenizers: `make oracles`. The scripts in
// tests/oracles run sps and the other library on the same documents; SPS_ORACLES is the Python that has both.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "base/json.h"
#include "data/documents.h"
#include "program.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

const fs::path kSource = SPS_SOURCE_DIR;

class Oracles : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (std::getenv("SPS_ORACLES") == nullptr) return;
    dir_ = std::make_unique<TestDir>();
    made_ = script({"make_files.py", dir_->path()});
    for (const char* pattern : {"gpt2", "llama3"})
      if (made_.status == 0)
        made_ = run_program(dir_->path(),
                            {"tokenizer", "train", "text.jsonl", "--vocab-size", "8000", "--pattern", pattern,
                             "--out", std::string("ours-") + pattern + ".json"});
  }
  static void TearDownTestSuite() { dir_.reset(); }
  void SetUp() override {
    if (!dir_)
      GTEST_SKIP() << "SPS_ORACLES names no Python with tiktoken and tokenizers; make oracles sets it up";
    ASSERT_EQ(made_.status, 0) << made_.out << made_.err;
  }

  static Outcome script(Arguments arguments) {
    arguments[0] = kSource / "tests/oracles" / arguments[0];
    return Program(dir_->path(), arguments, std::getenv("SPS_ORACLES")).wait();
  }
  static void expect_same_ids(const std::string& peer, const fs::path& tokenizer,
                              const Arguments& documents) {
    const Outcome o = script(Arguments{"compare_ids.py", SPS_BINARY, peer, tokenizer} + documents);
    EXPECT_EQ(o.status, 0) << tokenizer << "\n" << o.out << o.err;
    std::printf("%s, %s", tokenizer.filename().c_str(), o.out.c_str());
    std::fflush(stdout);  // or the next child writes it once more
  }
  static Arguments made(const Arguments& names) {
    Arguments paths;
    for (const std::string& name : names) paths.push_back(*dir_ / name);
    return paths;
  }
  static Arguments small_documents() { return made({"random.jsonl", "newlines.jsonl", "text.jsonl"}); }
  // All texts of the folders ../shared/data/corpus*.
  static Arguments corpus() {
    Arguments paths;
    std::error_code ignored;
    for (const auto& folder : fs::directory_iterator(kSource / "../shared/data", ignored))
      if (folder.path().filename().string().starts_with("corpus")) {
        const DocumentReader reader({folder.path() / "*.jsonl*"});
        for (const InputFile& file : reader.input_files()) paths.push_back(file.path);
      }
    std::sort(paths.begin(), paths.end());
    return paths;
  }
  static fs::path gpt2() { return fs::weakly_canonical(kSource / "../shared/data/tokenizer"); }

  static inline std::unique_ptr<TestDir> dir_;
  static inline Outcome made_;
};

TEST_F(Oracles, Gpt2OnCornerCases) {
  if (!fs::exists(gpt2() / "encoder.json")) GTEST_SKIP() << "there is no " << gpt2() << " with GPT-2's files";
  for (const char* peer : {"tiktoken", "huggingface"}) expect_same_ids(peer, gpt2(), small_documents());
}

TEST_F(Oracles, Gpt2OnTheCorpus) {
  if (corpus().empty() || !fs::exists(gpt2() / "encoder.json"))
    GTEST_SKIP() << "there is no corpus or no GPT-2 under " << kSource / "../shared/data";
  for (const char* peer : {"tiktoken", "huggingface"}) expect_same_ids(peer, gpt2(), corpus());
}

// peer-faults 20: WikiText-2's test file as one text and by its lines.
TEST_F(Oracles, Gpt2OnWikiText) {
  const fs::path packed = kSource / "../shared/data/eval.tar.zst";
  if (!fs::exists(packed) || !fs::exists(gpt2() / "encoder.json"))
    GTEST_SKIP() << "there is no " << packed << " or no GPT-2 beside it";
  const Outcome unpacked =
      Program(dir_->path(), {"--zstd", "-xf", packed, "eval/wikitext-2-raw/wiki.test.raw"}, "/bin/tar")
          .wait();
  ASSERT_EQ(unpacked.status, 0) << unpacked.err;
  const std::string text = read_text(*dir_ / "eval/wikitext-2-raw/wiki.test.raw");
  std::string lines = dump_json(nlohmann::json{{"text", text}}) + "\n";
  for (const std::string& line : lines_of(text))
    lines += dump_json(nlohmann::json{{"text", line + "\n"}}) + "\n";
  dir_->write("wikitext.jsonl", lines);
  for (const char* peer : {"tiktoken", "huggingface"})
    expect_same_ids(peer, gpt2(), made({"wikitext.jsonl"}));
}

TEST_F(Oracles, OurOwnTokenizersOnCornerCases) {
  for (const char* name : {"ours-gpt2.json", "ours-llama3.json"})
    for (const char* peer : {"tiktoken", "huggingface"})
      expect_same_ids(peer, *dir_ / name, small_documents());
}

TEST_F(Oracles, Llama3StyleOnTheCorpus) {
  if (corpus().empty()) GTEST_SKIP() << "there is no corpus under " << kSource / "../shared/data";
  const Outcome trained =
      run_program(dir_->path(), Arguments{"tokenizer", "train", "--pattern", "llama3", "--vocab-size",
                                          "32768", "--max-bytes", "20000000", "--out", "corpus.json"} +
                                    corpus());
  ASSERT_EQ(trained.status, 0) << trained.err;
  for (const char* peer : {"tiktoken", "huggingface"}) expect_same_ids(peer, *dir_ / "corpus.json", corpus());
}

TEST_F(Oracles, OtherFamiliesByHuggingFacesFiles) {
  for (const char* name : {"gpt2.json", "llama3.json", "qwen2.json", "smollm.json", "other.json"})
    expect_same_ids("huggingface", *dir_ / name, small_documents());
}

TEST_F(Oracles, RankFilesThatTiktokenWrote) {
  const Outcome o = script({"write_ranks.py", "ours-gpt2.json", *dir_ / "r50k_base.tiktoken"});
  ASSERT_EQ(o.status, 0) << o.err;
  expect_same_ids("tiktoken", *dir_ / "r50k_base.tiktoken", small_documents());
}

// Our note of the end of text is a post-processor to other readers: it must change nothing there.
TEST_F(Oracles, AnEndOfTextOfAnotherName) {
  const Outcome trained = run_program(dir_->path(), {"tokenizer", "train", "text.jsonl", "--vocab-size",
                                                     "1000", "--eot", "<fin>", "--out", "fin.json"});
  ASSERT_EQ(trained.status, 0) << trained.err;
  EXPECT_PRED2(mentions, read_text(*dir_ / "fin.json"), "TemplateProcessing");
  expect_same_ids("huggingface", *dir_ / "fin.json", small_documents());
}

TEST_F(Oracles, PreparedDataSets) {
  for (const char* name : {"ours-gpt2.json", "ours-llama3.json"}) {
    const std::string out = std::string("data-") + name;
    const Outcome prepared = run_program(
        dir_->path(),
        Arguments{"prepare", "--tokenizer", name, "--val-fraction", "0", "--out", out} + small_documents());
    ASSERT_EQ(prepared.status, 0) << prepared.err;
    const Outcome o = script(Arguments{"compare_data_set.py", out, name} + small_documents());
    EXPECT_EQ(o.status, 0) << name << "\n" << o.out << o.err;
  }
}

TEST_F(Oracles, TrainingFindsTheSameMerges) {
  for (const char* name : {"ours-gpt2.json", "ours-llama3.json"}) {
    const Outcome o = script(Arguments{"compare_training.py", name} + made({"text.jsonl"}));
    EXPECT_EQ(o.status, 0) << name << "\n" << o.out << o.err;
  }
}

}  // namespace
}  // namespace sps
