#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "base/test_dir.h"
#include "model/family.h"
#include "train/run_config.h"

namespace sps {
namespace {

constexpr int64_t kM = 1'000'000, kB = 1'000'000'000;

// Training spec, section 11: the reference's recipes in its own spellings.
struct Row {
  std::string name, scale, family;
  int64_t window, budget_b, seed, micro;
};

std::vector<Row> reference_recipes() {
  std::vector<Row> rows;
  const auto add = [&](const std::string& scale, const std::string& family, int64_t window, int64_t budget,
                       int64_t seed = 1337) {
    std::string name = scale + "_" + family;
    if (window >= 0) name += fmt::format("_w{}", window);
    name += fmt::format("_{}b", budget);
    if (seed != 1337) name += fmt::format("_seed{}", seed);
    const int64_t micro = scale == "l" && family != "full_attention" ? 3 : 6;
    rows.push_back({name, scale, family, window == 4096 ? kWindowFull : window, budget, seed, micro});
  };
  for (const std::string s : {"xs", "s", "m", "l", "xl"}) add(s, "full_attention", -1, 20);
  for (const std::string s : {"xs", "s", "m", "l"}) add(s, "full_attention", -1, 40);
  for (const int64_t seed : {1337, 0, 1}) add("s", "full_attention", -1, 10, seed);
  for (const auto& [family, window] : {std::pair("sps", 64), {"sps", 4096}, {"delayed_state", 64}}) {
    for (const std::string s : {"xs", "s", "m", "l", "xl"}) add(s, family, window, 20);
    for (const int64_t seed : {1337, 0, 1}) add("s", family, window, 10, seed);
  }
  for (const std::string family : {"sps", "delayed_state", "reverse_sps"})
    for (const int64_t w : {0, 16, 256}) add("s", family, w, 20);
  add("s", "reverse_sps", 64, 20);
  return rows;
}

TEST(Recipe, TheReferencesFortySix) {
  const std::vector<Row> rows = reference_recipes();
  std::set<std::string> names;
  for (const Row& r : rows) names.insert(r.name);
  ASSERT_EQ(names.size(), 46u);
  for (const Row& r : rows) {
    SCOPED_TRACE(r.name);
    EXPECT_TRUE(looks_like_recipe(r.name));
    const RunConfig c = load_run_config(r.name, {});
    EXPECT_EQ(c.name, r.name);
    EXPECT_EQ(c.train.tokens, r.budget_b * kB);
    EXPECT_EQ(c.schedule.decay_tokens, r.budget_b * kB / 10);
    EXPECT_EQ(c.schedule.warmup_tokens, r.scale == "xs" || r.scale == "s" ? 50 * kM : 100 * kM);
    EXPECT_EQ(c.train.save_every_tokens, r.budget_b == 10 ? kB : 2 * kB);
    EXPECT_EQ(c.train.eval_every_tokens, r.budget_b == 10 ? 20 * kM : 40 * kM);
    EXPECT_EQ(c.train.rolling_every_tokens, 100 * kM);
    EXPECT_EQ(c.train.global_batch, 96);
    EXPECT_EQ(c.train.micro_batch, r.micro);
    EXPECT_EQ(c.train.seed, r.seed);
    EXPECT_EQ(c.phase.at, 0);
    EXPECT_EQ(c.optim.lr, 6e-4);
    EXPECT_EQ(c.optim.min_lr, 6e-5);
    EXPECT_EQ(c.optim.weight_decay, 0.1);
    EXPECT_EQ(c.optim.beta1, 0.9);
    EXPECT_EQ(c.optim.beta2, 0.95);
    EXPECT_EQ(c.optim.clip, 1);
    EXPECT_EQ(c.make_schedule().batch_tokens, 393'216);

    const ModelConfig m = resolve(c.model);
    EXPECT_EQ(m.family, r.family == "full_attention" ? "standard" : r.family);
    const Scale& scale = *find_scale(r.scale);
    EXPECT_EQ(m.state.layers, scale.layers);
    EXPECT_EQ(m.state.width, scale.d_model);
    EXPECT_EQ(m.state.heads, scale.heads);
    EXPECT_EQ(m.state.ffn, std::vector<int64_t>(size_t(scale.layers), scale.d_ffn));
    EXPECT_EQ(m.context, 4096);
    EXPECT_EQ(m.vocab, 50304);
    if (r.family != "full_attention") {
      EXPECT_EQ(family_window(m), r.window);
      EXPECT_EQ(m.pred, m.state);
      EXPECT_EQ(m.pred_input, PredInput::row);
      EXPECT_EQ(m.pred_row, 50257);
      EXPECT_EQ(share_text(m.share), "all");
    }
  }
}

TEST(Recipe, SpellingsOfOneModel) {
  const auto model = [](const std::string& name) { return resolve(recipe(name).model); };
  EXPECT_EQ(model("s_full_attention_20b"), model("s_standard_20b"));
  EXPECT_EQ(model("s_sps_w4096_20b"), model("s_sps_wfull_20b"));
  EXPECT_EQ(model("s_sps_w5000_20b"), model("s_sps_wfull_20b"));
  EXPECT_EQ(model("s_sps_20b"), model("s_sps_w64_20b"));
  EXPECT_EQ(model("s_free_pause_w0_20b"), model("s_free_pause_20b"));
  EXPECT_EQ(model("s_two_tower_20b"), model("s_two_tower_12+12_20b"));
  EXPECT_NE(model("s_sps_w4095_20b"), model("s_sps_wfull_20b"));
  EXPECT_EQ(recipe("s_sps_1.5b").train.tokens, 1'500'000'000);
  EXPECT_EQ(recipe("s_sps_300k").train.tokens, 300'000);
}

TEST(Recipe, Demonstration) {
  const RunConfig c = load_run_config("demo_sps_w16_tok_4m", {});
  EXPECT_EQ(c.train.tokens, 4 * kM);
  EXPECT_EQ(c.schedule.decay_tokens, 800'000);
  EXPECT_EQ(c.schedule.warmup_tokens, 200'000);
  EXPECT_EQ(c.train.save_every_tokens, kM);
  EXPECT_EQ(c.train.eval_every_tokens, 200'000);
  EXPECT_EQ(c.train.eval_tokens, 80'000);
  EXPECT_EQ(c.train.global_batch, 16);
  EXPECT_EQ(c.make_schedule().batch_tokens, 4096);
  EXPECT_EQ(c.optim.lr, 2e-3);
  const ModelConfig m = resolve(c.model);
  EXPECT_EQ(m.state.layers, 4);
  EXPECT_EQ(m.state.width, 256);
  EXPECT_EQ(m.pp, (Band{0, 16}));
  EXPECT_EQ(m.xp, (Band{1, 16}));
  EXPECT_EQ(m.pred_input, PredInput::token);
}

TEST(Recipe, Towers) {
  const RunConfig c = load_run_config("s_sequential_6+6_20b", {});
  EXPECT_EQ(c.train.micro_batch, 6);
  EXPECT_EQ(c.schedule.decay_tokens, 2 * kB);
  const ModelConfig m = resolve(c.model);
  EXPECT_EQ(m.state.layers, 6);
  EXPECT_EQ(m.pred.layers, 6);
  EXPECT_EQ(m.read_level, ReadLevel::final);
  EXPECT_EQ(m.read_kv, ReadKv::own);
  EXPECT_EQ(m.pred_input, PredInput::table);
  const ModelConfig uneven = resolve(recipe("s_sequential_3+9_20b").model);
  EXPECT_EQ(uneven.state.layers, 3);
  EXPECT_EQ(uneven.pred.layers, 9);
  EXPECT_EQ(resolve(recipe("s_two_tower_12+6_20b").model).read_level, ReadLevel::top);
}

TEST(Recipe, SecondPaper) {
  const RunConfig c = load_run_config("1b_free_pause_pooled_phase75_100b_seed2", {});
  EXPECT_EQ(c.train.tokens, 100 * kB);
  EXPECT_EQ(c.schedule.decay_tokens, 25 * kB);  // the last quarter
  EXPECT_EQ(c.phase.at, 0.75);
  EXPECT_EQ(c.train.seed, 2);
  EXPECT_EQ(c.make_schedule().batch_tokens, 524'288);
  const ModelConfig m = resolve(c.model);
  EXPECT_EQ(m.ffn, FfnMode::pooled);
  EXPECT_EQ(share_text(m.share), "attention,norms");
  EXPECT_EQ(m.state.layers, 24);
  EXPECT_EQ(m.state.width, 1536);
  EXPECT_EQ(m.state.heads, 16);
  EXPECT_EQ(m.state.kv_heads, 8);
  EXPECT_EQ(m.context, 8192);
  EXPECT_TRUE(m.qk_norm);
  EXPECT_EQ(m.sliding_window, 2048);
  EXPECT_EQ(m.full_attention_every, 6);
  EXPECT_EQ(recipe("1b_free_pause_phase42.5_100b").phase.at, 0.425);
  EXPECT_EQ(recipe("1b_free_pause_phase0_100b").phase.at, 0);
}

TEST(Recipe, WrongPartsAreNamed) {
  struct Wrong {
    std::string name, part, expected;
  };
  for (const Wrong& w : std::vector<Wrong>{
           {"tiny_sps_20b", "'tiny'", "demo, xs, s, m, l, xl, 1b"},
           {"s", "''", "a family"},
           {"s_spss_20b", "'spss'", "a family"},
           {"s_full_20b", "'full'", "a family"},
           {"s_sps_w_20b", "'w'", "a window"},
           {"s_sps_w6x_20b", "'w6x'", "a window"},
           {"s_sps_w-1_20b", "'w-1'", "a window"},
           {"s_standard_w64_20b", "standard", "no window"},
           {"s_two_tower_w64_20b", "two_tower", "no window"},
           {"s_sequential_6+6_w64_20b", "sequential", "no window"},
           {"s_sps_6+6_20b", "s_sps_6+6_20b", "two_tower and sequential"},
           {"s_sequential_6+_20b", "'6+'", "two depths"},
           {"s_sequential_+6_20b", "'+6'", "two depths"},
           {"s_sequential_0+6_20b", "'0+6'", "two depths"},
           {"s_sequential_6+0_20b", "'6+0'", "two depths"},
           {"s_sequential_6+6+6_20b", "'6+6+6'", "two depths"},
           {"s_standard_pooled_20b", "'pooled'", "standard has none"},
           {"s_standard_tok_20b", "'tok'", "standard has none"},
           {"s_standard_phase50_20b", "'phase50'", "standard has none"},
           {"s_free_pause_phase_20b", "'phase'", "a percentage"},
           {"s_free_pause_phase75%_20b", "'phase75%'", "a percentage"},
           {"s_free_pause_phase100_20b", "'phase100'", "below 100"},
           {"s_free_pause_phase-1_20b", "'phase-1'", "below 100"},
           {"s_free_pause_phaseinf_20b", "'phaseinf'", "below 100"},
           {"s_free_pause_phasenan_20b", "'phasenan'", "below 100"},
           {"s_sps_w64", "''", "a number of tokens"},
           {"s_sps_w64_20", "'20'", "a number of tokens"},
           {"s_sps_w64_20t", "'20t'", "a number of tokens"},
           {"s_sps_w64_b", "'b'", "a number of tokens"},
           {"s_sps_w64_0b", "'0b'", "a number of tokens"},
           {"s_sps_w64_-1b", "'-1b'", "a number of tokens"},
           {"s_sps_w64_0.0001k", "'0.0001k'", "a number of tokens"},
           {"s_sps_w64_nanb", "'nanb'", "a number of tokens"},
           {"s_sps_w64_1000000000b", "'1000000000b'", "a number of tokens"},
           {"s_sps_w64_tok_pooled_20b", "'pooled'", "a number of tokens"},  // parts have one order
           {"s_sps_w64_20b_seed", "'seed'", "a seed"},
           {"s_sps_w64_20b_seedx", "'seedx'", "a seed"},
           {"s_sps_w64_20b_seed-1", "'seed-1'", "a seed"},
           {"s_sps_w64_20b_more", "'more'", "the end"},
           {"s_sps_w64_20b_seed1_seed2", "'seed2'", "the end"},
       }) {
    SCOPED_TRACE(w.name);
    const std::string sentence = error_of([&] { recipe(w.name); });
    EXPECT_PRED2(mentions, sentence, w.name);
    EXPECT_PRED2(mentions, sentence, w.part);
    EXPECT_PRED2(mentions, sentence, w.expected);
  }
}

TEST(Recipe, WhatLooksLikeOne) {
  for (const char* name : {"s_sps_w64_20b", "demo_x", "1b_free_pause_100b"})
    EXPECT_TRUE(looks_like_recipe(name)) << name;
  for (const char* name : {"s", "runs/s_sps_20b", "s_mine.toml", "my_run", "", "_sps"})
    EXPECT_FALSE(looks_like_recipe(name)) << name;
}

}  // namespace
}  // namespace sps
