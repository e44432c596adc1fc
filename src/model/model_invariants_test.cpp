// What must hold for every model whatever its weights: who may see whom, what a result may depend on, and
// which configurations are the same model. Comparisons are bit by bit: a row's arithmetic does not depend on
// other rows.
#include <map>
#include <set>

#include "model/test_compare.h"

namespace sps {
namespace {

constexpr int64_t kLength = 12;
// Both ways through a model: as it runs, and with every row of every block computed.
constexpr bool kEitherPlan[] = {true, false};

int32_t other_token(int32_t token) {
  return (token + 1) % kRare;
}

// ---- who may see whom
// --------------------------------------------------------------------------------------------

class Visibility : public ModelTest {};

TEST_P(Visibility, NothingDependsOnLaterTokens) {
  for (const DType dtype : kFastTypes)
    for (const bool eliminate_dead : kEitherPlan) {
      LivelyModel model(GetParam().keys, {.compute = dtype, .eliminate_dead = eliminate_dead});
      const TestInput input = plain_input(model.config(), 1, kLength);
      const Snapshot before(model, input);
      for (int64_t j = 0; j < kLength; ++j) {
        TestInput changed = input;
        changed.tokens[size_t(j)] = other_token(input.tokens[size_t(j)]);
        changed.targets[size_t(j)] = other_token(input.targets[size_t(j)]);
        const Snapshot after(model, changed);
        EXPECT_EQ(before.difference(after, [&](int64_t r) { return r < j; }), "") << "token " << j;
        EXPECT_NE(before.difference(after, [&](int64_t r) { return r == j; }), "") << "token " << j;
      }
    }
}

// Documents 0..3, 4..5 and 6..11; the last row of each is its end of text.
TEST_P(Visibility, DocumentsAreIsolated) {
  const std::pair<int64_t, int64_t> documents[] = {{0, 3}, {4, 5}, {6, 11}};
  for (const DType dtype : kFastTypes)
    for (const bool eliminate_dead : kEitherPlan) {
      LivelyModel model(GetParam().keys, {.compute = dtype, .eliminate_dead = eliminate_dead});
      const TestInput input = plain_input(model.config(), 2, kLength, {3, 5});
      const Snapshot before(model, input);
      for (const auto& [first, last] : documents) {
        TestInput changed = input;
        for (int64_t i = first; i <= last; ++i) {
          int32_t& token = changed.tokens[size_t(i)];
          if (token != model.config().eot) token = other_token(token);
        }
        const Snapshot after(model, changed);
        const auto outside = [&](int64_t r) { return r < first || r > last; };
        EXPECT_EQ(before.difference(after, outside), "") << "document from " << first;
        EXPECT_NE(before.difference(after, [&](int64_t r) { return r == first; }), "");
      }
    }
}

// A token whose embeddings are NaN poisons the rows that may see it and no others; the end of text before it,
// whose own prediction row closes the document, is one of the others.
TEST_P(Visibility, NanStaysInsideItsDocument) {
  for (const DType dtype : kFastTypes)
    for (const bool eliminate_dead : kEitherPlan) {
      LivelyModel model(GetParam().keys, {.compute = dtype, .eliminate_dead = eliminate_dead});
      TestInput input = plain_input(model.config(), 2, kLength, {3, 8});
      input.tokens[4] = kRare;
      const Snapshot before(model, input);
      for (const std::string name : {"embed", "pred_embed"})
        if (parameter_index(model, name) != kNoParameter) set_row(weight(model, name), kRare, NAN);
      model.store().round();
      const Snapshot after(model, input);
      const auto outside = [](int64_t r) { return r < 4 || r > 8; };
      // A tied head reads the poisoned row for every position's logits.
      const std::string skip = model.config().tie_head ? "nll" : " ";
      EXPECT_EQ(before.difference(after, outside, skip), "");
      for (int64_t r = 4; r <= 7; ++r)
        EXPECT_NE(before.difference(
                      after, [&](int64_t i) { return i == r; }, skip),
                  "")
            << "row " << r;
    }
}

// Sequences alone, beside others, and cut short. Products of fewer than 32 rows run on other code than longer
// ones (linear, packed weights): only there may sums be rounded differently.
TEST_P(Visibility, SequencesDoNotDependOnTheBatch) {
  constexpr int64_t kLong = 40;
  ModelKeys keys = GetParam().keys;
  keys.context = kLong;
  for (const DType dtype : kFastTypes) {
    LivelyModel model(keys, {.compute = dtype, .max_rows = 3 * kLong});
    const TestInput all(model.config(), 3, kLong, 11);
    std::vector<double> together(all.tokens.size());
    model.evaluate(all.input(), together);
    for (const int64_t from : {0, 1, 2})
      for (const int64_t length : {kLong, int64_t{33}, int64_t{7}}) {
        ModelInput one = all.input();
        one.batch = 1, one.length = length;
        for (auto* column : {&one.tokens, &one.targets, &one.document_start, &one.positions})
          *column = column->subspan(size_t(from * kLong), size_t(length));
        std::vector<double> alone(static_cast<size_t>(length));
        model.evaluate(one, alone);
        for (size_t r = 0; r < alone.size(); ++r) {
          const double beside = together[size_t(from * kLong) + r];
          const double tolerance = dtype == DType::f32 ? 1e-5 : 0x1p-7;
          EXPECT_NEAR(alone[r], beside, tolerance * beside)
              << dtype_name(dtype) << " row " << r << " of sequence " << from << " at length " << length;
        }
      }
    TestInput others = all;
    for (size_t i = kLong; i < others.tokens.size(); ++i)
      if (others.tokens[i] != model.config().eot) others.tokens[i] = other_token(others.tokens[i]);
    const Snapshot before(model, all), after(model, others);
    EXPECT_EQ(before.difference(after, [](int64_t r) { return r < kLong; }), "") << dtype_name(dtype);
    EXPECT_NE(before.difference(after, [](int64_t r) { return r >= kLong; }), "") << dtype_name(dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Visibility, testing::ValuesIn(test_models()), test_name);

// ---- window edges
// --------------------------------------------------------------------------------------------------

// The visibility rules of model spec, section 3, and of the free pause with a window; steps = query - key.
struct Rule {
  std::string family;
  std::function<bool(int64_t steps, int64_t w)> xx, xp, px, pp;
};
std::vector<Rule> rules() {
  const auto causal = [](int64_t s, int64_t) { return s >= 0; };
  const auto before = [](int64_t s, int64_t) { return s >= 1; };
  const auto window = [](int64_t s, int64_t w) { return s >= 0 && s <= w; };
  const auto window_before = [](int64_t s, int64_t w) { return s >= 1 && s <= w; };
  const auto never = [](int64_t, int64_t) { return false; };
  const auto window_if_any = [](int64_t s, int64_t w) { return w > 0 && s >= 0 && s <= w; };
  return {{"sps", causal, window_before, causal, window},
          {"delayed_state", window, before, window, causal},
          {"reverse_sps", window, before, window, causal},
          {"free_pause", causal, never, causal, window_if_any}};
}

// One token's row is disturbed in one stream's embedding; after each block's attention exactly the rows that
// the rules let it reach have changed.
TEST(WindowEdges, ADisturbanceReachesExactlyWhatTheBandsShow) {
  const OneThread one_thread;
  for (const Rule& rule : rules())
    for (const int64_t w : {0, 1, 2, 3}) {
      ModelKeys keys = small_keys(rule.family, w);
      keys.pred_input = "table";
      LivelyModel model(keys, {.eliminate_dead = false});
      for (const std::string source : {"embed", "pred_embed"})
        for (int64_t j = 0; j < kLength; ++j) {
          TestInput input = plain_input(model.config(), 1, kLength);
          input.tokens[size_t(j)] = kRare;
          const Snapshot before(model, input);
          lively_weights(model, 3);
          set_row(weight(model, source), kRare, 0.7);
          const Snapshot after(model, input);
          lively_weights(model, 3);

          std::set<int64_t> x, p;
          (source == "embed" ? x : p).insert(j);
          for (int64_t block = 0; block < keys.layers; ++block) {
            const std::set<int64_t> x_keys = x, p_keys = p;
            for (int64_t i = 0; i < kLength; ++i) {
              for (const int64_t k : x_keys) {
                if (rule.xx(i - k, w)) x.insert(i);
                if (rule.px(i - k, w)) p.insert(i);
              }
              for (const int64_t k : p_keys) {
                if (rule.xp(i - k, w)) x.insert(i);
                if (rule.pp(i - k, w)) p.insert(i);
              }
            }
            for (const auto& [stream, reached] : {std::pair{"state", &x}, std::pair{"pred", &p}}) {
              const std::string name = std::string(stream) + "." + std::to_string(block) + ".s2";
              const auto &a = before.rows_of(name), &b = after.rows_of(name);
              std::set<int64_t> changed;
              for (int64_t i = 0; i < kLength; ++i)
                if (a[size_t(i)] != b[size_t(i)]) changed.insert(i);
              EXPECT_EQ(changed, *reached)
                  << rule.family << " w=" << w << ", " << source << " at " << j << ": " << name;
            }
          }
        }
    }
}

// ---- the same model twice
// ------------------------------------------------------------------------------------------

void expect_same_model(const ModelKeys& a, const ModelKeys& b, const std::string& what) {
  for (const DType dtype : kFastTypes) {
    SCOPED_TRACE(what);
    LivelyModel first(a, {.compute = dtype}), second(b, {.compute = dtype});
    const TestInput input(first.config(), 2, kLength, 5);
    const Loss one = train_once(first, input), two = train_once(second, input);
    EXPECT_EQ(one.nll, two.nll);
    ASSERT_EQ(first.store().list().size(), second.store().list().size());
    for (const Parameter& p : first.store().list()) {
      ASSERT_NE(parameter_index(second, p.name), kNoParameter) << p.name;
      EXPECT_TRUE(bits(gradient(first, p.name)) == bits(gradient(second, p.name))) << p.name;
    }
    first.store().initialise(8), second.store().initialise(8);
    for (const Parameter& p : first.store().list())
      EXPECT_TRUE(bits(weight(first, p.name)) == bits(weight(second, p.name))) << p.name;
  }
}

TEST(SameModel, AWindowOfTheWholeSequenceIsFull) {
  const OneThread one_thread;
  for (const std::string family : {"sps", "delayed_state", "reverse_sps", "free_pause"})
    for (const int64_t w : {kLength - 1, kLength, int64_t{4096}})
      expect_same_model(small_keys(family, w), small_keys(family, kWindowFull),
                        family + " " + std::to_string(w));
}

TEST(SameModel, SpellingsDoNotMatter) {
  const OneThread one_thread;
  const auto changed = [](ModelKeys keys, const std::function<void(ModelKeys&)>& change) {
    change(keys);
    return keys;
  };
  for (const std::string family : {"standard", "sps", "two_tower", "sequential"}) {
    const ModelKeys keys = small_keys(family, 2);
    expect_same_model(keys, changed(keys, [](ModelKeys& k) { k.d_ffn = {24, 24}; }), family + " FFN list");
    expect_same_model(keys, changed(keys, [](ModelKeys& k) { k.head_dim = 8, k.kv_heads = 2; }),
                      family + " heads");
    expect_same_model(keys, keys_of(resolve(keys)), family + " spelled out");
  }
  const std::pair<const char*, const char*> levels[] = {
      {"same", "0,1"}, {"post", "1,2"}, {"top", "1,2"}, {"final", "2,2"}};
  for (const std::string family : {"two_tower", "free_pause"})
    for (const auto& [word, list] : levels)
      expect_same_model(changed(small_keys(family), [&, w = word](ModelKeys& k) { k.read_level = w; }),
                        changed(small_keys(family), [&, l = list](ModelKeys& k) { k.read_level = l; }),
                        family + " " + list);
  // Two-tower spec 1.6: the free pause is the two-tower model that shares everything.
  expect_same_model(small_keys("free_pause"),
                    changed(small_keys("two_tower"),
                            [](ModelKeys& k) {
                              k.read_level = "same", k.read_kv = "state", k.pred_input = "vector",
                              k.tie_head = "true", k.share = "all";
                            }),
                    "free pause as two towers");
  // Shared sequential reads as well.
  expect_same_model(changed(small_keys("free_pause"), [](ModelKeys& k) { k.read_level = "final"; }),
                    changed(small_keys("sequential"),
                            [](ModelKeys& k) {
                              k.read_kv = "state", k.pred_input = "vector", k.tie_head = "true",
                              k.share = "all";
                            }),
                    "shared sequential");
  // The windowed families are their bands.
  expect_same_model(small_keys("sps", 2),
                    changed(small_keys("delayed_state", 7),
                            [](ModelKeys& k) {
                              k.band_xx = "0:inf", k.band_xp = "1:2", k.band_px = "0:inf", k.band_pp = "0:2";
                            }),
                    "sps by its bands");
}

// Reverse and delayed are one computation; only the row that the loss reads differs.
TEST(SameModel, ReverseAndDelayedDifferInReadoutAlone) {
  const OneThread one_thread;
  for (const DType dtype : kFastTypes)
    for (const int64_t w : {0, 2, 5}) {
      LivelyModel reverse(small_keys("reverse_sps", w), {.compute = dtype, .eliminate_dead = false});
      LivelyModel delayed(small_keys("delayed_state", w), {.compute = dtype, .eliminate_dead = false});
      const TestInput input(reverse.config(), 2, kLength, 5);
      const Snapshot r(reverse, input), d(delayed, input);
      for (const std::string stream : {"state.", "pred."})
        EXPECT_EQ(r.difference_in(d, stream), "") << "w=" << w;
      EXPECT_NE(r.difference_in(d, "final"), "");
      EXPECT_NE(r.difference_in(d, "nll"), "");
    }
}

// Where the state cannot see predictions it is the standard model's own stream.
TEST(SameModel, TheStateWithoutPredictionsIsTheStandardModel) {
  const OneThread one_thread;
  const auto standard_keys = [](ModelKeys keys) {
    keys.family = "standard", keys.window = kWindowAuto;
    return keys;
  };
  for (const TestModel& m : test_models()) {
    const bool free = m.name == "sps_w0" || m.name == "free_pause" || m.name == "free_pause_w2" ||
                      m.name == "free_pause_token" || m.name == "backbone_free_pause" ||
                      m.name == "two_tower" || m.name == "sequential" || m.name == "shared_sequential";
    if (!free) continue;
    for (const DType dtype : kFastTypes) {
      SCOPED_TRACE(m.name);
      LivelyModel model(m.keys, {.compute = dtype, .eliminate_dead = false});
      LivelyModel standard(standard_keys(m.keys), {.compute = dtype});
      const TestInput input(model.config(), 2, kLength, 5);
      EXPECT_EQ(Snapshot(standard, input).difference_in(Snapshot(model, input), "state."), "");
    }
  }
}

// What the prediction rows start from moves the state where the streams couple, and nowhere else.
TEST(Coupling, TheStateHearsOfThePredictionOnlyWhereBandsOrPoolSaySo) {
  const OneThread one_thread;
  const std::map<std::string, bool> coupled{{"sps_w0", false},
                                            {"sps_w2", true},
                                            {"sps_full", true},
                                            {"delayed_state_w0", true},
                                            {"reverse_sps_w2", true},
                                            {"free_pause", false},
                                            {"free_pause_w2", false},
                                            {"free_pause_pooled", true},
                                            {"sps_vector", true},
                                            {"shared_sequential", false},
                                            {"two_tower_row", false},
                                            {"backbone_pooled", true},
                                            {"backbone_free_pause", false},
                                            {"dual_sps", true}};
  size_t tested = 0;
  for (const TestModel& m : test_models()) {
    const auto found = coupled.find(m.name);
    if (found == coupled.end()) continue;
    ++tested;
    for (const DType dtype : kFastTypes)
      for (const bool eliminate_dead : kEitherPlan) {
        LivelyModel model(m.keys, {.compute = dtype, .eliminate_dead = eliminate_dead});
        const TestInput input(model.config(), 2, kLength, 5);
        const Snapshot before(model, input);
        if (model.config().pred_input == PredInput::row)
          set_row(weight(model, "embed"), model.config().pred_row, 0.7);
        else
          set_row(weight(model, "pred_input"), 0, 0.7);
        model.store().round();
        const Snapshot after(model, input);
        EXPECT_EQ(before.difference_in(after, "state.").empty(), !found->second)
            << m.name << " " << dtype_name(dtype);
        EXPECT_NE(before.difference_in(after, "nll"), "") << m.name;
      }
  }
  EXPECT_EQ(tested, coupled.size());
}

}  // namespace
}  // namespace sps
