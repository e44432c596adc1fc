#include "train/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "base/test_dir.h"
#include "base/test_files.h"
#include "base/threads.h"
#include "data/test_corpus.h"
#include "model/load.h"
#include "score/model_input.h"
#include "train/test_run.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

class TrainerTest : public testing::Test {
 protected:
  RunConfig run(const std::string& name = "run") const { return tiny_run(data_, dir_.path() / name); }

  TestDir dir_;
  fs::path data_ = make_test_data(dir_);
};

template <class T>
T* weight(Trainer& t, const std::string& name) {
  const auto& list = t.model().store().list();
  for (size_t i = 0; i < list.size(); ++i)
    if (list[i].name == name) return t.model().store().weight(int(i)).as<T>();
  ADD_FAILURE() << "no parameter " << name;
  return nullptr;
}

void expect_same(const std::vector<Trainer::Step>& a, const std::vector<Trainer::Step>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].loss, b[i].loss) << "step " << i;
    EXPECT_EQ(a[i].grad_norm, b[i].grad_norm) << "step " << i;
    EXPECT_EQ(a[i].lr, b[i].lr) << "step " << i;
    EXPECT_EQ(a[i].scored, b[i].scored) << "step " << i;
  }
}

// The micro-batches of a step have different numbers of scored positions: a mean of their means is another
// number.
void expect_unequal_micro_batches(const RunConfig& c, int64_t micro) {
  const TokenFile file = TokenFile::open(c.data.dir, "train");
  Sampler sampler(file, {c.model.context, uint64_t(c.train.seed), c.train.chunk_units});
  std::vector<int64_t> starts;
  std::set<int64_t> scored;
  for (int64_t at = 0; at < c.train.global_batch; at += micro) {
    sampler.batch(uint64_t(at), micro, starts);
    Batch batch;
    batch.fill(file, starts, c.model.context, {file.meta()->eot});
    scored.insert(batch.scored);
  }
  EXPECT_GT(scored.size(), 1u) << "choose another seed of the data";
}

TEST_F(TrainerTest, AccumulationGivesTheSameFirstStep) {
  RunConfig whole = run(), parts = run();
  whole.train.micro_batch = 4, parts.train.micro_batch = 1;
  expect_unequal_micro_batches(parts, 1);
  Trainer a(whole), b(parts);
  const Trainer::Step sa = a.step(), sb = b.step();
  EXPECT_EQ(sa.scored, sb.scored);
  EXPECT_NEAR(sa.loss, sb.loss, 1e-6 * sa.loss);
  EXPECT_NEAR(sa.grad_norm, sb.grad_norm, 1e-6 * sa.grad_norm);
}

TEST_F(TrainerTest, AccumulationGivesTheSameRunUpToRounding) {
  RunConfig whole = run(), parts = run();
  whole.train.micro_batch = 4, parts.train.micro_batch = 1;
  whole.run.dtype = parts.run.dtype = "f64";
  Trainer a(whole), b(parts);
  for (int64_t i = 0; i < a.total_steps(); ++i) {
    const Trainer::Step sa = a.step(), sb = b.step();
    EXPECT_NEAR(sa.loss, sb.loss, 1e-11 * sa.loss) << "step " << i;
    EXPECT_NEAR(sa.grad_norm, sb.grad_norm, 1e-10 * sa.grad_norm) << "step " << i;
  }
  const Tensor wa = a.model().store().all_weights(), wb = b.model().store().all_weights();
  double largest = 0;
  for (int64_t i = 0; i < wa.cols; ++i)
    largest = std::max(largest, std::fabs(wa.as<double>()[i] - wb.as<double>()[i]));
  // Adam divides by the root of the second moment: where a gradient is 1e-8 or less its rounding counts in
  // full.
  EXPECT_LT(largest, 1e-8);
}

TEST_F(TrainerTest, ThreadsDoNotChangeABit) {
  for (const char* dtype : {"f32", "bf16"}) {
    std::vector<Trainer::Step> steps[2];
    uint64_t hash[2];
    for (const int threads : {1, 2}) {
      RunConfig c = run();
      c.run.dtype = dtype, c.run.threads = threads;
      // Rows enough for several pieces in every operation.
      c.model.context = 64, c.train.global_batch = 8, c.train.micro_batch = 4, c.train.tokens = 12 * 512;
      c.schedule.warmup_tokens = 1024, c.schedule.decay_tokens = 2048;
      Trainer t(c);
      steps[threads - 1] = take_steps(t, 6);
      hash[threads - 1] = t.model().store().hash();
    }
    expect_same(steps[0], steps[1]);
    EXPECT_EQ(hash[0], hash[1]) << dtype;
  }
}

// Once a validation batch was read into the variable that held the training batch.
// Memory may be traded for time in the middle of a run, and its optimizer takes what was planned.
TEST_F(TrainerTest, RecomputationMayChangeWithinARun) {
  RunConfig kept = run("kept"), again = run("again");
  run_part(again, 5);
  again.train.recompute = "block";
  Trainer a(kept), b(again);
  EXPECT_EQ(b.steps(), 5);
  EXPECT_EQ(b.model().options().recompute, Recompute::block);
  take_steps(a, 9), take_steps(b, 4);
  EXPECT_EQ(a.model().store().hash(), b.model().store().hash());
  EXPECT_EQ(AdamWOptimizer(a.model().store()).bytes(),
            plan_memory(a.model_config(), a.model().options()).moments);
}

TEST_F(TrainerTest, ValidationDoesNotTouchTraining) {
  Trainer with(run()), without(run());
  std::vector<Trainer::Step> a, b;
  for (int64_t i = 0; i < with.total_steps(); ++i) {
    with.validate();
    a.push_back(with.step());
    with.validate();
    b.push_back(without.step());
  }
  expect_same(a, b);
  EXPECT_EQ(with.model().store().hash(), without.model().store().hash());
}

TEST_F(TrainerTest, EveryRunOfTheSameConfigIsTheSame) {
  Trainer a(run()), b(run());
  expect_same(take_steps(a, 5), take_steps(b, 5));
  EXPECT_EQ(a.model().store().hash(), b.model().store().hash());
  RunConfig other = run();
  other.train.seed = 7;
  Trainer c(other);
  EXPECT_NE(c.step().loss, Trainer(run()).step().loss);
}

TEST_F(TrainerTest, TheLossFallsAndTheRateFollowsTheSchedule) {
  Trainer t(run());
  const auto steps = take_steps(t, 12);
  EXPECT_NEAR(steps[0].loss, std::log(320.0), 0.1);
  EXPECT_LT(steps[11].loss, steps[0].loss - 1);
  // Steps 0 and 1 have the rate of one batch; warm-up ends at 2 batches, the decay starts at 8 of 12.
  const double want[] = {5e-3, 5e-3, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2, 1e-2, 7.75e-3, 5.5e-3, 3.25e-3};
  for (int i = 0; i < 12; ++i) EXPECT_NEAR(steps[size_t(i)].lr, want[i], 1e-12) << "step " << i;
}

TEST_F(TrainerTest, ABatchWithNothingScoredChangesNothing) {
  RunConfig c = run();
  std::string ends;
  for (int i = 0; i < 400; ++i) ends += std::string("\0\1", 2);
  dir_.write("ends/train.bin", ends);
  dir_.write("ends/val.bin", ends);
  c.data.dir = (dir_ / "ends").string(), c.model.eot = 256, c.model.vocab = 320;
  Trainer t(c);
  const uint64_t before = t.model().store().hash();
  for (const Trainer::Step& s : take_steps(t, 3)) {
    EXPECT_EQ(s.scored, 0);
    EXPECT_EQ(s.loss, 0);
    EXPECT_EQ(s.grad_norm, 0);
  }
  EXPECT_EQ(t.steps(), 3);
  EXPECT_EQ(t.model().store().hash(), before);
  stop(t);
  const LoadedCheckpoint saved = load_checkpoint(latest_checkpoint(c.run_dir())->path);
  for (const auto& updates : saved.state.at("optimizer_steps")) EXPECT_EQ(updates, 0);
  for (const auto& [name, moment] : saved.optimizer->tensors()) {
    const std::string bytes(static_cast<const char*>(moment.data), moment.bytes);
    EXPECT_EQ(bytes.find_first_not_of('\0'), std::string::npos) << name;
  }
}

// No meta.json says what the largest id is, and the first steps would not come across this one.
TEST_F(TrainerTest, AnIdOutsideTheVocabularyIsFoundBeforeTheFirstStep) {
  RunConfig c = run();
  std::string ids;
  for (int i = 0; i < 5000; ++i) ids += std::string("\7\0", 2);
  dir_.write("bare/train.bin", ids + std::string("\x40\1\0\0", 4));
  dir_.write("bare/val.bin", ids);
  c.data.dir = (dir_ / "bare").string(), c.model.eot = 256, c.model.vocab = 320;
  Trainer t(c);
  EXPECT_PRED2(mentions, error_of([&] { t.run(nullptr); }),
               "train.bin: token 5000 is 320, but the vocabulary has 320 ids");
  EXPECT_EQ(t.steps(), 0);
}

// After the error the weights, the moments and the files are what they were, so the run can go on from there.
void expect_harmless_stop(const RunConfig& c, const std::function<float*(Trainer&)>& poisoned,
                          const std::string& kind) {
  Trainer undisturbed(c), t(c);
  take_steps(undisturbed, 5);
  take_steps(t, 5);
  stop(t);
  const auto checkpoints = folder_content(c.run_dir() / "checkpoints");
  float* w = poisoned(t);
  const float good = *w;
  *w = std::numeric_limits<float>::quiet_NaN();
  const uint64_t weights = t.model().store().hash();
  const std::string error = error_of([&] { t.step(); });
  EXPECT_PRED2(mentions, error, "step 5");
  EXPECT_PRED2(mentions, error, kind);
  EXPECT_PRED2(mentions, error, "gradient of ");
  bool names_tensor = false;
  for (const Parameter& p : t.model().store().list())
    names_tensor |= mentions(error, "gradient of " + p.name);
  EXPECT_TRUE(names_tensor) << error;
  EXPECT_PRED2(mentions, error, latest_checkpoint(c.run_dir())->path.string());
  EXPECT_EQ(t.model().store().hash(), weights);
  EXPECT_EQ(t.steps(), 5);
  error_of([&] { t.run(); });
  EXPECT_EQ(folder_content(c.run_dir() / "checkpoints"), checkpoints);
  *w = good;
  expect_same(take_steps(t, 3), take_steps(undisturbed, 3));
  EXPECT_EQ(t.model().store().hash(), undisturbed.model().store().hash());
  Trainer again(c);
  EXPECT_EQ(again.steps(), 5);
}

TEST_F(TrainerTest, ALossThatIsNotANumberStopsTheRun) {
  expect_harmless_stop(
      run(), [](Trainer& t) { return weight<float>(t, "state.1.out"); }, "the loss is not finite");
}

// Only the end-of-text positions, which carry no loss, see the poisoned row: the loss stays finite.
TEST_F(TrainerTest, AFiniteLossWithABadGradientStopsTheRun) {
  RunConfig c = run();
  c.model.family = "standard", c.model.window = kWindowAuto, c.model.tie_head = "false";
  expect_harmless_stop(
      c, [](Trainer& t) { return weight<float>(t, "embed") + 256 * 16; }, "step 5: the gradient of ");
}

TEST_F(TrainerTest, StopsWithoutACheckpointSaySo) {
  Trainer t(run());
  *weight<float>(t, "final_norm") = std::numeric_limits<float>::infinity();
  EXPECT_PRED2(mentions, error_of([&] { t.run(); }), "there is no checkpoint yet");
  EXPECT_FALSE(latest_checkpoint(run().run_dir()));
}

// Decay acts on masters, not on rounded weights: updates of 1e-3 and less are not lost in a bf16 run.
TEST_F(TrainerTest, DecayShrinksTheMatricesOfABf16Run) {
  RunConfig c = run();
  c.run.dtype = "bf16";
  c.optim.lr = 1e-6, c.optim.min_lr = 1e-7,
  c.optim.weight_decay = 400;  // 4e-4 a step; the gradient moves 1e-6
  Trainer t(c);
  const float before = weight<float>(t, "state.0.gate_up")[0], norm = weight<float>(t, "state.0.norm1")[0];
  double kept = 1;
  for (const Trainer::Step& s : take_steps(t, 12)) kept *= 1 - s.lr * 400;
  EXPECT_LT(kept, 0.997);
  EXPECT_NEAR(weight<float>(t, "state.0.gate_up")[0], before * kept, 12e-6);
  EXPECT_NEAR(weight<float>(t, "state.0.norm1")[0], norm, 12e-6);
}

TEST_F(TrainerTest, ARunThatHasFinishedIsNotTouched) {
  RunConfig c = run();
  Trainer first(c);
  const RunResult result = first.run();
  EXPECT_EQ(result.end, RunEnd::finished);
  EXPECT_EQ(result.steps, 12);
  EXPECT_EQ(result.tokens, 768);
  const auto files = folder_content(c.run_dir());
  Trainer again(c);
  const RunResult later = again.run();
  EXPECT_EQ(later.end, RunEnd::already_finished);
  EXPECT_EQ(later.steps, 12);
  EXPECT_EQ(later.validation.nll, result.validation.nll);
  EXPECT_EQ(later.validation.scored, result.validation.scored);
  EXPECT_EQ(folder_content(c.run_dir()), files);
}

TEST_F(TrainerTest, ContinuesToTheSameBytesFromAnyStep) {
  RunConfig c = run("whole");
  c.train.eval_every_tokens = c.train.save_every_tokens = 4 * 64;
  Trainer(c).run();
  const auto want = folder_content(c.run_dir() / "checkpoints");
  EXPECT_TRUE(want.contains("tokens-000000000000256/state.json"));
  EXPECT_TRUE(want.contains("tokens-000000000000512-pre-decay/state.json"));
  EXPECT_TRUE(want.contains("tokens-000000000000768-final/state.json"));
  for (const int64_t at : {1, 3, 4, 5, 8, 11}) {
    c.run.dir = (dir_ / ("part" + std::to_string(at))).string();
    run_part(c, at);
    EXPECT_EQ(Trainer(c).run().end, RunEnd::finished);
    for (const auto& [name, bytes] : folder_content(c.run_dir() / "checkpoints"))
      if (!name.starts_with("rolling-")) {
        EXPECT_TRUE(want.at(name) == bytes) << name << ", stopped at " << at;
      }
    // What was due when the run stopped is not forgotten.
    for (const auto& [name, bytes] : want) {
      const auto parsed = CheckpointName::parse(name.substr(0, name.find('/')));
      if (parsed->tokens < at * 64) continue;
      EXPECT_TRUE(fs::exists(c.run_dir() / "checkpoints" / name)) << name << ", stopped at " << at;
    }
  }
}

TEST_F(TrainerTest, DataThatEndBeginAgain) {
  RunConfig c = run("whole");
  c.data.dir = make_test_data(dir_, "small", 12, 3).string();
  const TokenFile file = TokenFile::open(c.data.dir, "train");
  const Sampler sampler(file, {c.model.context, uint64_t(c.train.seed), 1});
  ASSERT_LT(2 * sampler.units(), 12 * 4) << "the run must pass the end of the data twice";
  Trainer whole(c);
  take_steps(whole, 12);
  for (const int64_t at : {int64_t{2}, sampler.units() / 4 + 1, 2 * sampler.units() / 4 + 1}) {
    c.run.dir = (dir_ / ("part" + std::to_string(at))).string();
    run_part(c, at);
    Trainer t(c);
    EXPECT_EQ(t.steps(), at);
    take_steps(t, 12 - at);
    EXPECT_EQ(t.model().store().hash(), whole.model().store().hash()) << "stopped at " << at;
  }
}

TEST_F(TrainerTest, AnotherRunIsNotContinued) {
  const RunConfig base = run();
  run_part(base, 3);
  const auto files = folder_content(base.run_dir());
  const auto refused = [&](const char* key, const std::function<void(RunConfig&)>& change) {
    RunConfig c = run();
    change(c);
    const std::string error = error_of([&] { Trainer t(c); });
    EXPECT_PRED2(mentions, error, key);
    EXPECT_PRED2(mentions, error, "rolling-000000000000192");
    EXPECT_EQ(folder_content(base.run_dir()), files) << key;
  };
  refused("model.layers", [](RunConfig& c) { c.model.layers = 3; });
  refused("model.family", [](RunConfig& c) { c.model.family = "free_pause"; });
  refused("model.window", [](RunConfig& c) { c.model.window = 3; });
  refused("model.rope_theta", [](RunConfig& c) { c.model.rope_theta = 5000; });
  refused("train.seed", [](RunConfig& c) { c.train.seed = 2; });
  refused("train.tokens", [](RunConfig& c) { c.train.tokens *= 2; });
  refused("train.micro_batch", [](RunConfig& c) { c.train.micro_batch = 1; });
  refused("optim.lr", [](RunConfig& c) { c.optim.lr = 1.0000000000000002e-2; });
  refused("schedule.decay_tokens", [](RunConfig& c) { c.schedule.decay_tokens = 64; });
  refused("run.dtype", [](RunConfig& c) { c.run.dtype = "bf16"; });
  const std::string other = make_test_data(dir_, "other", 150, 2).string();
  refused("data", [&](RunConfig& c) { c.data.dir = other; });
  // What changes no number may change.
  RunConfig moved = run();
  fs::rename(data_, dir_ / "moved");
  moved.data.dir = (dir_ / "moved").string(), moved.train.eval_every_tokens = 64, moved.run.threads = 1;
  EXPECT_EQ(Trainer(moved).steps(), 3);
}

// Keys agree, tensors do not: nothing is loaded in part.
TEST_F(TrainerTest, ACheckpointWithOtherTensorsIsRefused) {
  const RunConfig c = run();
  run_part(c, 3);
  const LoadedCheckpoint good = load_checkpoint(latest_checkpoint(c.run_dir())->path);
  std::vector<float> values(320 * 16);
  const std::vector<NamedTensor> other{{"embed", {320, 16}, view(values.data(), 320, 16)}};
  save_checkpoint(c.run_dir(), {CheckpointKind::named, 256, good.config, good.state, other, other});
  const std::string error = error_of([&] { Trainer t(c); });
  EXPECT_PRED2(mentions, error, "tokens-000000000000256");
}

TEST_F(TrainerTest, AFailedStartLeavesNothing) {
  RunConfig c = run("never");
  c.data.dir = (dir_ / "nowhere").string();
  EXPECT_PRED2(mentions, error_of([&] { Trainer t(c); }), "nowhere");
  c = run("never");
  c.model.vocab = 100;
  EXPECT_PRED2(mentions, error_of([&] { Trainer t(c); }), "model.vocab");
  c = run("never");
  c.model.eot = 3;
  EXPECT_PRED2(mentions, error_of([&] { Trainer t(c); }), "model.eot");
  c = run("never");
  c.model.context = 1 << 20, c.train.tokens *= 1 << 16;
  EXPECT_PRED2(mentions, error_of([&] { Trainer t(c); }), "train.bin");
  EXPECT_FALSE(fs::exists(dir_ / "never"));
}

TEST_F(TrainerTest, MetricsHaveEveryStepOnce) {
  RunConfig c = run();
  c.train.eval_every_tokens = 3 * 64;
  run_part(c, 4);
  Trainer t(c);
  t.run();
  std::vector<int64_t> steps, validations;
  const std::string text = read_text(c.run_dir() / "metrics.jsonl");
  for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1) {
    const auto line = parse_json(std::string_view(text).substr(at, text.find('\n', at) - at), "metrics");
    EXPECT_EQ(line.at("tokens"), line.at("step").get<int64_t>() * 64);
    (line.contains("val_loss") ? validations : steps).push_back(line.at("step"));
  }
  EXPECT_EQ(steps, (std::vector<int64_t>{5, 6, 7, 8, 9, 10, 11, 12}));
  EXPECT_EQ(validations, (std::vector<int64_t>{6, 9, 12}));
}

}  // namespace
}  // namespace sps
