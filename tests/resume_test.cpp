// Training survives whatever stops it: a run that was killed, interrupted or damaged ends with the bytes of
// one that was left alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/json.h"
#include "base/rng.h"
#include "base/test_files.h"
#include "data/test_corpus.h"
#include "model/checkpoint_files.h"
#include "program.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

constexpr int kSteps = 60;

std::vector<std::string> entries(const fs::path& run) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(checkpoints_dir(run), error), end; !error && at != end; at.increment(error))
    names.push_back(at->path().filename());
  return names;
}

size_t unfinished_saves(const fs::path& run) {
  size_t n = 0;
  for (const std::string& name : entries(run)) n += mentions(name, ".tmp-");
  return n;
}

class ResumeTest : public testing::Test {
 protected:
  // 60 steps; 20 validations, 3 named checkpoints, one before the decay and a rolling one after every third
  // step.
  Arguments command(const std::string& recipe, const std::string& run) const {
    return Arguments{"train", recipe, "data.dir=" + data_.string(), "run.dir=" + run} + tiny_model() +
           Arguments{"train.tokens=15360",           "schedule.warmup_tokens=1280",
                     "schedule.decay_tokens=3840",   "train.eval_every_tokens=768",
                     "train.eval_tokens=256",        "run.dtype=f32",
                     "train.save_every_tokens=4096", "train.rolling_every_tokens=768"};
  }

  void finish(const Arguments& command) const {
    const Outcome o = run_program(dir_.path(), command);
    ASSERT_EQ(o.status, 0) << o.err;
    ASSERT_TRUE(mentions(o.out, "finished")) << o.out;
  }

  size_t metrics_lines(const std::string& run) const {
    const fs::path path = dir_ / run / "metrics.jsonl";
    if (!fs::exists(path)) return 0;
    const std::string text = read_text(path);
    return size_t(std::count(text.begin(), text.end(), '\n'));
  }

  // Starts the run and kills it once `lines` more lines of metrics are there and `delay` has passed. Returns
  // whether it was still alive then.
  bool kill_after(const Arguments& command, const std::string& run, size_t lines,
                  std::chrono::microseconds delay) {
    const size_t wanted = metrics_lines(run) + lines;
    Program program(dir_.path(), command);
    // The file is shortened when a run continues: then it holds less than before for a while.
    program.wait_until([&] { return metrics_lines(run) >= wanted; });
    std::this_thread::sleep_for(delay);
    program.signal(SIGKILL);
    return program.wait().signal == SIGKILL;
  }

  // Every lasting checkpoint and every line of metrics, times of day aside.
  void expect_same_runs(const std::string& got, const std::string& want) const {
    const auto a = folder_content(dir_ / got / "checkpoints"),
               b = folder_content(dir_ / want / "checkpoints");
    size_t final_files = 0;
    for (const auto& [name, bytes] : b) {
      if (name.starts_with("rolling-")) continue;
      ASSERT_TRUE(a.contains(name)) << name;
      EXPECT_TRUE(a.at(name) == bytes) << name;
      final_files += mentions(name, "-final/") && !name.ends_with('/');
    }
    EXPECT_EQ(final_files, 4u);
    for (const auto& [name, bytes] : a) EXPECT_TRUE(b.contains(name) || name.starts_with("rolling-")) << name;
    EXPECT_EQ(unfinished_saves(dir_ / got), 0u);

    const auto lines = metrics(got);
    EXPECT_EQ(lines, metrics(want));
    EXPECT_EQ(lines.first.size(), size_t(kSteps));
  }

  // Step -> what was computed; steps and validations apart. A step that stands there twice is a failure.
  using Lines = std::map<int64_t, nlohmann::json>;
  std::pair<Lines, Lines> metrics(const std::string& run) const {
    std::pair<Lines, Lines> found;
    for (const std::string& text : lines_of(read_text(dir_ / run / "metrics.jsonl"))) {
      nlohmann::json line = parse_json(text, run);
      for (const char* key : {"seconds", "tokens_per_second", "model_flops_per_second", "peak_memory_bytes",
                              "gpu_peak_bytes", "gpu_used_bytes", "eval_seconds"})
        line.erase(key);
      Lines& lines = line.contains("val_loss") ? found.second : found.first;
      EXPECT_TRUE(lines.emplace(line.at("step"), line).second) << run << " repeats " << text;
    }
    return found;
  }

  TestDir dir_;
  fs::path data_ = make_test_data(dir_, "data", 400);
};

TEST_F(ResumeTest, KilledAtAnyMoment) {
  for (const char* recipe :
       {"demo_sps_w4_15k", "demo_free_pause_pooled_phase50_15k", "demo_sequential_2+1_15k"}) {
    SCOPED_TRACE(recipe);
    const std::string whole = std::string(recipe) + "-whole";
    finish(command(recipe, whole));
    for (const uint64_t seed : {1, 2}) {
      const Rng rng(seed, recipe);
      const std::string run = std::string(recipe) + "-" + std::to_string(seed);
      uint64_t draw = 0;
      int killed = 0;
      for (int i = 0; i < 4; ++i) {
        const size_t lines = 1 + rng.below(draw++, 22);
        const std::chrono::microseconds delay(rng.below(draw++, 15000));
        killed += kill_after(command(recipe, run), run, lines, delay);
      }
      EXPECT_GE(killed, 2) << "the run ended before it could be killed";
      finish(command(recipe, run));
      expect_same_runs(run, whole);
    }
  }
}

// The source goes once a checkpoint of the run itself is there.
TEST_F(ResumeTest, KilledOnAFrozenStateTower) {
  const std::string recipe = "demo_two_tower_2+1_15k";
  finish(command("demo_sequential_2+1_15k", "source"));
  const Arguments frozen{"freeze.from=source", "train.seed=7"};
  finish(command(recipe, "whole") + frozen);
  const Rng rng(3, recipe);
  int killed = 0;
  for (uint64_t i = 0; i < 4; ++i) {
    const std::chrono::microseconds delay(rng.below(2 * i, 15000));
    killed += kill_after(command(recipe, "killed") + frozen, "killed", 6 + rng.below(2 * i + 1, 9), delay);
    if (latest_checkpoint(dir_ / "killed")) fs::remove_all(dir_ / "source");
  }
  EXPECT_GE(killed, 2) << "the run ended before it could be killed";
  EXPECT_FALSE(fs::exists(dir_ / "source"));
  finish(command(recipe, "killed") + frozen);
  expect_same_runs("killed", "whole");
}

TEST_F(ResumeTest, KilledWhileSaving) {
  const std::string recipe = "demo_delayed_state_w4_15k";
  finish(command(recipe, "whole"));
  int torn = 0;
  for (int i = 0; i < 25 && torn < 3; ++i) {
    Program program(dir_.path(), command(recipe, "killed"));
    // Leftovers of the last kill go when the program starts.
    program.wait_until(
        [&] { return unfinished_saves(dir_ / "killed") == 0 && !entries(dir_ / "killed").empty(); });
    program.wait_until([&] { return unfinished_saves(dir_ / "killed") > 0; });
    program.signal(SIGKILL);
    program.wait();
    torn += unfinished_saves(dir_ / "killed") > 0;
  }
  EXPECT_GT(torn, 0) << "no kill left a checkpoint in the making";
  finish(command(recipe, "killed"));
  expect_same_runs("killed", "whole");
}

TEST_F(ResumeTest, Interrupted) {
  const std::string recipe = "demo_sps_w4_15k";
  finish(command(recipe, "whole"));
  for (const auto& [signal, status] : {std::pair{SIGTERM, 143}, std::pair{SIGINT, 130}}) {
    const std::string run = "signal" + std::to_string(signal);
    for (const size_t lines : {12, 30}) {
      Program program(dir_.path(), command(recipe, run));
      ASSERT_TRUE(program.wait_until([&] { return metrics_lines(run) >= lines; }));
      program.signal(signal);
      const Outcome o = program.wait();
      EXPECT_EQ(o.status, status) << o.err;
      EXPECT_TRUE(mentions(o.out, "continues from there")) << o.out;
      const auto latest = latest_checkpoint(dir_ / run);
      ASSERT_TRUE(latest);
      // Nothing that was computed is lost: the last line of metrics belongs to the saved state.
      const auto last = parse_json(lines_of(read_text(dir_ / run / "metrics.jsonl")).back(), run);
      EXPECT_EQ(latest->name.tokens, last.at("tokens"));
    }
    finish(command(recipe, run));
    expect_same_runs(run, "whole");
  }
}

TEST_F(ResumeTest, ThreadsAreNoPartOfTheResult) {
  for (const char* dtype : {"f32", "bf16"}) {
    const std::string one = std::string(dtype) + "1", two = std::string(dtype) + "2";
    const Arguments type{std::string("run.dtype=") + dtype};
    finish(command("demo_free_pause_w4_15k", one) + type + Arguments{"run.threads=1"});
    finish(command("demo_free_pause_w4_15k", two) + type + Arguments{"run.threads=2"});
    expect_same_runs(two, one);
    // Nor have they to stay the same.
    const std::string mixed = std::string(dtype) + "12";
    kill_after(command("demo_free_pause_w4_15k", mixed) + type + Arguments{"run.threads=1"}, mixed, 30, {});
    finish(command("demo_free_pause_w4_15k", mixed) + type + Arguments{"run.threads=2"});
    expect_same_runs(mixed, one);
  }
}

TEST_F(ResumeTest, ADamagedCheckpointIsNotChosen) {
  const std::string recipe = "demo_standard_15k";
  finish(command(recipe, "whole"));
  for (const char* file : {kWeightsFile, kOptimizerFile, kStateFile, kConfigFile}) {
    const std::string run = std::string("cut-") + file;
    kill_after(command(recipe, run), run, 40, {});
    const auto before = list_checkpoints(dir_ / run);
    ASSERT_GE(before.size(), 2u);
    const fs::path newest = before.back().path;
    fs::resize_file(newest / file, fs::file_size(newest / file) / 2);
    Program program(dir_.path(), command(recipe, run));
    const Outcome o = program.wait();
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_TRUE(mentions(o.err, newest.filename().string())) << "no warning names the damaged one: " << o.err;
    EXPECT_TRUE(mentions(
        o.err, "continuing from " + (run / checkpoints_dir("") / before.end()[-2].path.filename()).string()))
        << o.err;
    // One that is rolling is written again on the way; the damaged one is never taken for good.
    const auto files = folder_content(dir_ / run / "checkpoints");
    const auto whole = folder_content(dir_ / "whole" / "checkpoints");
    for (const auto& [name, bytes] : whole) {
      if (!mentions(name, "-final/")) continue;
      EXPECT_TRUE(files.contains(name) && files.at(name) == bytes) << name;
    }
    EXPECT_EQ(metrics(run), metrics("whole"));
  }
}

}  // namespace
}  // namespace sps
