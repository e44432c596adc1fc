// How a step is run changes none of its bits: threads, tiles, repetition, the split into passes. And what a
// model starts from.
#include <map>
#include <thread>

#include "model/test_compare.h"
#include "tensor/arena.h"

namespace sps {
namespace {

constexpr int64_t kLength = 12;

// A model points into itself.
static_assert(!std::is_copy_constructible_v<Model> && !std::is_move_constructible_v<Model>);

// ---- how a step is run
// ---------------------------------------------------------------------------------------------

class Steps : public ModelTest {
 protected:
  static ModelKeys longer(int64_t context) {
    ModelKeys keys = GetParam().keys;
    keys.context = context;
    return keys;
  }
  // The loss and every gradient, as bits.
  static std::string step_bits(Model& model, const TestInput& input) {
    const Loss loss = train_once(model, input);
    return row_bits(view(&loss.nll, 1, 1), 0) + bits(model.store().all_gradients());
  }
};

// Rotation shows only differences of positions, and both rows of a pair sit at one position: moving all
// changes nothing but roundings of the angles; moving some does.
TEST_P(Steps, PositionsMayShiftTogether) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    LivelyModel model(longer(64), {.compute = dtype});
    const TestInput input = plain_input(model.config(), 2, kLength, {4});
    TestInput shifted = input, torn = input;
    for (int32_t& position : shifted.positions) position += 41;
    for (size_t i = 0; i < torn.positions.size(); i += 3) torn.positions[i] += 41;
    std::vector<double> here(input.tokens.size()), there(here), apart(here);
    model.evaluate(input.input(), here);
    model.evaluate(shifted.input(), there);
    model.evaluate(torn.input(), apart);
    double moved = 0;
    for (size_t r = 0; r < here.size(); ++r) {
      EXPECT_NEAR(there[r], here[r], (dtype == DType::f64 ? 1e-10 : 1e-4) * here[r]) << "row " << r;
      moved = std::max(moved, std::abs(apart[r] - here[r]));
    }
    EXPECT_GT(moved, 1e-2);
  }
}

// Tiles outside the bands and documents are left out without a trace. Tiles are 64 wide: documents end on,
// before and after their edges.
TEST_P(Steps, SkippingTilesChangesNoBit) {
  for (const DType dtype : kFastTypes) {
    LivelyModel skipping(longer(200), {.compute = dtype, .max_rows = 200});
    LivelyModel plain(longer(200), {.compute = dtype, .max_rows = 200, .skip_tiles = false});
    const TestInput input = plain_input(skipping.config(), 1, 200, {0, 63, 64, 150});
    EXPECT_TRUE(step_bits(skipping, input) == step_bits(plain, input)) << dtype_name(dtype);
  }
}

TEST_P(Steps, RepeatsItself) {
  for (const DType dtype : kFastTypes) {
    LivelyModel model(longer(80), {.compute = dtype, .max_rows = 240});
    const TestInput input(model.config(), 3, 80, 5);
    EXPECT_TRUE(step_bits(model, input) == step_bits(model, input)) << dtype_name(dtype);
  }
}

// Training makes the logits of up to 64 rows at a time and evaluation those of 256: up to 64 rows they are
// one product of one shape, the same bits.
TEST_P(Steps, EvaluationIsTheLossOfTraining) {
  for (const DType dtype : kFastTypes) {
    LivelyModel model(longer(80), {.compute = dtype, .max_rows = 240});
    for (const auto& [batch, length] : {std::pair<int64_t, int64_t>{2, kLength}, {3, 80}}) {
      const TestInput input(model.config(), batch, length, 5);
      std::vector<double> nll(input.tokens.size());
      const Loss trained = train_once(model, input), evaluated = model.evaluate(input.input(), nll);
      EXPECT_EQ(trained.scored, input.scored());
      EXPECT_EQ(evaluated.scored, input.scored());
      EXPECT_NEAR(trained.nll, evaluated.nll, (batch * length <= 64 ? 0 : 1e-6) * evaluated.nll)
          << dtype_name(dtype);
      double sum = 0;
      for (size_t r = 0; r < nll.size(); ++r) {
        EXPECT_EQ(nll[r] != 0.0, input.targets[r] >= 0);
        sum += nll[r];
      }
      EXPECT_EQ(sum, evaluated.nll);
    }
  }
}

// Four sequences in one pass or one by one: the loss is one sum over all scored positions, however they are
// split (sequence 2 has few, sequence 3 none). Two things keep this from being the same bits. Products of 32
// rows and more run on packed weights, which in bf16 may round a sum the other way; and gradients add up the
// same terms in another order: roundings of f32 sums, except that bf16 rounds (2^-9) what a constant start
// sums up twice in every pass, and the four passes' parts may together be four times as long as their sum.
TEST_P(Steps, AccumulationIsOneBatch) {
  for (const DType dtype : kFastTypes) {
    LivelyModel together(GetParam().keys, {.compute = dtype}), apart(GetParam().keys, {.compute = dtype});
    TestInput input(together.config(), 4, kLength, 5);
    for (int64_t i = 2 * kLength + 3; i < 4 * kLength; ++i) input.targets[size_t(i)] = -1;
    const double scale = 1.0 / double(input.scored());
    const Loss whole = train_once(together, input);
    apart.store().zero_gradients(Exec{});
    Loss sum;
    for (int64_t b = 0; b < 4; ++b) {
      ModelInput one = input.input();
      one.batch = 1;
      for (auto* column : {&one.tokens, &one.targets, &one.document_start, &one.positions})
        *column = column->subspan(size_t(b * kLength), size_t(kLength));
      const Loss loss = apart.train(one, scale);
      sum.nll += loss.nll, sum.scored += loss.scored;
    }
    EXPECT_EQ(sum.scored, whole.scored);
    const bool f32 = dtype == DType::f32;
    EXPECT_NEAR(sum.nll, whole.nll, (f32 ? 1e-6 : 0x1p-9) * whole.nll);
    const double bf16_tolerance = together.plan().constant_start ? 0x1p-6 : 0x1p-8;
    expect_same_gradients(apart, together, f32 ? 1e-6 : bf16_tolerance);
  }
}

TEST_P(Steps, ABatchWithoutScoredPositionsDoesNothing) {
  for (const DType dtype : kFastTypes) {
    LivelyModel model(GetParam().keys, {.compute = dtype});
    TestInput input(model.config(), 2, kLength, 5);
    const std::string before = step_bits(model, input).substr(sizeof(double));
    for (int32_t& target : input.targets) target = -1;
    const Loss loss = model.train(input.input(), 0.1);
    EXPECT_EQ(loss.nll, 0.0);
    EXPECT_EQ(loss.scored, 0);
    EXPECT_TRUE(before == bits(model.store().all_gradients()));
  }
}

// In a thread whose scratch is new, the first step makes it grow and the second does not.
TEST_P(Steps, AllocateNothingAfterTheFirst) {
  for (const DType dtype : kFastTypes) {
    std::thread([&, keys = GetParam().keys] {
      const OneThread one_thread;
      LivelyModel model(keys, {.compute = dtype});
      const TestInput input(model.config(), 2, kLength, 5);
      const size_t fresh = thread_scratch_growths();
      train_once(model, input);
      const size_t grown = thread_scratch_growths();
      EXPECT_GT(grown, fresh);
      train_once(model, input);
      EXPECT_EQ(thread_scratch_growths(), grown);
    }).join();
  }
}

// A model for every kind of operation: a busy machine takes its time to start two threads some hundred times
// a step.
class Threads : public Steps {};

TEST_P(Threads, DoNotChangeABit) {
  for (const DType dtype : kFastTypes) {
    LivelyModel model(longer(80), {.compute = dtype, .max_rows = 240});
    const TestInput input(model.config(), 3, 80, 5);
    const std::string one = step_bits(model, input);
    set_thread_count(2);
    EXPECT_TRUE(one == step_bits(model, input)) << dtype_name(dtype);
    set_thread_count(1);
  }
}

std::vector<TestModel> models_for_threads() {
  std::vector<TestModel> chosen;
  for (const TestModel& m : test_models())
    for (const char* name : {"sps_w2", "free_pause_pooled_token", "sequential", "shared_sequential",
                             "levels_own", "backbone_sps", "unequal_widths"})
      if (m.name == name) chosen.push_back(m);
  return chosen;
}

INSTANTIATE_TEST_SUITE_P(Families, Threads, testing::ValuesIn(models_for_threads()), test_name);
INSTANTIATE_TEST_SUITE_P(Families, Steps, testing::ValuesIn(test_models()), test_name);

// ---- the beginning
// -------------------------------------------------------------------------------------------------

// Two-tower spec 1.11: with gates at zero weights both streams take half of the FFN of the mean of their
// normed rows.
TEST(InitialModel, PooledLayersGiveBothStreamsHalfOfTheFfnOfTheMean) {
  const OneThread one_thread;
  ModelKeys keys = small_keys("free_pause");
  keys.ffn = "pooled", keys.layers = 3;
  Model model(resolve(keys), {.compute = DType::f64, .max_rows = 48});
  model.store().initialise(4);
  const TestInput input(model.config(), 2, kLength, 5);
  model.evaluate(input.input());
  const Activations& a = model.activations();
  for (size_t j = 0; j < 2; ++j) {
    const std::string at = "state." + std::to_string(j) + ".";
    const Tensor gate_up = weight(model, at + "gate_up"), down = weight(model, at + "down");
    const StreamActivations &x = a.state[j], &p = a.pred[j];
    for (int64_t r = 0; r < input.batch * input.length; ++r) {
      EXPECT_EQ(value(a.pool[j].gate, r, 0), 0.5);
      EXPECT_EQ(value(x.gate, r, 0), 0.5);
      EXPECT_EQ(value(p.gate, r, 0), 0.5);
      std::vector<double> h;
      for (int64_t u = 0; u < 24; ++u) {
        double gate = 0, up = 0;
        for (int64_t c = 0; c < 16; ++c) {
          const double mean = (value(x.n2, r, c) + value(p.n2, r, c)) / 2;
          gate += mean * value(gate_up, u, c), up += mean * value(gate_up, 24 + u, c);
        }
        h.push_back(gate / (1 + std::exp(-gate)) * up);
      }
      for (int64_t c = 0; c < 16; ++c) {
        double half = 0;
        for (int64_t u = 0; u < 24; ++u) half += 0.5 * h[size_t(u)] * value(down, c, u);
        EXPECT_NEAR(value(a.state[j + 1].s1, r, c) - value(x.s2, r, c), half, 1e-15);
        EXPECT_NEAR(value(a.pred[j + 1].s1, r, c) - value(p.s2, r, c), half, 1e-15);
      }
    }
  }
}

// One seed, one tensor: whatever model it is in. Where the depth scales it, the same numbers are scaled.
TEST(InitialModel, SharedTensorsStartWithTheSameBits) {
  std::map<std::string, std::pair<std::string, double>> seen;
  size_t again = 0;
  for (const TestModel& m : test_models()) {
    const ModelConfig c = resolve(m.keys);
    ParameterStore store(describe_parameters(c).list, DType::f32, false);
    store.initialise(17);
    for (size_t i = 0; i < store.list().size(); ++i) {
      const Parameter& p = store.list()[i];
      const std::string now = bits(store.weight(int(i)));
      const std::string key = p.name + " " + std::to_string(p.rows()) + " " + std::to_string(p.cols());
      const auto [found, is_new] = seen.try_emplace(key, now, p.init_std);
      if (is_new) continue;
      if (found->second.second == p.init_std) {
        EXPECT_TRUE(found->second.first == now) << m.name << " " << p.name;
        ++again;
      } else {
        const auto* before = reinterpret_cast<const float*>(found->second.first.data());
        const Tensor w = store.weight(int(i));
        for (int64_t k = 0; k < p.count(); ++k)
          ASSERT_NEAR(w.as<float>()[k] / p.init_std, before[k] / found->second.second, 1e-5)
              << m.name << " " << p.name;
      }
    }
  }
  EXPECT_GT(again, 500U);
}

// Two-tower spec 1.0: attention outputs are scaled with the deeper tower; measured on the numbers themselves.
TEST(InitialModel, AttentionOutputsAreScaledWithTheDeeperTower) {
  for (const auto& [state, pred, std] : {std::tuple{12, 12, .004082}, std::tuple{3, 9, .004714}}) {
    ModelKeys keys;
    keys.family = "sequential", keys.state_layers = state, keys.pred_layers = pred;
    for (const Parameter& p : describe_parameters(resolve(keys)).list) {
      if (p.name != "state.1.out") continue;
      ParameterStore store({p}, DType::f32, false);
      store.initialise(3);
      EXPECT_NEAR(l2_norm(store.weight(0)) / std::sqrt(double(p.count())), std, 0.03 * std)
          << state << "+" << pred;
    }
  }
}

TEST(InitialModel, NormsAreOneAndGatesZero) {
  for (const TestModel& m : test_models()) {
    ParameterStore store(describe_parameters(resolve(m.keys)).list, DType::f32, false);
    store.initialise(17);
    for (size_t i = 0; i < store.list().size(); ++i) {
      const Parameter& p = store.list()[i];
      const Tensor w = store.weight(int(i));
      const bool gate = p.name.rfind("pool.", 0) == 0, norm = p.name.find("norm") != std::string::npos;
      EXPECT_EQ(norm, p.shape.size() == 1) << p.name;
      for (int64_t k = 0; (gate || norm) && k < p.count(); ++k)
        ASSERT_EQ(w.as<float>()[k], norm ? 1.0F : 0.0F) << m.name << " " << p.name;
    }
  }
}

}  // namespace
}  // namespace sps
