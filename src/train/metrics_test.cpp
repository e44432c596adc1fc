#include "train/metrics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "base/test_dir.h"

namespace sps {
namespace {

TEST(MetricsLog, WritesOneObjectALine) {
  const TestDir dir;
  const auto path = dir / "metrics.jsonl";
  MetricsLog log(path, std::nullopt);
  log.write({{"step", 1}, {"tokens", 96}, {"loss", 3.25}});
  log.write({{"step", 2}, {"tokens", 192}, {"loss", std::nan("")}, {"norm", INFINITY}});
  // Visible at once: a reader need not wait for the end of the run.
  EXPECT_EQ(
      read_text(path),
      "{\"step\":1,\"tokens\":96,\"loss\":3.25}\n{\"step\":2,\"tokens\":192,\"loss\":null,\"norm\":null}\n");
}

std::string lines(int64_t from, int64_t to) {
  std::string text;
  for (int64_t step = from; step <= to; ++step)
    text += fmt::format("{{\"step\":{},\"tokens\":{}}}\n", step, 10 * step);
  return text;
}

TEST(MetricsLog, AnInterruptedRunHasEachStepOnce) {
  const TestDir dir;
  const auto path = dir / "metrics.jsonl";
  {
    MetricsLog log(path, std::nullopt);
    for (int64_t step = 0; step <= 8; ++step) log.write({{"step", step}, {"tokens", 10 * step}});
  }
  // Killed after step 8 (in the middle of writing step 9); the checkpoint is from after step 5.
  write_atomically(path, read_text(path) + "{\"step\":9,\"tok");
  {
    MetricsLog log(path, 50);
    EXPECT_EQ(read_text(path), lines(0, 5));
    for (int64_t step = 6; step <= 10; ++step) log.write({{"step", step}, {"tokens", 10 * step}});
  }
  EXPECT_EQ(read_text(path), lines(0, 10));
  EXPECT_EQ(dir.count_entries(), 1u);
}

// Stopped at 50 before validating there, continued, validated, killed: the next start validates at 50 once
// more.
TEST(MetricsLog, AValidationThatIsRepeatedStandsOnce) {
  const TestDir dir;
  const auto path = dir / "metrics.jsonl";
  {
    MetricsLog log(path, std::nullopt);
    log.write({{"tokens", 40}, {"val_loss", 3.0}});
    log.write({{"tokens", 50}, {"loss", 2.5}});
    log.write({{"tokens", 50}, {"val_loss", 2.75}});
  }
  { const MetricsLog log(path, 50, 40); }
  EXPECT_EQ(read_text(path), "{\"tokens\":40,\"val_loss\":3.0}\n{\"tokens\":50,\"loss\":2.5}\n");
}

TEST(MetricsLog, ATornLineAloneIsCut) {
  const TestDir dir;
  const auto path = dir.write("metrics.jsonl", lines(0, 3) + "{\"step\":4,\"tokens\":40");
  MetricsLog log(path, 1000);
  log.write({{"step", 4}, {"tokens", 40}});
  EXPECT_EQ(read_text(path), lines(0, 4));
}

TEST(MetricsLog, DamagedLinesDoNotSurvive) {
  const TestDir dir;
  const auto path =
      dir.write("metrics.jsonl", lines(0, 1) + "garbage\n\n[1]\n{\"tokens\":\"x\"}\n{}\n" + lines(2, 3));
  const MetricsLog log(path, 20);
  EXPECT_EQ(read_text(path), lines(0, 2));
}

TEST(MetricsLog, ARunFromNothingStartsAnEmptyFile) {
  const TestDir dir;
  const auto path = dir.write("metrics.jsonl", lines(0, 3));
  { const MetricsLog log(path, 0); }
  EXPECT_EQ(read_text(path), lines(0, 0));
  const MetricsLog log(path, std::nullopt);
  EXPECT_EQ(read_text(path), "");
}

TEST(MetricsLog, UnwritableFilesAreNamed) {
  const TestDir dir;
  const auto path = dir / "missing/metrics.jsonl";
  EXPECT_PRED2(mentions, error_of([&] { MetricsLog log(path, 0); }), path.string());
}

}  // namespace
}  // namespace sps
