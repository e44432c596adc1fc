// Stored baselines (tests/golden/): initial weights, parameter counts and real optimizer steps of every
// family, and the order of the training data. A number that moves is a decision: SPS_UPDATE_GOLDEN=1 writes
// the files anew.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/json.h"
#include "data/test_corpus.h"
#include "train/trainer.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr double kTolerance = 1e-5;  // relative: sums in other orders, on other instruction sets

bool updating() {
  const char* value = std::getenv("SPS_UPDATE_GOLDEN");
  return value != nullptr && std::string(value) == "1";
}

fs::path golden(const std::string& name) {
  return fs::path(SPS_SOURCE_DIR) / "tests" / "golden" / name;
}

// For messages: where a number that differs was computed.
std::string computed_on() {
  std::string model = "unknown CPU";
  std::ifstream cpu("/proc/cpuinfo");
  for (std::string line; std::getline(cpu, line);)
    if (line.starts_with("model name")) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  std::string flags = "GCC " __VERSION__;
#ifdef __OPTIMIZE__
  flags += ", optimized";
#endif
#ifdef __FMA__
  flags += ", FMA";
#endif
#ifdef __AVX2__
  flags += ", AVX2";
#endif
#ifdef __AVX512F__
  flags += ", AVX-512";
#endif
  return model + ", built with " + flags;
}

// Names a preset: a recipe of the demonstration scale and what is set on top of it.
struct Preset {
  const char* name;
  std::vector<std::string> overrides = {};
};

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all{
      {"standard"},
      {"sps_w16"},
      {"sps_wfull"},
      {"delayed_state_w16"},
      {"reverse_sps_w16"},
      {"free_pause"},
      {"free_pause_w16"},
      {"free_pause_pooled"},
      {"free_pause_pooled_tok"},
      {"two_tower_2+2"},
      {"sequential_2+2"},
      {"sequential_2+2_state", {"pred_input=state", "tie_head=true"}},
  };
  return all;
}

// Four steps of 4 windows of 128 tokens in two micro-batches: the rate of one batch (twice), of the plateau,
// of the first step of the decay. No more, and at a calm rate: each step of AdamW multiplies what rounding
// does to small gradients, and at the recipes' rate another order of sums shows after the third.
RunConfig four_steps(const Preset& preset, const fs::path& data) {
  std::string recipe = "demo_" + std::string(preset.name);
  if (recipe.ends_with("_state")) recipe.resize(recipe.size() - 6);
  std::vector<std::string> overrides{"context=128",
                                     "train.global_batch=4",
                                     "train.micro_batch=2",
                                     "train.tokens=2048",
                                     "schedule.warmup_tokens=768",
                                     "schedule.decay_tokens=768",
                                     "optim.lr=0.0005",
                                     "optim.min_lr=0.0001",
                                     "run.dtype=f32",
                                     "data.dir=" + data.string()};
  overrides.insert(overrides.end(), preset.overrides.begin(), preset.overrides.end());
  return load_run_config(recipe + "_100k", overrides);
}

Json compute(const Preset& preset, const fs::path& data) {
  Trainer trainer(four_steps(preset, data));
  Json result{{"parameters", trainer.model().parameters().count()},
              {"non_embedding", trainer.model().parameters().non_embedding()},
              {"initial_weights", hex(trainer.model().store().hash())}};
  for (int i = 0; i < 4; ++i) {
    const Trainer::Step s = trainer.step();
    result["lr"].push_back(s.lr);
    result["scored"].push_back(s.scored);
    result["loss"].push_back(s.loss);
    result["grad_norm"].push_back(s.grad_norm);
  }
  return result;
}

void expect_near(const Json& got, const Json& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    const double g = got[i], w = want[i];
    EXPECT_NEAR(g, w, kTolerance * std::fabs(w)) << what << " of step " << i << ": off by "
                                                 << std::fabs(g / w - 1) << "; computed on " << computed_on();
  }
}

void store(const Json& values, const fs::path& path) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << values.dump(1) << "\n";
}

class GoldenTest : public testing::Test {
 protected:
  TestDir dir_;
  fs::path data_ = make_test_data(dir_, "data", 300, 1, 60);
};

TEST_F(GoldenTest, Steps) {
  const fs::path path = golden("steps.json");
  Json now{{"data", TokenFile::open(data_, "train").meta()->train.hash}};
  for (const Preset& preset : presets()) now["presets"][preset.name] = compute(preset, data_);
  if (updating()) return store(now, path);
  const Json want = Json::parse(read_text(path));
  ASSERT_EQ(now.at("data"), want.at("data")) << "the corpus of this test has changed";
  ASSERT_EQ(now.at("presets").size(), want.at("presets").size());
  for (const auto& [name, values] : want.at("presets").items()) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(now["presets"].contains(name));
    const Json& got = now["presets"][name];
    for (const char* key : {"parameters", "non_embedding", "initial_weights", "lr", "scored"})
      EXPECT_EQ(got.at(key), values.at(key)) << key << "; computed on " << computed_on();
    expect_near(got.at("loss"), values.at("loss"), "loss");
    expect_near(got.at("grad_norm"), values.at("grad_norm"), "gradient norm");
  }
}

// Models that differ must not have the same numbers: a preset that lost its meaning would.
TEST_F(GoldenTest, PresetsAreDifferentModels) {
  if (updating()) GTEST_SKIP() << "the stored file is being written";
  const Json want = Json::parse(read_text(golden("steps.json"))).at("presets");
  for (const auto& [a, first] : want.items())
    for (const auto& [b, second] : want.items())
      if (a < b) {
        EXPECT_NE(first.at("loss").back(), second.at("loss").back()) << a << " and " << b;
      }
}

// Rates of the steps above, by hand: the peak is 5e-4, the end 1e-4, the last step is 512 of the 768 tokens
// of decay before the end.
TEST_F(GoldenTest, StepsCrossTheWholeSchedule) {
  if (updating()) GTEST_SKIP() << "the stored file is being written";
  const Json want = Json::parse(read_text(golden("steps.json"))).at("presets");
  for (const auto& [name, values] : want.items()) {
    const double rates[] = {5e-4 * 512 / 768, 5e-4 * 512 / 768, 5e-4, 1e-4 + 512.0 / 768 * 4e-4};
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(values.at("lr")[i].get<double>(), rates[i], 1e-12) << name;
  }
}

// The stream of windows from the start and from a resume at these many samples.
Json streams(const fs::path& data) {
  Json all;
  const TokenFile file = TokenFile::open(data, "train");
  for (const int64_t chunk : {1, 8}) {
    for (const uint64_t seed : {1337, 1}) {
      Json& one = all[fmt::format("seed {}, chunks of {}", seed, chunk)];
      Sampler sampler(file, {128, seed, chunk});
      one["units"] = sampler.units();
      for (const uint64_t at : {0, 1000, 300000}) {
        Sampler resumed(file, {128, seed, chunk});
        one["windows"][std::to_string(at)] = resumed.stream_hash(at, at + 64);
      }
      Json& starts = one["first_starts"];
      for (uint64_t n = 0; n < 16; ++n) starts.push_back(sampler.start(n));
    }
  }
  return all;
}

TEST_F(GoldenTest, DataOrder) {
  const fs::path path = golden("data_order.json");
  const Json now = streams(data_);
  if (updating()) return store(now, path);
  EXPECT_EQ(now, Json::parse(read_text(path)));
}

// A sampler that has read its way to a sample and one that starts there read the same.
TEST_F(GoldenTest, DataOrderIsTheSameAfterAResume) {
  const TokenFile file = TokenFile::open(data_, "train");
  Sampler through(file, {128, 1337, 1});
  const auto units = uint64_t(through.units());
  ASSERT_LT(units, 1000u);
  uint64_t next = 0;
  for (const uint64_t at : {uint64_t{1}, units - 1, units, units + 1, uint64_t{1000}}) {
    while (next < at) through.start(next++);
    Sampler resumed(file, {128, 1337, 1});
    EXPECT_EQ(resumed.stream_hash(at, at + 64), through.stream_hash(at, at + 64)) << at;
    next = at + 64;
  }
}

}  // namespace
}  // namespace sps
