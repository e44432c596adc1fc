// Phasing: the standard model first, the prediction tower from phase.at on (second paper).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/test_dir.h"
#include "base/test_files.h"
#include "data/test_corpus.h"
#include "model/load.h"
#include "train/test_run.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

class PhaseTest : public testing::Test {
 protected:
  // Half of 12 steps: the switch is before step 6.
  RunConfig phased(const std::string& name, double at = 0.5) const {
    RunConfig c = tiny_run(data_, dir_.path() / name);
    c.model.family = "free_pause", c.model.window = kWindowAuto, c.model.ffn = "pooled";
    c.phase.at = at;
    return c;
  }

  TestDir dir_;
  fs::path data_ = make_test_data(dir_);
};

TEST_F(PhaseTest, TheFirstPhaseIsTheStandardRun) {
  RunConfig standard = tiny_run(data_, dir_ / "standard");
  standard.model.family = "standard", standard.model.window = kWindowAuto;
  Trainer a(phased("phased")), b(standard);
  const auto sa = take_steps(a, 6), sb = take_steps(b, 6);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(sa[i].loss, sb[i].loss);
    EXPECT_EQ(sa[i].grad_norm, sb[i].grad_norm);
  }
  EXPECT_EQ(a.model().store().hash(), b.model().store().hash());
  EXPECT_FALSE(a.model().config().has_pred());
  const Trainer::Step step = a.step();
  EXPECT_TRUE(a.model().config().has_pred());
  EXPECT_EQ(step.lr, b.step().lr);
}

// The second phase is a run of the final model that starts from the first phase's shared weights and moments
// and from the new tensors' initial values: made here by hand as a checkpoint, continued, and compared bit by
// bit.
TEST_F(PhaseTest, TheSecondPhaseContinuesWhatIsShared) {
  const RunConfig c = phased("phased");
  run_part(c, 6);
  const LoadedCheckpoint first = load_checkpoint(latest_checkpoint(c.run_dir())->path);
  ASSERT_EQ(first.state.at("first_phase"), true);

  RunConfig direct = phased("direct", 0);
  Trainer initial(direct);  // the final model with its initial values
  std::vector<NamedTensor> weights = named_weights(initial.model().parameters(), initial.model().store());
  AdamWOptimizer fresh(initial.model().store());
  std::vector<NamedTensor> moments = fresh.named_moments();
  const auto fill = [](const SafeTensors& from, const NamedTensor& to) {
    const auto found = from.tensors().find(to.name);
    if (found == from.tensors().end()) return false;
    std::memcpy(to.tensor.data, found->second.data, found->second.bytes);
    return true;
  };
  std::vector<int64_t> updates;
  for (const NamedTensor& w : weights) updates.push_back(fill(first.weights, w) ? 6 : 0);
  for (const NamedTensor& m : moments) fill(*first.optimizer, m);
  ASSERT_EQ(std::count(updates.begin(), updates.end(), 6), std::ptrdiff_t(first.weights.tensors().size()));
  EXPECT_EQ(std::count(updates.begin(), updates.end(), 0), 1 + 2 * 3)
      << "prediction start, three gates a block";

  nlohmann::json config = first.config, state = first.state;
  config["model"] = config["run_model"];
  config["phase"]["at"] = 0.0;
  state["first_phase"] = false, state["optimizer_steps"] = updates;
  save_checkpoint(direct.run_dir(), {CheckpointKind::rolling, first.tokens, config, state, weights, moments});

  Trainer a(c), b(direct);
  ASSERT_EQ(a.steps(), 6);
  ASSERT_EQ(b.steps(), 6);
  for (int i = 0; i < 6; ++i) {
    const Trainer::Step sa = a.step(), sb = b.step();
    EXPECT_EQ(sa.loss, sb.loss) << "step " << 6 + i;
    EXPECT_EQ(sa.lr, sb.lr);
    EXPECT_EQ(a.model().store().hash(), b.model().store().hash()) << "step " << 6 + i;
  }
}

TEST_F(PhaseTest, ContinuesToTheSameBytesOnBothSidesOfTheSwitch) {
  for (const char* dtype : {"f32", "bf16"}) {
    const auto config = [&](const std::string& name) {
      RunConfig c = phased(std::string(dtype) + name);
      c.run.dtype = dtype;
      return c;
    };
    Trainer(config("whole")).run();
    const std::string final = "checkpoints/tokens-000000000000768-final";
    const auto want = folder_content(config("whole").run_dir() / final);
    EXPECT_EQ(want.size(), 4u);
    for (const int64_t at : {4, 5, 6, 7}) {
      const RunConfig c = config("part" + std::to_string(at));
      run_part(c, at);
      Trainer t(c);
      EXPECT_EQ(t.model().config().has_pred(), at > 6) << "the switch belongs to the step after it";
      t.run();
      EXPECT_TRUE(folder_content(c.run_dir() / final) == want) << dtype << ", stopped at " << at;
    }
  }
}

// A checkpoint of the first phase is a standard model, for evaluation and generation too.
TEST_F(PhaseTest, CheckpointsNameTheModelTheyHold) {
  const RunConfig c = phased("phased");
  run_part(c, 4);
  EXPECT_EQ(load_model(c.run_dir(), DType::f32).model->config().family, "standard");
  Trainer(c).run();
  const ModelConfig model = load_model(c.run_dir(), DType::f32).model->config();
  EXPECT_EQ(model.family, "free_pause");
  EXPECT_EQ(model.ffn, FfnMode::pooled);
}

TEST_F(PhaseTest, OnlyModelsThatContainTheStandardOneArePhased) {
  for (const char* family : {"sps", "delayed_state", "reverse_sps", "two_tower", "sequential"}) {
    RunConfig c = phased("never");
    c.model.family = family, c.model.ffn = "";
    const std::string error = error_of([&] { Trainer t(c); });
    EXPECT_PRED2(mentions, error, "phase.at");
    EXPECT_PRED2(mentions, error, family);
  }
}

// The decision is made before each step, so a switch that is due only after the last one would never come.
TEST_F(PhaseTest, ASwitchThatNeverComesIsRefused) {
  const auto load = [](const std::string& at) {
    return load_run_config("demo_free_pause_100k", {"phase.at=" + at});
  };
  EXPECT_PRED2(mentions, error_of([&] { load("0.999"); }), "phase.at = 0.999");
  EXPECT_PRED2(mentions, error_of([&] { load("1"); }), "phase.at = 1");
  // The last step starts at 98304 of 100000 tokens.
  EXPECT_PRED2(mentions, error_of([&] { load("0.98305"); }), "expected at most 0.98304");
  EXPECT_EQ(load("0.98304").phase.at, 0.98304);
  Trainer last(phased("last", 11.0 / 12));
  take_steps(last, 12);
  EXPECT_TRUE(last.model().config().has_pred());
}

}  // namespace
}  // namespace sps
