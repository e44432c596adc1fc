// Preparations that are stopped, fail or are disturbed; killed ones are in tests/prepare_resume_test.cpp.
#include <functional>
#include <optional>
#include <sstream>
#include <utility>

#include "base/progress.h"
#include "base/test_files.h"
#include "base/test_limits.h"
#include "data/test_prepare.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

// Several batches of documents, and what became of them without any interruption.
class Interrupted : public testing::Test {
 protected:
  void SetUp() override {
    auto texts = random_texts(5000);
    texts[7] += std::string(300'000, 'x');
    dir_.write("in/a.jsonl", json_lines({texts.begin(), texts.begin() + 3000}));
    dir_.write("in/b.jsonl", json_lines({texts.begin() + 3000, texts.end()}));
    dir_.write("in/c.txt", "plain");
    prepare(options("whole"));
    whole_ = content("whole");
    ASSERT_EQ(whole_.size(), 3u);
  }
  PrepareOptions options(const std::string& out) const {
    PrepareOptions o = options_for({dir_ / "in"}, dir_ / out, 0.1);
    o.save_seconds = 0;
    return o;
  }
  std::map<std::string, std::string> content(const std::string& out) const {
    return folder_content(dir_ / out);
  }
  // Runs until the n-th report, as if a signal came there; whether it was stopped.
  static bool stopped_at(const PrepareOptions& o, int n) {
    volatile std::sig_atomic_t stop = 0;
    int reports = 0;
    return !prepare_until(o, &stop, [&](const PrepareProgress&) { stop = ++reports >= n; });
  }

  TestDir dir_;
  std::map<std::string, std::string> whole_;
};

TEST_F(Interrupted, GoesOnToTheSameBytesFromAnyMoment) {
  int moments = 0;
  for (int n = 1;; ++n, ++moments) {
    const PrepareOptions o = options("out" + std::to_string(n));
    if (!stopped_at(o, n)) break;
    EXPECT_FALSE(fs::exists(o.out / "train.bin"));
    EXPECT_TRUE(fs::exists(o.out / ".prepare/journal.json"));
    std::optional<PrepareProgress> first;
    prepare(o, [&](const PrepareProgress& p) {
      if (!first) first = p;
    });
    EXPECT_TRUE(first->pass == "sorting" || first->documents > 0) << "moment " << n << " began again";
    EXPECT_TRUE(content(o.out.filename()) == whole_) << "moment " << n;
  }
  EXPECT_GE(moments, 8);  // 5 batches, sorting, writing
}

TEST_F(Interrupted, ManyTimes) {
  const PrepareOptions o = options("out");
  int stops = 0;
  while (stops < 30 && stopped_at(o, 3)) ++stops;
  EXPECT_GE(stops, 3);
  prepare(o);
  EXPECT_TRUE(content("out") == whole_);
}

TEST_F(Interrupted, WhatIsBehindTheJournalIsCutOff) {
  const PrepareOptions o = options("out");
  ASSERT_TRUE(stopped_at(o, 4));
  for (const char* name : {"tokens", "records"})
    std::ofstream(o.out / ".prepare" / name, std::ios::app) << "torn";
  prepare(o);
  EXPECT_TRUE(content("out") == whole_);
}

TEST_F(Interrupted, DamagedWorkBeginsAgain) {
  const auto damage = [&](const std::function<void(const fs::path&)>& change) {
    const PrepareOptions o = options("out");
    ASSERT_TRUE(stopped_at(o, 4));
    change(o.out / ".prepare");
    prepare(o);
    EXPECT_TRUE(content("out") == whole_);
    fs::remove_all(o.out);
  };
  damage([](const fs::path& work) { fs::resize_file(work / "tokens", 100); });
  damage([](const fs::path& work) { fs::remove(work / "records"); });
  damage([](const fs::path& work) { fs::resize_file(work / "journal.json", 20); });
  damage([](const fs::path& work) { std::ofstream(work / "journal.json") << "{\"identity\": 3}"; });
}

TEST_F(Interrupted, OtherInputsOrOptionsBeginAgain) {
  const auto after = [&](const std::function<void(PrepareOptions&)>& change) {
    PrepareOptions o = options("out");
    EXPECT_TRUE(stopped_at(o, 5));
    change(o);
    prepare(o);
    const auto got = content("out");
    fs::remove_all(o.out);
    o.out = dir_ / "fresh";
    prepare(o);
    EXPECT_TRUE(got == content("fresh"));
    fs::remove_all(o.out);
    return got != whole_;
  };
  EXPECT_TRUE(after([](PrepareOptions& o) { o.seed = 7; }));
  EXPECT_TRUE(after([](PrepareOptions& o) { o.split_by = SplitBy::id; }));
  // val_fraction matters in the second pass alone: the work goes on.
  EXPECT_TRUE(after([](PrepareOptions& o) { o.val_fraction = 0.3; }));
  // One letter of a document that had been tokenised already; the size stays.
  EXPECT_TRUE(after([&](PrepareOptions&) {
    std::fstream file(dir_ / "in/a.jsonl", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(10);
    file.put('Z');
  }));
}

TEST_F(Interrupted, AWrongDocumentLeavesNothingBehind) {
  dir_.write("in/d.jsonl", "oops");
  EXPECT_PRED2(mentions, error_of([&] { prepare(options("out")); }), "d.jsonl:1");
  EXPECT_FALSE(fs::exists(dir_ / "out"));
}

TEST_F(Interrupted, AFullDiskIsOneSentenceAndTheSameCallGoesOn) {
  const auto fails_at = [&](uint64_t bytes, const std::string& out, double save_seconds) {
    PrepareOptions o = options(out);
    o.save_seconds = save_seconds;
    std::string sentence;
    {
      const FileSizeLimit limit(bytes);
      sentence = error_of([&] { prepare(o); });
    }
    EXPECT_FALSE(fs::exists(o.out / "train.bin"));
    EXPECT_FALSE(fs::exists(o.out / "meta.json"));
    return sentence;
  };
  // Nothing worth keeping yet.
  EXPECT_PRED2(mentions, fails_at(1000, "a", 1000), "a/.prepare/");
  EXPECT_FALSE(fs::exists(dir_ / "a"));
  // In the first pass, and in the second, where the tokens of the training side alone exceed the limit.
  const uint64_t all = whole_.at("train.bin").size() + whole_.at("val.bin").size();
  EXPECT_PRED2(mentions, fails_at(800'000, "b", 0), "b/.prepare/");
  EXPECT_TRUE(fs::exists(dir_ / "b/.prepare/journal.json"));
  prepare(options("b"));
  EXPECT_TRUE(content("b") == whole_);
  PrepareOptions o = options("c");
  ASSERT_TRUE(stopped_at(o, 8));
  ASSERT_EQ(fs::file_size(o.out / ".prepare/tokens"), all);
  EXPECT_PRED2(mentions, fails_at(100'000, "c", 0), "c/train.bin");
  prepare(o);
  EXPECT_TRUE(content("c") == whole_);
}

TEST_F(Interrupted, ADiskThatIsFarTooSmallIsAnErrorAtOnce) {
  const uint64_t all = whole_.at("train.bin").size() + whole_.at("val.bin").size();
  PrepareOptions o = options("out");
  o.space_sample_bytes = 1;
  uint64_t free = all / 2, asked = 0;
  o.free_bytes = [&](const fs::path& folder) {
    EXPECT_EQ(folder, o.out);
    ++asked;
    return free;
  };
  const std::string sentence = error_of([&] { prepare(o); });
  EXPECT_PRED2(mentions, sentence, o.out.string() + " needs about ");
  EXPECT_PRED2(mentions, sentence, "which has " + human_bytes(double(free)) + " free");
  // In all it is twice the files and 40 bytes for each of 5001 documents; some of the first copy is there
  // already.
  const double needed = 2 * double(all) + 40 * 5001;
  double estimate = 0;
  std::string unit;
  std::istringstream(sentence.substr(sentence.find(" about ") + 7)) >> estimate >> unit;
  ASSERT_EQ(unit, "MiB");
  EXPECT_GT(estimate * 1024 * 1024, needed - double(all)) << sentence;
  EXPECT_LT(estimate * 1024 * 1024, needed * 1.1) << sentence;
  EXPECT_EQ(asked, 1u);
  EXPECT_FALSE(fs::exists(o.out / "train.bin"));
  // Work that was noted is kept for when there is room; then it is looked at again, and too little may be
  // enough.
  free = uint64_t(needed * 0.75);
  prepare(o);
  EXPECT_EQ(asked, 2u);
  EXPECT_TRUE(content("out") == whole_);
  // A pipe and small inputs give nothing to go by.
  o.out = dir_ / "small";
  o.space_sample_bytes = uint64_t{1} << 30;
  prepare(o);
  EXPECT_EQ(asked, 2u);
}

TEST_F(Interrupted, OneProcessAtATime) {
  const PrepareOptions o = options("out");
  bool tried = false;
  prepare(o, [&](const PrepareProgress&) {
    if (std::exchange(tried, true)) return;
    EXPECT_PRED2(mentions, error_of([&] { prepare(o); }), "another process");
  });
  EXPECT_TRUE(tried);
  EXPECT_TRUE(content("out") == whole_);
}

}  // namespace
}  // namespace sps
