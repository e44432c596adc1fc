#include "train/checkpoint.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/files.h"
#include "base/test_dir.h"
#include "base/test_limits.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

// A model of one matrix and its optimizer state; every value follows from the number of tokens.
struct Toy {
  std::vector<float> w, m, v;
  explicit Toy(int64_t tokens, size_t n = 256) : w(n), m(n), v(n) {
    for (auto* part : {&w, &m, &v}) {
      std::iota(part->begin(), part->end(), float(tokens));
      tokens += 1000;
    }
  }
  std::vector<NamedTensor> weights() {
    return {{"w", {int64_t(w.size())}, view(w.data(), 1, int64_t(w.size()))}};
  }
  std::vector<NamedTensor> optimizer() {
    const int64_t n = int64_t(w.size());
    return {{"m.w", {n}, view(m.data(), 1, n)}, {"v.w", {n}, view(v.data(), 1, n)}};
  }
  Checkpoint checkpoint(CheckpointKind kind, int64_t tokens) {
    return {kind, tokens, {{"model", {{"layers", 3}}}}, {{"step", tokens / 10}}, weights(), optimizer()};
  }
};

void save(const fs::path& run, CheckpointKind kind, int64_t tokens, size_t n = 256) {
  Toy toy(tokens, n);
  save_checkpoint(run, toy.checkpoint(kind, tokens));
}

// Loads and compares every value.
void expect_sound(const fs::path& path, int64_t tokens, size_t n = 256) {
  const LoadedCheckpoint loaded = load_checkpoint(path);
  EXPECT_EQ(loaded.tokens, tokens);
  EXPECT_EQ(loaded.state["step"], tokens / 10);
  EXPECT_EQ(loaded.config["model"]["layers"], 3);
  Toy want(tokens, n), got(-1, n);
  read_into(loaded.weights, got.weights());
  ASSERT_TRUE(loaded.optimizer);
  read_into(*loaded.optimizer, got.optimizer());
  EXPECT_EQ(got.w, want.w);
  EXPECT_EQ(got.m, want.m);
  EXPECT_EQ(got.v, want.v);
}

std::vector<std::string> names_in(const fs::path& run) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(checkpoints_dir(run)))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Checkpoint, SavedIsLoaded) {
  const TestDir dir;
  const fs::path run = dir / "run";
  save(run, CheckpointKind::named, 100);
  expect_sound(latest_checkpoint(run)->path, 100);
  EXPECT_EQ(names_in(run), std::vector<std::string>{"tokens-000000000000100"});
  // Again under the same name: replaced.
  save(run, CheckpointKind::named, 100);
  expect_sound(latest_checkpoint(run)->path, 100);
  EXPECT_EQ(names_in(run).size(), 1u);
}

TEST(Checkpoint, WithoutOptimizerThereIsNoFileForIt) {
  const TestDir dir;
  Toy toy(5);
  Checkpoint checkpoint = toy.checkpoint(CheckpointKind::final, 5);
  checkpoint.optimizer.clear();
  save_checkpoint(dir.path(), checkpoint);
  const fs::path path = latest_checkpoint(dir.path())->path;
  EXPECT_FALSE(fs::exists(path / kOptimizerFile));
  EXPECT_FALSE(load_checkpoint(path).optimizer);
}

TEST(Checkpoint, OnlyOlderRollingOnesMakeRoom) {
  const TestDir dir;
  const fs::path run = dir.path();
  save(run, CheckpointKind::rolling, 10);
  save(run, CheckpointKind::named, 15);
  save(run, CheckpointKind::rolling, 30);  // of a run that was then resumed from 15
  EXPECT_EQ(names_in(run), (std::vector<std::string>{"rolling-000000000000030", "tokens-000000000000015"}));
  save(run, CheckpointKind::rolling, 20);
  EXPECT_EQ(names_in(run), (std::vector<std::string>{"rolling-000000000000020", "rolling-000000000000030",
                                                     "tokens-000000000000015"}));
  save(run, CheckpointKind::final, 40);
  EXPECT_EQ(names_in(run).size(), 4u);
  save(run, CheckpointKind::rolling, 41);
  EXPECT_EQ(names_in(run), (std::vector<std::string>{"rolling-000000000000041", "tokens-000000000000015",
                                                     "tokens-000000000000040-final"}));
}

TEST(Checkpoint, LeftoversOfDeadProcessesAreRemoved) {
  const TestDir dir;
  save(dir.path(), CheckpointKind::named, 10);
  const pid_t dead = fork();
  ASSERT_GE(dead, 0);
  if (dead == 0) _exit(0);
  ASSERT_EQ(waitpid(dead, nullptr, 0), dead);
  const fs::path base = checkpoints_dir(dir.path());
  const std::string name = "rolling-000000000000020.tmp-";
  for (const pid_t pid : {dead, getpid(), pid_t{1}})
    fs::create_directories(base / (name + std::to_string(pid)));
  fs::create_directories(base / ("mine.tmp-" + std::to_string(dead)));
  fs::create_directories(base / (name + "x"));
  remove_leftovers(dir.path());
  // What a living process or a person made stays.
  EXPECT_EQ(names_in(dir.path()), (std::vector<std::string>{"mine.tmp-" + std::to_string(dead), name + "1",
                                                            name + "x", "tokens-000000000000010"}));
  EXPECT_NO_THROW(remove_leftovers(dir / "nothing"));
}

// "0000  58 00 ... 61  X.......{...", 16 bytes a line.
std::string hex_dump(const std::string& bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size(); at += 16) {
    std::string hex, plain;
    for (const char c : bytes.substr(at, 16)) {
      hex += fmt::format("{}{:02x}", hex.empty() ? "" : " ", uint8_t(c));
      plain += c >= 32 && c < 127 ? c : '.';
    }
    text += fmt::format("{:04x}  {:47}  {}\n", at, hex, plain);
  }
  return text;
}

TEST(Checkpoint, TheDocumentedExampleIsWhatIsWritten) {
  const TestDir dir;
  std::vector<float> w{1, 2}, m{0.5f, 0.25f}, v{0.125f, 1};
  save_checkpoint(dir.path(), {.kind = CheckpointKind::named,
                               .tokens = 2000289792,
                               .config = {{"model", {{"layers", 8}, {"d_model", 512}}},
                                          {"optim", {{"lr", 6e-4}}},
                                          {"train", {{"seed", 1337}}}},
                               .state = {{"step", 5087}},
                               .weights = {{"w", {1, 2}, view(w.data(), 1, 2)}},
                               .optimizer = {{"m.w", {1, 2}, view(m.data(), 1, 2)},
                                             {"v.w", {1, 2}, view(v.data(), 1, 2)}}});
  const fs::path path = latest_checkpoint(dir.path())->path;
  const std::string page = read_text(fs::path(SPS_SOURCE_DIR) / "docs/formats/checkpoints.md");
  for (const char* file : {kStateFile, kConfigFile})
    EXPECT_PRED2(mentions, page, "```json\n" + read_text(path / file) + "```") << file;
  EXPECT_PRED2(mentions, page, "```\n" + hex_dump(read_text(path / kWeightsFile)) + "```");
}

TEST(CheckpointFaults, FullDiskLeavesThePreviousOne) {
  const TestDir dir;
  const fs::path run = dir.path();
  save(run, CheckpointKind::rolling, 10);
  Toy toy(20, 100000);
  for (const rlim_t limit : {0, 10, 5000, 399999, 400500}) {
    std::string error;
    {
      const FileSizeLimit full(limit);
      error = error_of([&] { save_checkpoint(run, toy.checkpoint(CheckpointKind::rolling, 20)); });
    }
    EXPECT_PRED2(mentions, error, (checkpoints_dir(run) / "rolling-000000000000020").string());
    EXPECT_EQ(names_in(run), std::vector<std::string>{"rolling-000000000000010"}) << limit;
    expect_sound(latest_checkpoint(run)->path, 10);
  }
  save_checkpoint(run, toy.checkpoint(CheckpointKind::rolling, 20));
  expect_sound(latest_checkpoint(run)->path, 20, 100000);
}

TEST(CheckpointFaults, UnwritablePlacesAreNamed) {
  const TestDir dir;
  const fs::path file = dir.write("run/checkpoints", "a file where the folder should be");
  EXPECT_PRED2(mentions, error_of([&] { save(dir / "run", CheckpointKind::named, 1); }), file.string());
  EXPECT_PRED2(mentions, error_of([&] { list_checkpoints(dir / "run"); }), file.string());
  fs::create_directories(dir / "other/checkpoints");
  const fs::path taken = dir.write("other/checkpoints/tokens-000000000000001", "a file");
  EXPECT_PRED2(mentions, error_of([&] { save(dir / "other", CheckpointKind::named, 1); }), taken.string());
}

TEST(CheckpointFaults, StateThatCannotBeStoredIsRefused) {
  const TestDir dir;
  Toy toy(1);
  Checkpoint checkpoint = toy.checkpoint(CheckpointKind::named, 1);
  checkpoint.state["loss"] = std::nan("");
  EXPECT_PRED2(mentions, error_of([&] { save_checkpoint(dir.path(), checkpoint); }), "not finite");
  EXPECT_TRUE(names_in(dir.path()).empty());
}

// A process that does nothing but save is killed at many different moments; whatever is found afterwards
// under a checkpoint's name is complete, and there is always one.
TEST(CheckpointFaults, KilledWhileSaving) {
  const TestDir dir;
  const fs::path run = dir.path();
  const size_t n = 20000;
  save(run, CheckpointKind::rolling, 10, n);
  int64_t last = 10;
  size_t leftovers = 0;
  for (int round = 0; round < 20; ++round) {
    int saved[2];
    ASSERT_EQ(pipe(saved), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int64_t tokens = last + 10;; tokens += 10) {
        save(run, CheckpointKind::rolling, tokens, n);
        if (write(saved[1], "s", 1) != 1) _exit(1);
      }
    }
    close(saved[1]);
    char byte;
    for (int wait = round % 3; wait > 0; --wait)
      ASSERT_EQ(read(saved[0], &byte, 1), 1) << "saving failed by itself";
    usleep(useconds_t(1700 * round));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    close(saved[0]);
    ASSERT_TRUE(WIFSIGNALED(status)) << "saving failed by itself";
    const size_t complete = list_checkpoints(run).size();
    size_t named = 0;
    for (const std::string& name : names_in(run)) named += CheckpointName::parse(name).has_value();
    EXPECT_EQ(named, complete) << "a torn checkpoint has its final name";
    leftovers += names_in(run).size() - named;
    const auto latest = latest_checkpoint(run);
    ASSERT_TRUE(latest);
    EXPECT_GE(latest->name.tokens, last + 10 * (round % 3));
    last = latest->name.tokens;
    expect_sound(latest->path, last, n);
    remove_leftovers(run);
    EXPECT_EQ(names_in(run).size(), complete);
  }
  EXPECT_GT(leftovers, 0u) << "no process was hit in the middle of saving";
}

}  // namespace
}  // namespace sps
