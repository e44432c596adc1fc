// What the backward pass makes again is what the forward pass made: no bit of losses or gradients differs, in
// less memory. What is planned is what is taken.
#include "model/recompute.h"

#include "base/test_dir.h"
#include "model/flops.h"
#include "model/test_freezable.h"
#include "model/test_variants.h"
#include "ops/check.h"

namespace sps {
namespace {

class RecomputeTest : public ModelTest {};

// Two passes of different lengths, whose gradients add up: the memory is laid out anew in between.
std::string two_passes(Model& model, const TestInput& first, const TestInput& second) {
  Loss loss = train_once(model, first);
  const Loss more = model.train(second.input(), 0.01);
  loss.nll += more.nll, loss.scored += more.scored;
  const OnHost gradients(model.store().all_gradients());
  return fmt::format("{:a} over {} ", loss.nll, loss.scored) + bits(gradients);
}

void expect_the_same_bits(const ModelKeys& keys, ModelOptions options) {
  const ModelConfig c = resolve(keys);
  const TestInput first(c, 4, 12, 5), second(c, 3, 7, 6);
  LivelyModel kept(keys, options);
  const std::string want = two_passes(kept, first, second);
  for (const Recompute mode : {Recompute::ffn, Recompute::block}) {
    SCOPED_TRACE(fmt::format("{}, {}, {}, {}", name_of(mode), dtype_name(options.compute),
                             options.device == Device::cuda ? "GPU" : "CPU", options.eliminate_dead));
    options.recompute = mode;
    LivelyModel again(keys, options);
    EXPECT_TRUE(two_passes(again, first, second) == want);
    // An evaluation in between, whose tensors lie in the same memory, and all once more.
    again.evaluate(second.input());
    EXPECT_TRUE(two_passes(again, first, second) == want);
  }
}

// Four layers where the model's keys name no other depth: the last stage is not made again, and of two the
// first is not like the rest.
ModelKeys deeper(ModelKeys keys) {
  const bool fixed = keys.state_layers >= 0 || keys.pred_layers >= 0 || mentions(keys.read_level, ",");
  if (fixed || keys.layers != 2) return keys;
  keys.layers = 4;
  for (auto* widths : {&keys.d_ffn, &keys.pred_ffn})
    if (widths->size() == 2) *widths = {(*widths)[0], (*widths)[1], (*widths)[1], (*widths)[0]};
  return keys;
}

TEST_P(RecomputeTest, ChangesNoBit) {
  for (const Device device : ops::test_devices())
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
      for (const bool eliminate_dead : {true, false})
        if (device == Device::cpu || dtype != DType::f64)
          expect_the_same_bits(deeper(GetParam().keys),
                               {.compute = dtype, .eliminate_dead = eliminate_dead, .device = device});
}

class RecomputeAboveFrozen : public ModelTest {};

TEST_P(RecomputeAboveFrozen, ChangesNoBit) {
  for (const DType dtype : kFastTypes)
    for (const Freeze freeze : freezes(resolve(deeper(GetParam().keys))))
      for (const bool eliminate_dead : {true, false})
        expect_the_same_bits(deeper(GetParam().keys),
                             {.compute = dtype, .eliminate_dead = eliminate_dead, .freeze = freeze});
}

INSTANTIATE_TEST_SUITE_P(Families, RecomputeAboveFrozen, testing::ValuesIn(freezable_models()), test_name);

// A forward-only model has one stage's memory, and the training one's losses.
TEST_P(RecomputeTest, ForwardOnlyGivesTheSameLosses) {
  const ModelConfig c = resolve(GetParam().keys);
  const TestInput input(c, 4, 12, 5);
  for (const DType dtype : kFastTypes) {
    LivelyModel train(GetParam().keys, {.compute = dtype});
    LivelyModel forward(GetParam().keys, {.compute = dtype, .train = false});
    std::vector<double> want(input.tokens.size()), got(input.tokens.size());
    train.evaluate(input.input(), want);
    forward.evaluate(input.input(), got);
    EXPECT_EQ(got, want) << dtype_name(dtype);
    EXPECT_LT(forward.activation_bytes(), train.activation_bytes());
  }
}

TEST_P(RecomputeTest, TakesTheMemoryThatWasPlanned) {
  const ModelConfig c = resolve(GetParam().keys);
  const TestInput input(c, 4, 12, 5);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (const Recompute mode : {Recompute::none, Recompute::ffn, Recompute::block}) {
      SCOPED_TRACE(fmt::format("{} {}", dtype_name(dtype), name_of(mode)));
      LivelyModel model(GetParam().keys, {.compute = dtype, .recompute = mode});
      train_once(model, input);
      const MemoryPlan plan = plan_memory(c, model.options());
      EXPECT_EQ(model.store().bytes(), plan.weights + plan.gradients);
      EXPECT_EQ(model.activation_bytes(), plan.activations);
      EXPECT_EQ(model.table_bytes(), plan.tables);
      EXPECT_EQ(plan.scratch + plan.context, 0U);
      EXPECT_EQ(plan.total(),
                model.store().bytes() + plan.moments + model.activation_bytes() + model.table_bytes());
    }
}

INSTANTIATE_TEST_SUITE_P(Families, RecomputeTest, testing::ValuesIn(test_models()), test_name);

size_t planned(const ModelConfig& c, Recompute mode, Freeze freeze = {}) {
  return plan_memory(c, {.compute = DType::bf16, .max_rows = c.context, .freeze = freeze, .recompute = mode})
      .activations;
}

TEST(Recompute, EachModeTakesLessMemory) {
  for (const Variant& v : variants()) {
    const ModelConfig c = config_for("s", v.settings);
    const size_t none = planned(c, Recompute::none), ffn = planned(c, Recompute::ffn),
                 block = planned(c, Recompute::block);
    EXPECT_LT(ffn, none) << v.name;
    EXPECT_LT(block, ffn) << v.name;
  }
}

// What one more layer of the standard model adds for each row, at width 768 with 12 heads and an FFN of 2304.
TEST(Recompute, WhatALayerKeeps) {
  const auto layer = [](Recompute mode) {
    const ModelConfig two = config_for("s", "family=standard layers=2"),
                      three = config_for("s", "family=standard layers=3");
    return (planned(three, mode) - planned(two, mode)) / size_t(two.context);
  };
  constexpr size_t d = 768, residual = 4 * d + 4, attention = 2 * 3 * d + 2 * d + 4 * 12;
  EXPECT_EQ(layer(Recompute::block), residual);
  EXPECT_EQ(layer(Recompute::ffn), 2 * residual + attention);
  EXPECT_EQ(layer(Recompute::none), 2 * residual + attention + 2 * 2 * d + 2 * 2 * 2304);
}

// Nothing of a frozen tower waits for a backward pass.
TEST(Recompute, FrozenTowersTakeNoMemoryForABackwardPass) {
  const ModelConfig c = config_for("s", "family=sequential");
  EXPECT_LT(double(planned(c, Recompute::none, {true, false})), 0.7 * double(planned(c, Recompute::none)));
}

// Of the standard model every block but the last is made again, less the product that ends its FFN.
TEST(Recompute, FlopsOfTheStandardModel) {
  const Plan plan = make_plan(config_for("s", "family=standard"));
  const Flops forward = flops_executed(plan, 4096);
  const auto again = [&](Recompute mode) { return flops_made_again(plan, mode, {}, 4096); };
  EXPECT_EQ(again(Recompute::none).total(), 0);
  EXPECT_NEAR(again(Recompute::ffn).total(), forward.ffn * 2 / 3 * 11 / 12, 1);
  EXPECT_NEAR(again(Recompute::block).total(), (forward.total() - forward.head - forward.ffn / 3) * 11 / 12,
              1);
}

TEST(Recompute, FlopsFollowWhatIsRepeated) {
  for (const Variant& v : variants()) {
    SCOPED_TRACE(v.name);
    const ModelConfig c = config_for("s", v.settings);
    const Plan plan = make_plan(c);
    const Flops forward = flops_executed(plan, 4096), ffn = flops_made_again(plan, Recompute::ffn, {}, 4096),
                block = flops_made_again(plan, Recompute::block, {}, 4096);
    EXPECT_EQ(ffn.qkv + ffn.read + ffn.scores + ffn.softmax + ffn.weighted + ffn.out + ffn.head, 0);
    EXPECT_GT(ffn.ffn, 0.55 * forward.ffn);
    EXPECT_EQ(block.read + block.head, 0);
    EXPECT_GT(block.total(), 0.6 * (forward.total() - forward.head));
    EXPECT_LT(block.total(), forward.total() - forward.head);
  }
  const ModelConfig c = config_for("s", "family=sequential");
  const Plan plan = make_plan(c);
  EXPECT_EQ(flops_made_again(plan, Recompute::block, {true, false}, 4096).state, 0);
}

TEST(Recompute, NamesComeBack) {
  for (const Recompute mode : {Recompute::none, Recompute::ffn, Recompute::block})
    EXPECT_EQ(recompute_from_name(name_of(mode)), mode);
  const std::string error = error_of([] { recompute_from_name("some"); });
  EXPECT_PRED2(mentions, error, "train.recompute = 'some': expected none, ffn or block");
}

}  // namespace
}  // namespace sps
