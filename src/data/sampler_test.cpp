#include "data/sampler.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "base/test_dir.h"
#include "data/batch.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using Starts = std::vector<int64_t>;

// Token i of the file is i % 65521, so a window's ids say where it starts.
class Corpus {
 public:
  explicit Corpus(int64_t tokens) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < tokens; ++i) ids.push_back(int32_t(i % 65521));
    TokenWriter writer(dir_ / "x.bin", TokenType::u16);
    writer.append(ids);
    writer.commit();
    file_ = TokenFile::open(dir_ / "x.bin");
  }
  const TokenFile& file() const { return file_; }

 private:
  TestDir dir_;
  TokenFile file_;
};

Starts starts_of(Sampler& sampler, uint64_t begin, int64_t count) {
  Starts starts;
  for (uint64_t n = begin; n < begin + uint64_t(count); ++n) starts.push_back(sampler.start(n));
  return starts;
}

TEST(Sampler, AnEpochShowsEachUnitOnceWithItsOwnOffsetAndOrder) {
  for (const int64_t tokens : {1000, 1003, 1009, 1010}) {
    for (const int64_t chunk : {1, 3, 7, 98, 99, 100, 1000}) {
      const Corpus corpus(tokens);
      Sampler sampler(corpus.file(), {.context = 10, .seed = 5, .chunk_units = chunk});
      ASSERT_EQ(sampler.units(), tokens / 10 - 1);
      EXPECT_EQ(sampler.dropped_tokens(), tokens - (sampler.units() * 10 + 1));
      std::set<int64_t> offsets;
      std::set<Starts> orders;
      for (uint64_t e = 0; e < 5; ++e) {
        Starts starts = starts_of(sampler, e * uint64_t(sampler.units()), sampler.units());
        EXPECT_EQ(sampler.epoch(e * uint64_t(sampler.units())), e);
        const int64_t offset = sampler.offset(e);
        offsets.insert(offset);
        for (int64_t& s : starts) s -= offset;
        orders.insert(starts);
        EXPECT_GE(offset, 0);
        std::sort(starts.begin(), starts.end());
        for (int64_t u = 0; u < sampler.units(); ++u) ASSERT_EQ(starts[size_t(u)], u * 10);
        EXPECT_LE(offset + starts.back() + 10 + 1, tokens);
      }
      EXPECT_GT(offsets.size(), 1u);
      if (chunk < sampler.units()) {
        EXPECT_GT(orders.size(), 1u);
      }
    }
  }
}

TEST(Sampler, AChunkIsReadInOrder) {
  const Corpus corpus(1005);  // 99 units: 14 chunks of 7 and a last one of 1
  Sampler sampler(corpus.file(), {.context = 10, .seed = 1, .chunk_units = 7});
  const Starts starts = starts_of(sampler, 0, sampler.units());
  const int64_t offset = sampler.offset(0);
  for (size_t i = 1; i < starts.size(); ++i) {
    const int64_t before = (starts[i - 1] - offset) / 10, now = (starts[i] - offset) / 10;
    if (now % 7 != 0) {
      EXPECT_EQ(now, before + 1);
    }
  }
}

TEST(Sampler, AllOffsetsAreDrawnAndEveryTokenIsReached) {
  const Corpus corpus(57);
  Sampler sampler(corpus.file(), {.context = 10, .seed = 3});
  std::set<int64_t> residues;
  std::vector<bool> reached(57);
  for (uint64_t e = 0; e < 400; ++e) {
    residues.insert(sampler.offset(e) % 10);
    for (int64_t i = 0; i < sampler.units() * 10 + 1; ++i) reached[size_t(sampler.offset(e) + i)] = true;
  }
  EXPECT_EQ(residues.size(), 10u);
  EXPECT_EQ(std::count(reached.begin(), reached.end(), true), 57);
}

// peer-faults 10, 11, 16, 17 and pitfalls A6: a resume at any sample, from nothing but its number, continues
// the uninterrupted stream; later epochs start at their own beginning and the stream never ends.
TEST(Sampler, AResumeAnywhereEqualsTheUninterruptedRun) {
  const Corpus corpus(1040);
  for (const int64_t chunk : {1, 8}) {
    const SamplerOptions options{.context = 10, .seed = 1337, .chunk_units = chunk};
    Sampler uninterrupted(corpus.file(), options);
    ASSERT_EQ(uninterrupted.units(), 103);
    const Starts all = starts_of(uninterrupted, 0, 400);
    for (const uint64_t seen : {1, 30, 102, 103, 104, 170, 206, 309, 399}) {
      Sampler resumed(corpus.file(), options);
      EXPECT_EQ(starts_of(resumed, seen, 400 - int64_t(seen)),
                Starts(all.begin() + int64_t(seen), all.end()));
    }
    Sampler backwards(corpus.file(), options);  // no hidden state
    for (int64_t n = 399; n >= 0; --n) ASSERT_EQ(backwards.start(uint64_t(n)), all[size_t(n)]);
    EXPECT_GE(backwards.start(uint64_t{1} << 60), 0);
  }
}

// peer-faults 14, 16 and pitfalls A7, A8: ranks and accumulation only divide a global batch.
TEST(Sampler, RanksDivideTheSamplesOfABatch) {
  const Corpus corpus(1000);
  Sampler one(corpus.file(), {.context = 10, .seed = 2});
  Starts whole, part;
  for (const uint64_t begin : {0, 96, 104}) {
    one.batch(begin, 8, whole);
    EXPECT_EQ(whole, starts_of(one, begin, 8));
    for (const int64_t world : {1, 2, 3, 4, 8, 11}) {
      Starts together(8, -1);
      int64_t taken = 0;
      for (int64_t rank = 0; rank < world; ++rank) {
        Sampler sampler(corpus.file(), {.context = 10, .seed = 2, .rank = rank, .world = world});
        sampler.batch(begin, 8, part);
        taken += int64_t(part.size());
        size_t next = 0;
        for (uint64_t n = begin; n < begin + 8; ++n)
          if (int64_t(n % uint64_t(world)) == rank) together[n - begin] = part.at(next++);
      }
      EXPECT_EQ(taken, 8);
      EXPECT_EQ(together, whole);
    }
  }
}

TEST(Sampler, SeedsGiveDifferentStreams) {
  const Corpus corpus(1000);
  Sampler a(corpus.file(), {.context = 10, .seed = 1}), b(corpus.file(), {.context = 10, .seed = 2});
  EXPECT_NE(a.stream_hash(0, 20), b.stream_hash(0, 20));
  EXPECT_NE(a.stream_hash(0, 20), a.stream_hash(1, 21));
  EXPECT_NE(a.stream_hash(0, 99), a.stream_hash(99, 198));
}

TEST(Sampler, GoldenStream) {
  const Corpus corpus(100'003);
  Sampler shuffled(corpus.file(), {.context = 64, .seed = 1337});
  Sampler chunked(corpus.file(), {.context = 64, .seed = 1337, .chunk_units = 100});
  EXPECT_EQ(shuffled.stream_hash(0, 4000), "bc49c12892a01ac9");
  EXPECT_EQ(chunked.stream_hash(0, 4000), "fe0e34d15efbd6de");
}

// peer-faults 8: too little data is a sentence with file, have and need.
TEST(Sampler, TooLittleDataIsAnError) {
  const Corpus enough(11), little(10);
  Sampler sampler(enough.file(), {.context = 10});
  EXPECT_EQ(sampler.units(), 1);
  EXPECT_EQ(starts_of(sampler, 0, 3), (Starts{0, 0, 0}));
  EXPECT_EQ(sampler.dropped_tokens(), 0);
  for (const std::string& sentence : {error_of([&] { Sampler(little.file(), {.context = 10}); }),
                                      error_of([&] { ValidationWindows(little.file(), 10); })}) {
    EXPECT_PRED2(mentions, sentence, little.file().path().string());
    EXPECT_PRED2(mentions, sentence, "has 10 tokens");
    EXPECT_PRED2(mentions, sentence, "needs 11");
  }
  const Corpus empty(0);
  EXPECT_PRED2(mentions, error_of([&] { Sampler(empty.file(), {.context = 1}); }), "has 0 tokens");
  EXPECT_PRED2(mentions, error_of([&] { Sampler(enough.file(), {.context = 0}); }), "context is 0");
  EXPECT_PRED2(mentions, error_of([&] { Sampler(enough.file(), {.context = 2, .chunk_units = 0}); }),
               "chunk_units is 0");
}

TEST(Sampler, SmallFilesMoveTheirOnlyWindow) {
  for (int64_t tokens = 11; tokens <= 40; ++tokens) {
    const Corpus corpus(tokens);
    Sampler sampler(corpus.file(), {.context = 10, .seed = 9});
    std::set<int64_t> starts;
    for (uint64_t n = 0; n < 300; ++n) {
      starts.insert(sampler.start(n));
      ASSERT_LE(sampler.start(n) + 11, tokens);
    }
    EXPECT_EQ(int64_t(starts.size()), tokens - 10) << "every place a window fits is used";
  }
}

// peer-faults 1: the last window of a file beyond 2 GiB.
TEST(Sampler, WindowsBeyond2GiBHoldTheRightIds) {
  const TestDir dir;
  const int64_t bytes = (int64_t{1} << 31) + 4096;
  std::ofstream(dir / "big.bin").close();
  fs::resize_file(dir / "big.bin", uint64_t(bytes));
  std::fstream marker(dir / "big.bin", std::ios::in | std::ios::out | std::ios::binary);
  marker.seekp(bytes - 8192);
  for (int i = 0; i < 4096; ++i) marker << '\x07' << '\x01';
  marker.close();
  const TokenFile file = TokenFile::open(dir / "big.bin");
  const ValidationWindows windows(file, 1024);
  Batch batch;
  const int64_t last = windows.start(windows.count() - 1);
  batch.fill(file, std::span(&last, 1), 1024, {.eot = 256});
  EXPECT_EQ(std::count(batch.tokens.begin(), batch.tokens.end(), 0x107), 1024);
  EXPECT_EQ(std::count(batch.targets.begin(), batch.targets.end(), 0x107), 1024);
  // With one chunk, sample units-1 of an epoch is the last window of the file.
  Sampler sampler(file, {.context = 1024, .chunk_units = file.size()});
  const int64_t end = sampler.start(uint64_t(sampler.units()) - 1);
  batch.fill(file, std::span(&end, 1), 1024, {.eot = 256});
  EXPECT_EQ(std::count(batch.tokens.begin(), batch.tokens.end(), 0x107), 1024);
}

TEST(ValidationWindows, AFullSweepScoresEachPositionOnce) {
  for (const int64_t tokens : {11, 20, 21, 22, 1000}) {
    const Corpus corpus(tokens);
    const ValidationWindows windows(corpus.file(), 10);
    EXPECT_EQ(windows.count(), (tokens - 1) / 10);
    EXPECT_TRUE(windows.complete());
    for (int64_t i = 0; i < windows.count(); ++i) EXPECT_EQ(windows.start(i), i * 10);
    // Targets are tokens 1..10*count: the first token and the dropped ones are none.
    EXPECT_EQ(windows.dropped_tokens(), tokens - 1 - 10 * windows.count());
  }
}

TEST(ValidationWindows, ASmallerSetIsAFixedPrefix) {
  const Corpus corpus(2001);
  const Starts all = ValidationWindows(corpus.file(), 10).starts();
  Starts before;
  for (const int64_t tokens : {1, 10, 11, 500, 1990}) {
    const ValidationWindows windows(corpus.file(), 10, tokens);
    EXPECT_EQ(windows.count(), (tokens + 9) / 10);
    EXPECT_FALSE(windows.complete());
    EXPECT_EQ(windows.starts(), ValidationWindows(corpus.file(), 10, tokens).starts());
    EXPECT_TRUE(std::equal(before.begin(), before.end(), windows.starts().begin()));
    const std::set<int64_t> distinct(windows.starts().begin(), windows.starts().end());
    EXPECT_EQ(int64_t(distinct.size()), windows.count());  // without replacement
    EXPECT_TRUE(std::includes(all.begin(), all.end(), distinct.begin(), distinct.end()));
    before = windows.starts();
  }
  EXPECT_FALSE(std::is_sorted(before.begin(), before.end()));
  for (const int64_t tokens : {1991, 2000, 5000}) {
    EXPECT_EQ(ValidationWindows(corpus.file(), 10, tokens).starts(), all);
    EXPECT_TRUE(ValidationWindows(corpus.file(), 10, tokens).complete());
  }
  EXPECT_PRED2(mentions, error_of([&] { ValidationWindows(corpus.file(), 10, -1); }), "eval_tokens is -1");
}

// peer-faults 7: evaluating between steps leaves the training batches as they are.
TEST(ValidationWindows, EvaluationDoesNotTouchTheTrainingStream) {
  const Corpus corpus(5000);
  const auto run = [&](bool evaluate) {
    Sampler sampler(corpus.file(), {.context = 20, .seed = 4});
    Batch training, validation;
    Starts starts;
    std::vector<int32_t> seen;
    for (uint64_t step = 0; step < 100; ++step) {
      sampler.batch(step * 4, 4, starts);
      training.fill(corpus.file(), starts, 20, {.eot = 7});
      if (evaluate && step % 3 == 0) {
        const ValidationWindows windows(corpus.file(), 20, 100);
        validation.fill(corpus.file(), windows.starts(), 20, {.eot = 7});
      }
      seen.insert(seen.end(), training.tokens.begin(), training.tokens.end());
      seen.insert(seen.end(), training.targets.begin(), training.targets.end());
    }
    return seen;
  };
  EXPECT_EQ(run(true), run(false));
}

}  // namespace
}  // namespace sps
