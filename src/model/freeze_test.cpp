// A frozen state tower: the prediction tower's gradients are those of the whole model, and nothing else is
// done.
#include "model/freeze.h"

#include "base/test_dir.h"
#include "model/flops.h"
#include "model/test_compare.h"
#include "model/test_freezable.h"
#include "ops/rows/rows.h"

namespace sps {
namespace {

class FrozenTower : public ModelTest {};
INSTANTIATE_TEST_SUITE_P(Families, FrozenTower, testing::ValuesIn(freezable_models()), test_name);

TEST_P(FrozenTower, LeavesTheOtherGradientsAsTheyAre) {
  const ModelKeys& keys = GetParam().keys;
  const TestInput input(resolve(keys), 4, 12, 5);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
    for (const Freeze freeze : freezes(resolve(keys)))
      for (const bool eliminate_dead : {true, false}) {
        SCOPED_TRACE(fmt::format("{}, {}, {}", dtype_name(dtype), freeze.read_head, eliminate_dead));
        LivelyModel whole(keys, {.compute = dtype, .eliminate_dead = eliminate_dead});
        LivelyModel frozen(keys, {.compute = dtype, .eliminate_dead = eliminate_dead, .freeze = freeze});
        const Loss want = train_once(whole, input);
        // A mark on every frozen gradient: whatever the tower's backward pass would add to it shows.
        frozen.store().zero_gradients(Exec{});
        const auto& list = frozen.store().list();
        for (size_t i = 0; i < list.size(); ++i)
          if (list[i].frozen) ops::fill(Exec{}, frozen.store().gradient(int(i)), 7);
        const Loss got = frozen.train(input.input(), 1.0 / double(input.scored()));
        EXPECT_EQ(got.nll, want.nll);
        EXPECT_EQ(got.scored, want.scored);
        int64_t trained = 0;
        for (const Parameter& p : list) {
          const Tensor g = gradient(frozen, p.name);
          const bool covered = p.name == "embed" || p.name.starts_with("state.") ||
                               (freeze.read_head && p.name.starts_with("read_head."));
          EXPECT_EQ(p.frozen, covered) << p.name;
          if (covered) {
            for (int64_t r = 0; r < g.rows; ++r)
              for (int64_t c = 0; c < g.cols; ++c) ASSERT_EQ(value(g, r, c), 7) << p.name;
            continue;
          }
          EXPECT_TRUE(bits(g) == bits(gradient(whole, p.name))) << p.name;
          EXPECT_GT(l2_norm(g), 0) << p.name;
          ++trained;
        }
        EXPECT_GT(trained, 3);
      }
}

TEST_P(FrozenTower, SeesTheSameRows) {
  const ModelKeys& keys = GetParam().keys;
  const TestInput input(resolve(keys), 4, 12, 5);
  for (const DType dtype : kFastTypes) {
    LivelyModel whole(keys, {.compute = dtype}), frozen(keys, {.compute = dtype, .freeze = {true, false}});
    const Snapshot want(whole, input), got(frozen, input);
    EXPECT_EQ(got.difference(want, [](int64_t) { return true; }), "");
  }
}

// Two-tower spec, 1.8: of 6+6 blocks at S 84,648,960 numbers are frozen and 123,287,808 trained.
TEST(Freeze, CountsWhatIsFrozen) {
  ModelKeys keys;
  keys.family = "sequential", keys.layers = 6;
  keys.vocab = 50304;
  const ModelConfig c = resolve(keys);
  const ModelParameters p = describe_parameters(c, {true, false});
  EXPECT_EQ(p.frozen(), 84'648'960);
  EXPECT_EQ(p.count() - p.frozen(), 123'287'808);
  EXPECT_EQ(describe_parameters(c).frozen(), 0);
  keys.read_kv = "state";
  const ModelConfig shared = resolve(keys);
  EXPECT_EQ(describe_parameters(shared, {true, true}).frozen() - 84'648'960, 2 * 768 * 768 + 768);
}

// The state tower's share is a standard model of its depth without the head.
TEST(Freeze, TrainingCountsTheFrozenTowerOnce) {
  ModelKeys keys = small_keys("sequential");
  ModelKeys alone = small_keys("standard");
  keys.layers = alone.layers = 3;
  const int64_t length = 12;
  for (Flops (*count)(const ModelConfig&, int64_t) : {flops_published, flops_required}) {
    const Flops both = count(resolve(keys), length), tower = count(resolve(alone), length);
    EXPECT_DOUBLE_EQ(training_flops(both, {}), 3 * both.total());
    EXPECT_DOUBLE_EQ(training_flops(both, {true, false}),
                     3 * both.total() - 2 * (tower.total() - tower.head));
  }
  keys.read_kv = "state";
  const Flops f = flops_executed(make_plan(resolve(keys)), length);
  EXPECT_DOUBLE_EQ(training_flops(f, {true, false}) - training_flops(f, {true, true}), 2 * 2.0 * 16 * 32);
}

TEST(Freeze, RefusesWhatCannotBeFrozen) {
  struct Wrong {
    std::string family;
    std::function<void(ModelKeys&)> change;
    std::string named;
  };
  const std::vector<Wrong> all{
      {"standard", [](ModelKeys& k) { k.tie_head = "false"; }, "model.pred_layers"},
      {"sequential", [](ModelKeys& k) { k.tie_head = "true"; }, "model.tie_head"},
      {"sequential", [](ModelKeys& k) { k.share = "attention"; }, "model.share = none, found attention"},
      {"free_pause", [](ModelKeys& k) { k.ffn = "pooled", k.share = "none", k.tie_head = "false"; },
       "model.ffn"},
      {"sps", [](ModelKeys& k) { k.share = "none", k.tie_head = "false", k.window = 2; },
       "model.band.xp = none, found 1:2"},
      {"sequential", [](ModelKeys& k) { k.pred_input = "row"; }, "model.pred_input = row"},
  };
  for (const Wrong& w : all) {
    ModelKeys keys = small_keys(w.family);
    w.change(keys);
    const ModelConfig c = resolve(keys);
    const std::string error = error_of([&] { Model m(c, {.max_rows = 12, .freeze = {true, false}}); });
    EXPECT_PRED2(mentions, error, w.named);
    EXPECT_PRED2(mentions, error, "freeze.from");
  }
}

}  // namespace
}  // namespace sps
