#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "base/error.h"
#include "base/test_dir.h"

namespace sps {
namespace {

constexpr int64_t kBillion = 1'000'000'000;

Schedule recipe(int64_t billions) {
  return {.peak = 6e-4,
          .final = 6e-5,
          .warmup_tokens = 50'000'000,
          .decay_tokens = billions * kBillion / 10,
          .total_tokens = billions * kBillion,
          .batch_tokens = 96 * 4096};
}

TEST(Schedule, IterationsOfTheRecipes) {
  struct Row {
    int64_t billions, steps, final_tokens, decay_step, decay_tokens;
  };
  for (const Row& row :
       {Row{10, 25432, 10000269312, 22889, 9000321024}, Row{20, 50863, 20000145408, 45777, 18000248832},
        Row{40, 101726, 40000290816, 91553, 36000104448}}) {
    const Schedule s = recipe(row.billions);
    s.validate();
    EXPECT_EQ(s.steps(), row.steps);
    EXPECT_EQ(s.final_tokens(), row.final_tokens);
    const int64_t first = s.steps_to(s.decay_start());
    EXPECT_EQ(first, row.decay_step);
    EXPECT_EQ(first * s.batch_tokens, row.decay_tokens);
    // It is the first step below the peak.
    EXPECT_EQ(s.lr_at((first - 1) * s.batch_tokens), 6e-4);
    EXPECT_LT(s.lr_at(first * s.batch_tokens), 6e-4);
  }
}

TEST(Schedule, RatesOfThe20BillionRecipe) {
  const Schedule s = recipe(20);
  const auto at_step = [&](int64_t step) { return s.lr_at(step * s.batch_tokens); };
  EXPECT_EQ(at_step(0), at_step(1));  // one batch at least
  EXPECT_DOUBLE_EQ(at_step(1), 6e-4 * 393216 / 50e6);
  EXPECT_DOUBLE_EQ(at_step(64), 64 * at_step(1));
  EXPECT_LT(at_step(127), 6e-4);  // 127 batches are 49 938 432 tokens
  EXPECT_EQ(at_step(128), 6e-4);
  EXPECT_EQ(at_step(45776), 6e-4);
  // 248 832 tokens into the decay.
  EXPECT_DOUBLE_EQ(at_step(45777), 6e-5 + (1 - 248832.0 / 2e9) * 5.4e-4);
  EXPECT_DOUBLE_EQ(s.lr_at(19 * kBillion), 3.3e-4);
  // The last step starts 247 808 tokens before the end.
  EXPECT_EQ(20 * kBillion - 50862 * s.batch_tokens, 247808);
  EXPECT_DOUBLE_EQ(at_step(50862), 6e-5 + 247808.0 / 2e9 * 5.4e-4);
  EXPECT_EQ(at_step(50863), 6e-5);
  for (int64_t step = 1; step <= s.steps(); ++step) {
    EXPECT_GE(at_step(step), step < 200 ? at_step(step - 1) : 6e-5);
    EXPECT_LE(at_step(step), step < 200 ? 6e-4 : at_step(step - 1));
  }
}

TEST(Schedule, WarmUpAndDecayAreOptional) {
  Schedule s{.peak = 1, .final = 0.5, .total_tokens = 100, .batch_tokens = 10};
  s.validate();
  for (const int64_t t : {0, 50, 90, 100, 1000}) EXPECT_EQ(s.lr_at(t), 1) << t;
  s.decay_tokens = 100;  // nothing but decay
  s.validate();
  EXPECT_DOUBLE_EQ(s.lr_at(0), 0.95);
  EXPECT_DOUBLE_EQ(s.lr_at(50), 0.75);
  EXPECT_EQ(s.lr_at(100), 0.5);
  s.decay_tokens = 0, s.warmup_tokens = 100;  // nothing but warm-up
  s.validate();
  EXPECT_DOUBLE_EQ(s.lr_at(90), 0.9);
  EXPECT_EQ(s.lr_at(100), 1);
  s.warmup_tokens = 60, s.decay_tokens = 40;  // no plateau: the peak is met once
  s.validate();
  EXPECT_EQ(s.lr_at(60), 1);
  EXPECT_LT(s.lr_at(50), 1);
  EXPECT_LT(s.lr_at(70), 1);
}

TEST(Schedule, ErrorsNameTheKeys) {
  const auto error = [](const std::function<void(Schedule&)>& change) {
    Schedule s = recipe(20);
    change(s);
    try {
      s.validate();
    } catch (const Error& e) {
      EXPECT_EQ(e.exit_status(), 2);
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(error([](Schedule&) {}), "no error");
  EXPECT_EQ(error([](Schedule& s) { s.peak = 0; }), "optim.lr is 0, expected a number above 0");
  EXPECT_EQ(error([](Schedule& s) { s.peak = INFINITY; }), "optim.lr is inf, expected a number above 0");
  EXPECT_EQ(error([](Schedule& s) { s.peak = std::nan(""); }), "optim.lr is nan, expected a number above 0");
  EXPECT_EQ(error([](Schedule& s) { s.final = 1; }),
            "optim.min_lr is 1, expected a number from 0 to optim.lr, which is 0.0006");
  EXPECT_PRED2(mentions, error([](Schedule& s) { s.final = -1e-9; }), "optim.min_lr is -1e-09");
  EXPECT_PRED2(mentions, error([](Schedule& s) { s.final = std::nan(""); }), "optim.min_lr is nan");
  EXPECT_EQ(error([](Schedule& s) { s.total_tokens = 0; }),
            "train.tokens is 0, expected an integer of at least 1");
  EXPECT_PRED2(mentions, error([](Schedule& s) { s.total_tokens = INT64_MAX; }),
               "expected an integer of at most 1152921504606846976");
  EXPECT_PRED2(mentions, error([](Schedule& s) { s.batch_tokens = 0; }), "train.global_batch");
  EXPECT_PRED2(mentions, error([](Schedule& s) { s.warmup_tokens = -1; }), "schedule.warmup_tokens is -1");
  EXPECT_PRED2(mentions, error([](Schedule& s) { s.decay_tokens = -1; }), "schedule.decay_tokens is -1");
  const std::string long_sentence =
      "schedule.warmup_tokens is 50000000 and schedule.decay_tokens is 19950000001, expected a sum of at "
      "most "
      "train.tokens, which is 20000000000";
  EXPECT_EQ(error([](Schedule& s) { s.decay_tokens = 19'950'000'001; }), long_sentence);
  EXPECT_EQ(error([](Schedule& s) { s.decay_tokens = 19'950'000'000; }), "no error");
  // A sum that would wrap.
  EXPECT_PRED2(mentions, error([](Schedule& s) { s.warmup_tokens = s.decay_tokens = INT64_MAX; }),
               "expected a sum");
}

}  // namespace
}  // namespace sps
