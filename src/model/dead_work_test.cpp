// Leaving out what nothing reads changes neither the loss nor a gradient, and exactly that is left out:
// computed in full, the dead parts have gradients of exactly zero, and nothing else has.
#include <set>

#include "model/flops.h"
#include "model/test_compare.h"

namespace sps {
namespace {

class DeadWork : public ModelTest {};

bool is_zero(Tensor t) {
  return l2_norm(t) == 0;
}

// With the elimination several readers of a level share one product, constant rows are one row, and products
// have other shapes: sums in another order.
TEST_P(DeadWork, EliminationChangesNoResult) {
  const ModelKeys& keys = GetParam().keys;
  const TestInput input(resolve(keys), 4, 12, 5);
  for (const DType dtype : {DType::f64, DType::f32}) {
    LivelyModel lean(keys, {.compute = dtype}), full(keys, {.compute = dtype, .eliminate_dead = false});
    const Loss want = train_once(full, input), got = train_once(lean, input);
    const double tolerance = dtype == DType::f64 ? 1e-12 : 1e-6;
    EXPECT_EQ(got.scored, want.scored);
    EXPECT_NEAR(got.nll, want.nll, tolerance * want.nll) << dtype_name(dtype);
    const double whole = l2_norm(full.store().all_gradients());
    for (const Parameter& p : full.store().list()) {
      const Tensor l = gradient(lean, p.name), f = gradient(full, p.name);
      EXPECT_LE(l2_distance(l, f), tolerance * (l2_norm(f) + 0.02 * whole))
          << dtype_name(dtype) << " " << p.name;
      // What is dead is dead either way.
      EXPECT_EQ(is_zero(l), is_zero(f)) << p.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, DeadWork, testing::ValuesIn(test_models()), test_name);

// Where nothing is left out and every position is scored both ways are one computation.
TEST(DeadWorkNowhere, GivesTheSameBits) {
  const OneThread one_thread;
  int tested = 0;
  for (const TestModel& m : test_models()) {
    const Plan plan = make_plan(resolve(m.keys));
    const auto in_full = [](Need need) { return need == Need::all; };
    const bool everything = !plan.constant_start &&
                            std::all_of(plan.state.begin(), plan.state.end(), in_full) &&
                            std::all_of(plan.pred.begin(), plan.pred.end(), in_full) &&
                            std::all_of(plan.own_readers.begin(), plan.own_readers.end(),
                                        [](const auto& readers) { return readers.blocks.size() == 1; });
    if (!everything) continue;
    ++tested;
    for (const DType dtype : kFastTypes) {
      LivelyModel lean(m.keys, {.compute = dtype}), full(m.keys, {.compute = dtype, .eliminate_dead = false});
      const TestInput input(lean.config(), 4, 12, 5, false);
      EXPECT_EQ(train_once(lean, input).nll, train_once(full, input).nll) << m.name;
      EXPECT_TRUE(bits(lean.store().all_gradients()) == bits(full.store().all_gradients()))
          << m.name << " " << dtype_name(dtype);
    }
  }
  EXPECT_GE(tested, 6);
}

// ---- what exactly is dead
// ------------------------------------------------------------------------------------------

ModelKeys case_keys(const std::string& family, const std::function<void(ModelKeys&)>& change) {
  ModelKeys keys = small_keys(family, family == "free_pause" ? 0 : 2);
  keys.layers = 3;
  change(keys);
  return keys;
}

// Trains one step in full and compares the tensors (and query rows, and key rows) without gradient.
void expect_dead(const ModelKeys& keys, const std::set<std::string>& dead) {
  LivelyModel model(keys, {.eliminate_dead = false});
  train_once(model, TestInput(model.config(), 4, 12, 5));
  std::set<std::string> zero;
  const int64_t q_rows = model.config().state.heads * model.config().head_dim;
  for (const Parameter& p : model.store().list()) {
    const Tensor g = gradient(model, p.name);
    if (is_zero(g))
      zero.insert(p.name);
    else if (p.name.ends_with(".qkv") && is_zero(g.rows_from(0, q_rows)))
      zero.insert(p.name + ":q");
    else if (p.name.ends_with(".qkv") && is_zero(g.rows_from(q_rows, g.rows - q_rows)))
      zero.insert(p.name + ":kv");
  }
  EXPECT_EQ(zero, dead);
}

std::set<std::string> block_parts(const std::string& at, bool keys_live) {
  std::set<std::string> all{at + ".out", at + ".norm2", at + ".gate_up", at + ".down"};
  if (keys_live)
    all.insert(at + ".qkv:q");
  else
    all.merge(std::set<std::string>{at + ".norm1", at + ".qkv"});
  return all;
}

std::set<std::string> both(std::set<std::string> a, std::set<std::string> b) {
  a.merge(b);
  return a;
}

double saved(const ModelKeys& keys) {
  const ModelConfig c = resolve(keys);
  return flops_executed(make_plan(c, false), 12).total() - flops_executed(make_plan(c, true), 12).total();
}

// Two-tower spec 1.7: reading the levels that enter the state blocks needs only the last block's keys and
// values, if these are reused, and nothing of it, if the prediction tower projects for itself.
TEST(DeadParts, SameLevelReadUsesOnlyKeysOfTheLastStateBlock) {
  const OneThread one_thread;
  const auto reuse = case_keys("two_tower", [](ModelKeys& k) { k.read_level = "same", k.read_kv = "state"; });
  expect_dead(reuse, block_parts("state.2", true));
  EXPECT_GT(saved(reuse), 0);
  const auto own = case_keys("two_tower", [](ModelKeys& k) { k.read_level = "same"; });
  expect_dead(own, block_parts("state.2", false));
  EXPECT_GT(saved(own), saved(reuse));
  const auto windowed = case_keys("sps", [](ModelKeys& k) { k.share = "none"; });
  expect_dead(windowed, block_parts("state.2", true));
  EXPECT_GT(saved(windowed), 0);
}

// The row that reverse_sps reads is the state's, and its last prediction block serves as keys alone.
TEST(DeadParts, ReverseReadsOnlyKeysOfTheLastPredictionBlock) {
  const OneThread one_thread;
  const auto keys = case_keys("reverse_sps", [](ModelKeys& k) { k.share = "none"; });
  expect_dead(keys, block_parts("pred.2", true));
  EXPECT_GT(saved(keys), 0);
  const auto delayed = case_keys("delayed_state", [](ModelKeys& k) { k.share = "none"; });
  expect_dead(delayed, block_parts("state.2", true));
  EXPECT_GT(saved(delayed), 0);
}

// Without prediction keys of earlier rows the tower's last keys are read by nobody.
TEST(DeadParts, PredictionKeysThatOnlyTheStateReadsDieInTheLastBlock) {
  const OneThread one_thread;
  const auto keys = case_keys("sps", [](ModelKeys& k) { k.share = "none", k.band_pp = "none"; });
  auto dead = block_parts("state.2", true);
  dead.insert("pred.2.qkv:kv");
  expect_dead(keys, dead);
  EXPECT_GT(saved(keys), 0);
}

TEST(DeadParts, ListedLevelsLeaveTheBlocksAboveThemDead) {
  const OneThread one_thread;
  const auto own = case_keys("two_tower", [](ModelKeys& k) { k.read_level = "1,0,1"; });
  expect_dead(own, both(block_parts("state.1", false), block_parts("state.2", false)));
  EXPECT_GT(saved(own), 0);
  const auto reuse =
      case_keys("two_tower", [](ModelKeys& k) { k.read_level = "1,0,1", k.read_kv = "state"; });
  expect_dead(reuse, both(block_parts("state.1", true), block_parts("state.2", false)));
  EXPECT_GT(saved(reuse), 0);
}

TEST(DeadParts, ReadsThatReachTheTopLeaveNothingDead) {
  const OneThread one_thread;
  const auto nothing = [](ModelKeys&) {};
  const ModelKeys alive[] = {
      case_keys("standard", nothing),
      case_keys("two_tower", nothing),
      case_keys("two_tower", [](ModelKeys& k) { k.pred_layers = 2; }),
      case_keys("two_tower", [](ModelKeys& k) { k.read_level = "3,1,1"; }),
      case_keys("sequential", nothing),
      case_keys("sequential", [](ModelKeys& k) { k.state_layers = 1; }),
      case_keys("two_tower", [](ModelKeys& k) { k.read_level = "same", k.pred_input = "state"; }),
  };
  for (const ModelKeys& keys : alive) {
    expect_dead(keys, {});
    EXPECT_EQ(saved(keys), 0) << keys.family;
  }
}

// Shared weights live through the other stream whatever is dead in one; the work is saved all the same.
TEST(DeadParts, SharedWeightsAlwaysHaveAGradient) {
  const OneThread one_thread;
  const auto nothing = [](ModelKeys&) {};
  const auto sequential =
      case_keys("free_pause", [](ModelKeys& k) { k.read_level = "final", k.pred_input = "token"; });
  expect_dead(sequential, {});
  EXPECT_EQ(saved(sequential), 0);
  for (const std::string family : {"sps", "delayed_state", "reverse_sps", "free_pause"}) {
    const ModelKeys keys = case_keys(family, nothing);
    expect_dead(keys, {});
    // The dead block, and beside it what equal first rows save.
    const ModelKeys unequal = case_keys(family, [](ModelKeys& k) { k.pred_input = "token"; });
    EXPECT_GT(saved(unequal), 0) << family;
    EXPECT_GT(saved(keys), saved(unequal)) << family;
  }
}

// The last pooled layer reads the state's normed row; only the gate back into the state has no effect.
TEST(DeadParts, PooledLayersLoseTheLastStateGateAlone) {
  const OneThread one_thread;
  const auto keys = case_keys("free_pause", [](ModelKeys& k) { k.ffn = "pooled", k.pred_input = "token"; });
  expect_dead(keys, {"pool.2.state"});
  EXPECT_EQ(saved(keys), 2.0 * 16);  // one product of a row with the gate's weights
  expect_dead(
      case_keys("free_pause", [](ModelKeys& k) { k.ffn = "pooled", k.read_kv = "own", k.share = "norms"; }),
      {"pool.2.state"});
}

}  // namespace
}  // namespace sps
