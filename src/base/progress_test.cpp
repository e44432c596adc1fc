#include "base/progress.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace sps {
namespace {

TEST(Human, Counts) {
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(0.354), "0.35");
  EXPECT_EQ(human_count(1000), "1.00 k");
  EXPECT_EQ(human_count(1234567), "1.23 M");
  EXPECT_EQ(human_count(12345678), "12.3 M");
  EXPECT_EQ(human_count(123456789), "123 M");
  EXPECT_EQ(human_count(9999999), "10.0 M");
  EXPECT_EQ(human_count(99999999), "100 M");
  EXPECT_EQ(human_count(999999), "1.00 M");  // never "1000 k"
  EXPECT_EQ(human_count(20e9), "20.0 B");
  EXPECT_EQ(human_count(-1500), "-1.50 k");
  EXPECT_EQ(human_count(5e18), "5000000 T");
  EXPECT_EQ(human_count(std::nan("")), "?");
}

TEST(Human, Bytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
  EXPECT_EQ(human_bytes(1024.0 * 1024 - 1), "1.00 MiB");
  EXPECT_EQ(human_bytes(139.0 * (1LL << 30)), "139 GiB");
}

TEST(Human, Durations) {
  EXPECT_EQ(human_duration(0.25), "250 ms");
  EXPECT_EQ(human_duration(0.9999), "1.0 s");
  EXPECT_EQ(human_duration(12.34), "12.3 s");
  EXPECT_EQ(human_duration(59.96), "1 min 00 s");
  EXPECT_EQ(human_duration(200), "3 min 20 s");
  EXPECT_EQ(human_duration(3599.9), "1 h 00 min");
  EXPECT_EQ(human_duration(2 * 3600 + 5 * 60), "2 h 05 min");
  EXPECT_EQ(human_duration(86400 - 1), "1 d 00 h");
  EXPECT_EQ(human_duration(3 * 86400 + 4 * 3600), "3 d 04 h");
  EXPECT_EQ(human_duration(-1), "?");
  EXPECT_EQ(human_duration(1e300), "?");
  EXPECT_EQ(human_duration(std::numeric_limits<double>::infinity()), "?");
}

TEST(RollingRate, ForgetsWhatIsOlderThanTheWindow) {
  RollingRate rate(10);
  EXPECT_EQ(rate.per_second(), 0);
  rate.add(0, 100);
  EXPECT_EQ(rate.per_second(), 0);
  rate.add(0, 200);
  EXPECT_EQ(rate.per_second(), 0);  // no time has passed
  for (int t = 1; t <= 20; ++t) rate.add(t, 200 + 5 * t);
  EXPECT_DOUBLE_EQ(rate.per_second(), 5);
  for (int t = 21; t <= 31; ++t) rate.add(t, 300 + 50 * (t - 20));
  EXPECT_DOUBLE_EQ(rate.per_second(), 50);
}

TEST(RollingRate, ManyPointsInOneWindowGiveTheSameRate) {
  RollingRate rate(1);
  for (int i = 0; i <= 1000000; ++i) rate.add(i * 1e-5, 3.0 * i);
  EXPECT_NEAR(rate.per_second(), 3e5, 1);
}

struct Screen {
  double time = 100;
  std::vector<std::string> writes;
  ProgressOutput output(bool terminal, int columns = 200) {
    return {terminal, [columns] { return columns; }, [this](std::string_view t) { writes.emplace_back(t); },
            [this] { return time; }};
  }
  std::string all() const {
    std::string text;
    for (const auto& w : writes) text += w;
    return text;
  }
};

TEST(Progress, PlainLinesEveryFiveSeconds) {
  Screen screen;
  Progress progress("train", 1000, "tokens", 0, screen.output(false));
  for (int i = 0; i <= 96; ++i, screen.time += 0.125) progress.update(i, "loss 3.25");
  progress.finish(1000);
  ASSERT_EQ(screen.writes.size(), 3u);  // at 5 and 10 seconds and at the end
  EXPECT_EQ(screen.writes[0], "train 40/1.00 k tokens 4.0 % | 8 tokens/s | 2 min 00 s left | loss 3.25\n");
  EXPECT_EQ(screen.writes[2], "train 1.00 k/1.00 k tokens 100.0 % | 82.5 tokens/s | took 12.1 s\n");
}

TEST(Progress, WorkOfAMomentLeavesNoPlainLine) {
  Screen screen;
  for (const bool finishes : {false, true}) {
    Progress progress("read", 1000, "B", 0, screen.output(false));
    for (int i = 0; i < 49; ++i, screen.time += 0.1) progress.update(i);
    if (finishes) progress.finish(49);
  }
  EXPECT_EQ(screen.all(), "");
}

TEST(Progress, BytesAreWrittenAsTheyAreUsedTo) {
  Screen screen;
  Progress progress("read", 30'000'000, "B", 0, screen.output(false));
  screen.time += 5;
  progress.update(10'000'000);
  screen.time += 5;
  progress.finish(30'000'000);
  ASSERT_EQ(screen.writes.size(), 2u);
  EXPECT_EQ(screen.writes[0], "read 10.0 MB/30.0 MB 33.3 % | 2.00 MB/s | 10.0 s left\n");
  EXPECT_EQ(screen.writes[1], "read 30.0 MB/30.0 MB 100.0 % | 3.00 MB/s | took 10.0 s\n");
  Progress large("read", 0, "B", 0, screen.output(false));
  screen.time += 10;
  large.update(30'400'000'000);
  EXPECT_EQ(screen.writes.back(), "read 30.4 GB | 3.04 GB/s\n");
  Progress small("read", 0, "B", 0, screen.output(false));
  screen.time += 8;
  small.finish(512);
  EXPECT_EQ(screen.writes.back(), "read 512 B | 64 B/s | took 8.0 s\n");
}

TEST(Progress, TerminalRewritesOneLineThatFits) {
  Screen screen;
  {
    Progress progress("train", 0, "steps", 0, screen.output(true, 20));
    for (int i = 0; i < 50; ++i, screen.time += 0.01) progress.update(i, "a rather long explanation");
    EXPECT_GE(screen.writes.size(), 4u);
    EXPECT_LE(screen.writes.size(), 6u);
    for (const std::string& w : screen.writes) {
      EXPECT_EQ(w.front(), '\r');
      EXPECT_EQ(w.find('\n'), std::string::npos);
      EXPECT_LE(w.size(), 1u + 19 + 3);
    }
    progress.message("saved");
    EXPECT_EQ(screen.writes.back(), "\r\x1b[Ksaved\n");
    const size_t before = screen.writes.size();
    progress.update(50);
    EXPECT_EQ(screen.writes.size(), before + 1);
  }
  EXPECT_EQ(screen.writes.back(), "\n");  // left without finish(): what follows starts on its own line
}

TEST(Progress, ResumedWorkDoesNotCountForTheRate) {
  Screen screen;
  Progress progress("train", 2000, "tokens", 1000, screen.output(false));
  screen.time += 10;
  progress.update(1100);
  EXPECT_NE(screen.all().find("55.0 % | 10 tokens/s | 1 min 30 s left"), std::string::npos) << screen.all();
  progress.finish(1100);
  progress.finish(1100);
  EXPECT_EQ(screen.writes.size(), 2u);
}

}  // namespace
}  // namespace sps
