#include "model/checkpoint_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/test_dir.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

// A checkpoint as the format describes it, made of single files.
fs::path make_checkpoint(const fs::path& run, const CheckpointName& name, bool optimizer = true) {
  const fs::path path = checkpoints_dir(run) / name.text();
  fs::create_directories(path);
  const std::string config = "{\"model\": {\"layers\": 2}}\n";
  write_atomically(path / kConfigFile, config);
  std::vector<float> values(64);
  std::iota(values.begin(), values.end(), float(name.tokens));
  const std::vector<NamedTensor> tensors{{"w", {8, 8}, view(values.data(), 8, 8)}};
  std::vector<CheckpointFile> files{{kConfigFile, {config.size(), hash64(config)}},
                                    {kWeightsFile, write_safetensors(path / kWeightsFile, tensors)}};
  if (optimizer) files.push_back({kOptimizerFile, write_safetensors(path / kOptimizerFile, tensors)});
  write_atomically(path / kStateFile, checkpoint_state_text(name, {{"step", 7}, {"lr", 0.1 + 0.2}}, files));
  return path;
}

const CheckpointName kName{CheckpointKind::named, 2000289792};

// Unlike write_atomically() this does not wait for the disk.
void overwrite(const fs::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary) << bytes;
}

void damage(const fs::path& file, size_t at) {
  std::string bytes = read_text(file);
  bytes.at(at) ^= 1;
  overwrite(file, bytes);
}

TEST(CheckpointName, TextAndBack) {
  EXPECT_EQ((CheckpointName{CheckpointKind::rolling, 100270080}.text()), "rolling-000000100270080");
  EXPECT_EQ(kName.text(), "tokens-000002000289792");
  EXPECT_EQ((CheckpointName{CheckpointKind::pre_decay, 18000248832}.text()),
            "tokens-000018000248832-pre-decay");
  EXPECT_EQ((CheckpointName{CheckpointKind::final, 20000145408}.text()), "tokens-000020000145408-final");
  for (const auto kind :
       {CheckpointKind::rolling, CheckpointKind::named, CheckpointKind::pre_decay, CheckpointKind::final})
    for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{999'999'999'999'999}}) {
      const CheckpointName name{kind, tokens};
      EXPECT_EQ(CheckpointName::parse(name.text()), name);
    }
  for (const char* other :
       {"", "tokens-", "tokens-1", "rolling-0000000000000001", "tokens-00000000000000x",
        "tokens-000002000289792-final.tmp-12", "tokens_000002000289792", "rolling-000002000289792-final",
        "tokens--00002000289792", "tokens-000002000289792-"})
    EXPECT_FALSE(CheckpointName::parse(other)) << other;
}

TEST(CheckpointName, TextSortsLikeTokens) {
  std::vector<std::string> names;
  for (const int64_t tokens : std::initializer_list<int64_t>{9, 10, 99, 100, 20000145408})
    names.push_back(CheckpointName{CheckpointKind::named, tokens}.text());
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
}

TEST(CheckpointFiles, LoadsWhatWasStored) {
  const TestDir dir;
  const fs::path path = make_checkpoint(dir.path(), kName);
  const LoadedCheckpoint loaded = load_checkpoint(path);
  EXPECT_EQ(loaded.kind, CheckpointKind::named);
  EXPECT_EQ(loaded.tokens, 2000289792);
  EXPECT_EQ(loaded.config["model"]["layers"], 2);
  EXPECT_EQ(loaded.state["step"], 7);
  EXPECT_EQ(loaded.state["lr"].get<double>(), 0.1 + 0.2);
  EXPECT_EQ(loaded.weights.at("w").count(), 64);
  ASSERT_TRUE(loaded.optimizer);
  EXPECT_EQ(loaded.optimizer->at("w").count(), 64);
  EXPECT_FALSE(load_checkpoint(path, CheckpointParts::weights).optimizer);
  // A copy under any name is the same checkpoint.
  fs::rename(path, dir / "copy");
  EXPECT_EQ(load_checkpoint(dir / "copy").tokens, 2000289792);
}

TEST(CheckpointFiles, OptimizerMayBeAbsent) {
  const TestDir dir;
  EXPECT_FALSE(load_checkpoint(make_checkpoint(dir.path(), kName, false)).optimizer);
}

TEST(CheckpointFiles, ListsByTokensThenKind) {
  const TestDir dir;
  EXPECT_TRUE(list_checkpoints(dir.path()).empty());
  EXPECT_FALSE(latest_checkpoint(dir.path()));
  const std::vector<CheckpointName> sorted{{CheckpointKind::final, 5},       {CheckpointKind::named, 90},
                                           {CheckpointKind::rolling, 100},   {CheckpointKind::named, 100},
                                           {CheckpointKind::pre_decay, 100}, {CheckpointKind::final, 100}};
  for (auto it = sorted.rbegin(); it != sorted.rend(); ++it) make_checkpoint(dir.path(), *it, false);
  fs::create_directories(checkpoints_dir(dir.path()) / "notes");
  fs::create_directories(checkpoints_dir(dir.path()) / "rolling-000000000000200.tmp-1");
  const auto list = list_checkpoints(dir.path());
  ASSERT_EQ(list.size(), sorted.size());
  for (size_t i = 0; i < list.size(); ++i) EXPECT_EQ(list[i].name, sorted[i]);
  // A finished run resumes to "finished".
  EXPECT_EQ(latest_checkpoint(dir.path())->name.kind, CheckpointKind::final);
}

TEST(CheckpointFiles, TornOnesAreNeverChosen) {
  const TestDir dir;
  const CheckpointName good{CheckpointKind::named, 10};
  make_checkpoint(dir.path(), good);
  const auto latest_is_good = [&] { return latest_checkpoint(dir.path())->name == good; };
  const CheckpointName newer{CheckpointKind::named, 20};
  fs::path path;
  const auto fresh = [&] {
    fs::remove_all(path);
    path = make_checkpoint(dir.path(), newer);
    EXPECT_EQ(latest_checkpoint(dir.path())->name, newer);
  };
  for (const char* file : {kConfigFile, kWeightsFile, kOptimizerFile, kStateFile}) {
    fresh();
    fs::remove(path / file);
    EXPECT_TRUE(latest_is_good()) << file << " missing";
    fresh();
    fs::resize_file(path / file, fs::file_size(path / file) - 2);  // "}\n" of JSON
    EXPECT_TRUE(latest_is_good()) << file << " truncated";
    fresh();
    fs::resize_file(path / file, fs::file_size(path / file) / 2);
    EXPECT_TRUE(latest_is_good()) << file << " cut in half";
    fresh();
    overwrite(path / file, "");
    EXPECT_TRUE(latest_is_good()) << file << " empty";
  }
  fresh();
  fs::rename(path, checkpoints_dir(dir.path()) / CheckpointName{CheckpointKind::named, 30}.text());
  path = checkpoints_dir(dir.path()) / CheckpointName{CheckpointKind::named, 30}.text();
  EXPECT_TRUE(latest_is_good()) << "a checkpoint under a name that promises more tokens";
}

TEST(CheckpointFiles, EveryDamagedByteOfTheStateIsNoticed) {
  const TestDir dir;
  const fs::path path = make_checkpoint(dir.path(), kName), state = path / kStateFile;
  const std::string good = read_text(state);
  size_t refused = 0;
  for (size_t i = 0; i < good.size(); ++i) {
    damage(state, i);
    try {
      // Spaces may change, and so may the last of 17 digits of a number: what it says is the same.
      const LoadedCheckpoint loaded = load_checkpoint(path);
      EXPECT_EQ(loaded.state, (nlohmann::json{{"step", 7}, {"lr", 0.1 + 0.2}})) << "byte " << i;
      EXPECT_EQ(loaded.kind, kName.kind);
      EXPECT_EQ(loaded.tokens, kName.tokens);
    } catch (const Error& e) {
      EXPECT_PRED2(mentions, std::string(e.what()), state.string());
      ++refused;
    }
    overwrite(state, good);
  }
  const auto spaces = size_t(std::count_if(good.begin(), good.end(), [](char c) { return std::isspace(c); }));
  EXPECT_GE(refused, good.size() - spaces - 1);
}

TEST(CheckpointFiles, DamageIsNamedOnLoading) {
  const TestDir dir;
  const fs::path path = make_checkpoint(dir.path(), kName);
  for (const char* name : {kConfigFile, kWeightsFile, kOptimizerFile}) {
    const fs::path file = path / name;
    const std::string good = read_text(file);
    damage(file, good.size() / 2);
    const std::string error = error_of([&] { load_checkpoint(path); });
    EXPECT_TRUE(error.starts_with(file.string() + " is damaged: its hash is ")) << error;
    overwrite(file, good + "x");
    EXPECT_EQ(error_of([&] { load_checkpoint(path); }),
              fmt::format("{} has {} bytes, expected {}", file.string(), good.size() + 1, good.size()));
    fs::remove(file);
    EXPECT_PRED2(mentions, error_of([&] { load_checkpoint(path); }), file.string());
    overwrite(file, good);
  }
  EXPECT_NO_THROW(load_checkpoint(path));
  // Weights alone do not need a sound optimizer.
  damage(path / kOptimizerFile, 100);
  EXPECT_NO_THROW(load_checkpoint(path, CheckpointParts::weights));
  EXPECT_THROW(load_checkpoint(path), Error);
  EXPECT_EQ(error_of([&] { load_checkpoint(dir / "nothing"); }),
            (dir / "nothing").string() + " is not a complete checkpoint: state.json is missing");
}

TEST(CheckpointFiles, FindsACheckpointOrTheLatestOfARun) {
  const TestDir dir;
  const fs::path path = make_checkpoint(dir.path(), kName);
  EXPECT_EQ(find_checkpoint(path), path);
  EXPECT_EQ(find_checkpoint(dir.path()), path);
  fs::create_directories(dir / "other");
  const auto file = dir.write("file", "x");
  const auto error = [](const fs::path& p) { return error_of([&] { find_checkpoint(p); }); };
  EXPECT_EQ(error(dir / "nothing"), "the checkpoint " + (dir / "nothing").string() + " does not exist");
  EXPECT_PRED2(mentions, error(dir / "other"), "neither a checkpoint nor a run with a complete checkpoint");
  EXPECT_PRED2(mentions, error(file), "neither a checkpoint nor a run with a complete checkpoint");
}

TEST(CheckpointFiles, StateMustBeStorable) {
  EXPECT_PRED2(mentions, error_of([] {
                 checkpoint_state_text(kName, {{"loss", std::nan("")}}, {});
               }),
               "not finite");
}

}  // namespace
}  // namespace sps
