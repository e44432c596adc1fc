// Training on a GPU: it follows the CPU, gives the same bits every time, and continues to the same bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/test_dir.h"
#include "base/test_files.h"
#include "data/test_corpus.h"
#include "tensor/device.h"
#include "train/test_run.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

class GpuTrainerTest : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "there is no GPU here";
  }
  // Heads as real models have them, windows of more than a tile.
  RunConfig run(const std::string& name, const std::string& family, const std::string& dtype) const {
    RunConfig c = tiny_run(data_, dir_.path() / name);
    c.model.family = family;
    c.model.window = family == "standard" ? kWindowAuto : 16;
    c.model.d_model = 128, c.model.heads = 2, c.model.d_ffn = {192}, c.model.context = 160;
    c.train.tokens *= 10, c.train.eval_tokens *= 10;
    c.schedule.warmup_tokens *= 10, c.schedule.decay_tokens *= 10;
    c.optim.lr = 2e-3, c.optim.min_lr = 2e-4;
    c.run.device = "cuda", c.run.dtype = dtype;
    return c;
  }

  TestDir dir_;
  fs::path data_ = make_test_data(dir_);
};

TEST_F(GpuTrainerTest, FollowsTheCpu) {
  for (const char* family : {"standard", "sps", "free_pause"}) {
    RunConfig c = run("follow", family, "f32");
    Trainer gpu(c);
    c.run.device = "cpu";
    Trainer cpu(c);
    EXPECT_EQ(gpu.model().store().hash(), cpu.model().store().hash());
    const auto got = take_steps(gpu, 12), want = take_steps(cpu, 12);
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(got[i].scored, want[i].scored);
      EXPECT_NEAR(got[i].loss, want[i].loss, 1e-4 * want[i].loss) << family << ", step " << i;
      EXPECT_NEAR(got[i].grad_norm, want[i].grad_norm, 1e-2 * want[i].grad_norm) << family << ", step " << i;
    }
    EXPECT_LT(want.back().loss, want.front().loss);
    EXPECT_NEAR(gpu.validate().nll, cpu.validate().nll, 1e-3 * cpu.validate().nll);
  }
}

TEST_F(GpuTrainerTest, Bf16StaysNearF32) {
  Trainer wide(run("wide", "sps", "f32")), narrow(run("narrow", "sps", "bf16"));
  const auto want = take_steps(wide, 12), got = take_steps(narrow, 12);
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i].loss, want[i].loss, 0.02 * want[i].loss);
}

// 200 steps at a rate at which a run does not magnify its roundings: weights moved by 1e-6 of themselves move
// no loss by more. At four times this rate it is a tenth of a loss.
RunConfig calm(RunConfig c) {
  c.train.tokens = 200 * 640, c.train.eval_tokens = 640;
  c.schedule.warmup_tokens = 20 * 640, c.schedule.decay_tokens = 60 * 640;
  c.optim.lr = 5e-4, c.optim.min_lr = 0;
  return c;
}

std::vector<double> losses(const RunConfig& c) {
  Trainer trainer(c);
  std::vector<double> all;
  for (const Trainer::Step& step : take_steps(trainer, 200)) all.push_back(step.loss);
  return all;
}

// Mean over the steps of the relative difference.
double mean_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] / b[i] - 1);
  return sum / double(a.size());
}

TEST_F(GpuTrainerTest, FollowsTheCpuFor200CalmSteps) {
  for (const char* family : {"standard", "sps", "free_pause"}) {
    RunConfig c = calm(run("calm", family, "f32"));
    const auto f32 = losses(c);
    c.run.device = "cpu";
    const auto cpu = losses(c);
    for (size_t i = 0; i < cpu.size(); ++i)
      EXPECT_NEAR(f32[i], cpu[i], 1e-4 * cpu[i]) << family << ", step " << i;
    EXPECT_LT(cpu.back(), 0.2 * cpu.front());
    c.run.device = "cuda", c.run.dtype = "bf16";
    const auto bf16 = losses(c);
    c.train.seed += 1;
    EXPECT_LT(mean_difference(bf16, cpu), mean_difference(bf16, losses(c)))
        << family << ": two seeds differ less";
  }
}

TEST_F(GpuTrainerTest, EveryRunOfTheSameConfigIsTheSame) {
  for (const char* dtype : {"f32", "bf16"}) {
    Trainer a(run("a", "sps", dtype)), b(run("b", "sps", dtype));
    const auto first = take_steps(a, 12), second = take_steps(b, 12);
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(first[i].loss, second[i].loss) << dtype << ", step " << i;
      EXPECT_EQ(first[i].grad_norm, second[i].grad_norm) << dtype << ", step " << i;
    }
    EXPECT_EQ(a.model().store().hash(), b.model().store().hash()) << dtype;
  }
}

TEST_F(GpuTrainerTest, ContinuesToTheSameBytesFromAnyStep) {
  for (const char* family : {"sps", "sequential"}) {
    RunConfig c = run(std::string("whole-") + family, family, "bf16");
    if (std::string(family) == "sequential") c.model.window = kWindowAuto;
    c.train.eval_every_tokens = c.train.save_every_tokens = 4 * 640;
    Trainer(c).run();
    const auto want = folder_content(c.run_dir() / "checkpoints");
    for (const int64_t at : {1, 7}) {
      c.run.dir = (dir_ / fmt::format("part-{}-{}", family, at)).string();
      run_part(c, at);
      EXPECT_EQ(Trainer(c).run().end, RunEnd::finished);
      size_t compared = 0;
      for (const auto& [name, bytes] : folder_content(c.run_dir() / "checkpoints"))
        if (!name.starts_with("rolling-")) {
          EXPECT_TRUE(want.at(name) == bytes) << name << ", stopped at " << at;
          ++compared;
        }
      EXPECT_GT(compared, 0u);
    }
  }
}

// Two micro-batches a step, in each of which another number of rows carries a loss; one model changes on the
// way.
TEST_F(GpuTrainerTest, GraphsChangeNoBit) {
  for (const char* dtype : {"f32", "bf16"})
    for (const char* family : {"standard", "sps", "free_pause", "free_pause_pooled_token", "sequential"}) {
      const std::string name = std::string(dtype) + "-" + family;
      const bool pooled = name.find("pooled") != std::string::npos;
      RunConfig c = run("graphs-" + name, pooled ? "free_pause" : family, dtype);
      if (pooled) c.model.ffn = "pooled", c.model.pred_input = "token";
      if (std::string(family) == "sequential") c.model.window = kWindowAuto;
      if (std::string(family) == "sps") c.train.recompute = "block";
      if (std::string(family) == "free_pause") c.phase.at = 0.5;
      c.train.eval_every_tokens = c.train.save_every_tokens = 4 * 640;
      RunConfig plain = c;
      plain.run.graphs = false, plain.run.dir = (dir_ / ("plain-" + name)).string();
      Trainer with(c), without(plain);
      const auto got = take_steps(with, 12), want = take_steps(without, 12);
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_EQ(got[i].loss, want[i].loss) << name << ", step " << i;
        EXPECT_EQ(got[i].grad_norm, want[i].grad_norm) << name << ", step " << i;
      }
      EXPECT_EQ(with.model().store().hash(), without.model().store().hash()) << name;
      Trainer(c).run();
      Trainer(plain).run();
      const auto files = folder_content(c.run_dir() / "checkpoints"),
                 same = folder_content(plain.run_dir() / "checkpoints");
      EXPECT_GT(files.size(), 0u);
      EXPECT_EQ(files.size(), same.size());
      for (const auto& [file, bytes] : files) EXPECT_TRUE(same.at(file) == bytes) << name << ": " << file;
    }
}

// A loss or a gradient that is not finite ends the run, and weights and moments are what they were.
TEST_F(GpuTrainerTest, WhatIsNotFiniteUpdatesNothing) {
  for (const bool graphs : {true, false})
    for (const char* poisoned : {"state.1.out", "final_norm"}) {
      RunConfig c = run(fmt::format("poison-{}-{}", poisoned, graphs), "sps", "bf16");
      c.run.graphs = graphs;
      Trainer t(c);
      take_steps(t, 4);
      ParameterStore& store = t.model().store();
      const std::vector<Parameter>& list = store.list();
      const auto at =
          std::ranges::find_if(list, [&](const Parameter& p) { return p.name == poisoned; }) - list.begin();
      const Tensor weight = store.weight(int(at));
      const float infinite = std::numeric_limits<float>::infinity();
      Tensor one = weight.rows_from(0, 1).cols_from(0, 1);
      copy_tensor(view(&infinite, 1, 1), one);
      store.round();
      const uint64_t before = store.hash();
      EXPECT_THROW(t.step(), Error) << poisoned;
      EXPECT_EQ(store.hash(), before) << poisoned;
      EXPECT_EQ(t.steps(), 4);
    }
}

// Once a step has run, nothing is allocated any more.
TEST_F(GpuTrainerTest, StepsTakeNoMemory) {
  Trainer trainer(run("steady", "sps", "bf16"));
  trainer.step();
  const size_t growths = device_scratch_growths();
  take_steps(trainer, 5);
  EXPECT_EQ(device_scratch_growths(), growths);
}

TEST(GpuTest, ABuildOrMachineWithoutOneSaysSo) {
  if (gpu_count() > 0) GTEST_SKIP() << "there is a GPU here";
  TestDir dir;
  RunConfig c = tiny_run(make_test_data(dir), dir / "run");
  c.run.device = "cuda";
  try {
    const Trainer trainer(c);
    FAIL() << "a trainer on no GPU";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::failure);
    EXPECT_TRUE(std::string(e.what()).find("CUDA") != std::string::npos) << e.what();
  }
  EXPECT_FALSE(fs::exists(dir / "run"));
}

}  // namespace
}  // namespace sps
