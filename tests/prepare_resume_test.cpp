// Preparation survives whatever stops it: a run that was killed, interrupted or short of disk ends with the
// bytes of one that was left alone.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "base/progress.h"
#include "base/rng.h"
#include "base/test_files.h"
#include "base/test_limits.h"
#include "data/test_corpus.h"
#include "data/test_tokenizer.h"
#include "data/token_file.h"
#include "program.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using Content = std::map<std::string, std::string>;

class PrepareResume : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = std::make_unique<TestDir>();
    for (int i = 0; i < 3; ++i)
      dir_->write(fmt::format("in/{}.jsonl", i), test_documents(9000, uint64_t(i) + 1, 40));
    dir_->write("in/deep/d.txt", "A document of its own.");
    write_test_bpe(*dir_, "bpe.json");
  }
  static void TearDownTestSuite() { dir_.reset(); }

  // Notes where it is after every batch.
  static Arguments command(const std::string& out, const Arguments& more = {}) {
    return Arguments{"prepare", "in", "--out", out, "--tokenizer", "bpe.json", "--save-every", "0"} + more;
  }
  static Content finished(const std::string& out, const Arguments& more = {}) {
    const Outcome o = run_program(dir_->path(), command(out, more));
    EXPECT_EQ(o.status, 0) << o.err;
    Content content = folder_content(*dir_ / out);
    EXPECT_EQ(content.size(), 4u);
    return content;
  }
  static const Content& whole() {
    static const Content content = finished("whole", {"--threads", "1"});
    return content;
  }
  static bool noted(const std::string& out) { return fs::exists(*dir_ / out / ".prepare/journal.json"); }

  static inline std::unique_ptr<TestDir> dir_;
};

TEST_F(PrepareResume, ThreadsDoNotMatter) {
  EXPECT_TRUE(finished("two", {"--threads", "2"}) == whole());
  EXPECT_TRUE(finished("five", {"--threads", "5"}) == whole());
}

TEST_F(PrepareResume, KilledAtAnyMoment) {
  const double began = monotonic_seconds();
  whole();
  const double whole_run = monotonic_seconds() - began;
  const Rng rng(uint64_t(::getpid()), "moments");
  int killed = 0;
  for (int round = 0; round < 4; ++round) {
    const std::string out = "killed" + std::to_string(round);
    for (int kill = 0; kill < 3; ++kill) {
      // Anywhere between nothing and the end, also in the second pass and while the files are put in place.
      const auto moment = std::chrono::duration<double>(
          whole_run * 1.1 * double(rng.below(uint64_t(round * 3 + kill), 1000)) / 1000);
      Program program(dir_->path(), command(out));
      std::this_thread::sleep_for(moment);
      program.signal(SIGKILL);
      killed += program.wait().signal == SIGKILL;
    }
    EXPECT_TRUE(finished(out) == whole()) << out;
  }
  EXPECT_GE(killed, 3);
}

TEST_F(PrepareResume, SignalsSaveAndTheSameCommandContinues) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string out = "signal" + std::to_string(signal);
    Program program(dir_->path(), command(out));
    ASSERT_TRUE(program.wait_until([&] { return noted(out); }));
    program.signal(signal);
    const Outcome o = program.wait();
    EXPECT_EQ(o.status, 128 + signal) << o.err;
    EXPECT_PRED2(mentions, o.out, "the same command continues from there");
    EXPECT_EQ(lines_of(o.out).size(), 1u);
    EXPECT_TRUE(noted(out));
    EXPECT_FALSE(fs::exists(*dir_ / out / "train.bin"));
    const Outcome rest = run_program(dir_->path(), command(out));
    EXPECT_EQ(rest.status, 0) << rest.err;
    EXPECT_PRED2(mentions, rest.err, "that an earlier run tokenised");
    EXPECT_TRUE(folder_content(*dir_ / out) == whole());
  }
}

TEST_F(PrepareResume, StandardInputCannotBeContinued) {
  int pipe[2];
  ASSERT_EQ(::pipe2(pipe, O_CLOEXEC), 0);
  const int before = ::dup(STDIN_FILENO);
  ::dup2(pipe[0], STDIN_FILENO);
  Program program(dir_->path(), {"prepare", "-", "--out", "piped", "--save-every", "0"});
  ::dup2(before, STDIN_FILENO);
  ::close(before);
  ::close(pipe[0]);
  const std::string line = "{\"text\": \"a\"}\n";
  EXPECT_EQ(::write(pipe[1], line.data(), line.size()), ssize_t(line.size()));
  EXPECT_TRUE(program.wait_until([&] { return fs::exists(*dir_ / "piped/.prepare/records"); }));
  program.signal(SIGTERM);
  ::close(pipe[1]);  // the read that it waits in ends
  const Outcome o = program.wait();
  EXPECT_EQ(o.status, 128 + SIGTERM) << o.err;
  EXPECT_PRED2(mentions, o.out, "standard input");
  EXPECT_FALSE(fs::exists(*dir_ / "piped")) << "nothing to go on from is kept";
}

TEST_F(PrepareResume, AFullDiskIsOneSentence) {
  Outcome o;
  {
    const FileSizeLimit limit(100'000);
    o = run_program(dir_->path(), command("full"));
  }
  EXPECT_EQ(o.status, 1);
  EXPECT_EQ(o.signal, 0);
  const auto lines = lines_of(o.err);
  ASSERT_FALSE(lines.empty());
  EXPECT_TRUE(lines.back().starts_with("sps: cannot write full/")) << o.err;
  for (const char* name : {"train.bin", "val.bin", "meta.json", "tokenizer.json"})
    EXPECT_FALSE(fs::exists(*dir_ / "full" / name)) << name;
  EXPECT_TRUE(finished("full") == whole());
}

// Memory follows the largest document, not the input, and a document of one word takes no more than others.
TEST_F(PrepareResume, ADocumentOf100MegabytesTakesLessThan1GiB) {
  const size_t size = 100'000'000;
  std::string lines, word;
  while (lines.size() < size) lines += "A line of a long document.\n";
  word.reserve(size);
  while (word.size() < size) word += "averylongwordwithoutanyspace";
  const Arguments bytes, bpe{"--tokenizer", "bpe.json"};
  const std::pair<const std::string*, Arguments> cases[] = {{&lines, bytes}, {&word, bpe}};
  for (const auto& [text, tokenizer] : cases) {
    dir_->write("large/a.txt", *text);
    dir_->write("large/b.txt", "short");
    const Outcome o = run_program(
        dir_->path(), Arguments{"prepare", "large", "--out", "one", "--threads", "2"} + tokenizer);
    EXPECT_EQ(o.status, 0) << o.err;
    rusage usage{};
    getrusage(RUSAGE_CHILDREN, &usage);
    EXPECT_LT(usage.ru_maxrss, 512 * 1024) << "KiB";
    const TokenMeta meta = *read_token_meta(*dir_ / "one");
    EXPECT_EQ(meta.train.text_bytes + meta.val.text_bytes, text->size() + 5);
    const uint64_t tokens = meta.train.tokens + meta.val.tokens;
    // Every byte is a token, or some of them together are one.
    EXPECT_EQ(tokens == text->size() + 5 + 2, tokenizer.empty());
    EXPECT_EQ(fs::file_size(*dir_ / "one/train.bin") + fs::file_size(*dir_ / "one/val.bin"), 2 * tokens);
    fs::remove_all(*dir_ / "large");
    fs::remove_all(*dir_ / "one");
  }
}

}  // namespace
}  // namespace sps
