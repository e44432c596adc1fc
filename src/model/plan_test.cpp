#include "model/plan.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "model/test_variants.h"

namespace sps {
namespace {

Plan plan_for(const std::string& scale, const std::string& settings) {
  return make_plan(config_for(scale, settings));
}

// One letter a block: '.' none, 'k' keys, 'p' pool, 'A' all.
std::string letters(const std::vector<Need>& needs) {
  std::string text;
  for (const Need n : needs) text += ".kpA"[size_t(n)];
  return text;
}
std::string letters(const std::vector<bool>& flags) {
  std::string text;
  for (const bool f : flags) text += f ? '1' : '0';
  return text;
}
std::string text(Horizon h) {
  return h.kind == Horizon::nothing      ? "nothing"
         : h.kind == Horizon::persistent ? "persistent"
                                         : "ring " + std::to_string(h.steps);
}

struct Row {
  std::string settings, state, pred, pred_keys;
  bool lockstep, joint, constant_start;
  std::string state_horizon, pred_horizon;
  int64_t read_pairs = 0;
};

// Four blocks each (demo scale) unless the row says otherwise. Model spec 8, two-tower spec 1.7 and 5.3.
TEST(Plan, FamilyTable) {
  const std::vector<Row> rows{
      {"family=standard", "AAAA", "", "", false, false, false, "persistent", "nothing"},
      // The loss reads p: of the last state block only keys and values matter.
      {"family=sps window=64", "AAAk", "AAAA", "1111", true, true, true, "persistent", "ring 64"},
      {"family=sps window=full", "AAAk", "AAAA", "1111", true, true, true, "persistent", "persistent"},
      // Without a window the state is independent of p; p still reads its own key.
      {"family=sps window=0", "AAAk", "AAAA", "1111", false, true, true, "persistent", "ring 0"},
      {"family=delayed_state window=64", "AAAk", "AAAA", "1111", true, true, true, "ring 64", "persistent"},
      {"family=delayed_state window=0", "AAAk", "AAAA", "1111", true, true, true, "ring 0", "persistent"},
      // The loss reads x: of the last prediction block only keys and values matter.
      {"family=reverse_sps window=64", "AAAA", "AAAk", "1111", true, true, true, "ring 64", "persistent"},
      {"family=reverse_sps window=full", "AAAA", "AAAk", "1111", true, true, true, "persistent",
       "persistent"},
      {"family=free_pause", "AAAk", "AAAA", "0000", false, true, true, "persistent", "nothing"},
      {"family=free_pause window=16", "AAAk", "AAAA", "1111", false, true, true, "persistent", "ring 16"},
      // Pooled: the last state rows enter the pool, only what leaves it for them is dead.
      {"family=free_pause ffn=pooled", "AAAp", "AAAA", "0000", true, true, true, "persistent", "nothing"},
      {"family=free_pause ffn=pooled read.kv=own share=attention", "AAAp", "AAAA", "0000", true, true, true,
       "persistent", "nothing", 4},
      // Reads at post, top and final leave nothing dead.
      {"family=two_tower", "AAAA", "AAAA", "0000", false, false, false, "persistent", "nothing", 4},
      {"family=two_tower pred_layers=2", "AAAA", "AA", "00", false, false, false, "persistent", "nothing", 2},
      {"family=sequential", "AAAA", "AAAA", "0000", false, false, false, "persistent", "nothing", 4},
      {"family=sequential state_layers=1 pred_layers=3", "A", "AAA", "000", false, false, false, "persistent",
       "nothing", 3},
      {"family=free_pause read.level=post", "AAAA", "AAAA", "0000", false, false, true, "persistent",
       "nothing", 1},
      {"family=free_pause read.level=final", "AAAA", "AAAA", "0000", false, false, true, "persistent",
       "nothing", 1},
      // Same level, projected by the reader: the last state block feeds nothing.
      {"family=two_tower read.level=same", "AAA.", "AAAA", "0000", false, false, false, "persistent",
       "nothing", 4},
      {"family=two_tower read.level=same read.kv=state", "AAAk", "AAAA", "0000", false, true, false,
       "persistent", "nothing"},
      // Lists: blocks at and above the highest level read.
      {"family=two_tower read.level=2,0,1,2", "AA..", "AAAA", "0000", false, false, false, "persistent",
       "nothing", 4},
      {"family=two_tower read.level=0,0,0,0", "....", "AAAA", "0000", false, false, false, "persistent",
       "nothing", 4},
      {"family=free_pause read.level=2,0,1,2", "AAk.", "AAAA", "0000", false, false, true, "persistent",
       "nothing"},
      {"family=free_pause read.level=0,0,0,0", "k...", "AAAA", "0000", false, false, true, "persistent",
       "nothing"},
      {"family=free_pause read.level=0,4,0,0", "AAAA", "AAAA", "0000", false, false, true, "persistent",
       "nothing", 1},
      {"family=two_tower layers=6 read.level=6,6,6,4,5,6", "AAAAAA", "AAAAAA", "000000", false, false, false,
       "persistent", "nothing", 6},
      // A start from the final residual needs the whole state tower first, whatever is read.
      {"family=free_pause pred_input=state", "AAAA", "AAAA", "0000", false, false, false, "persistent",
       "nothing"},
      {"family=free_pause pred_input=token", "AAAk", "AAAA", "0000", false, true, false, "persistent",
       "nothing"},
      {"family=sequential pred_input=vector", "AAAA", "AAAA", "0000", false, false, true, "persistent",
       "nothing", 4},
      // Only its own keys: the state is dead work altogether.
      {"family=free_pause pred_input=table band.px=none band.pp=0:inf", "....", "AAAA", "1111", false, true,
       false, "persistent", "persistent"},
  };
  for (const Row& r : rows) {
    SCOPED_TRACE(r.settings);
    const Plan p = plan_for("demo", r.settings);
    EXPECT_EQ(letters(p.state), r.state);
    EXPECT_EQ(letters(p.pred), r.pred);
    EXPECT_EQ(letters(p.pred_keys), r.pred_keys);
    EXPECT_EQ(p.lockstep, r.lockstep);
    EXPECT_EQ(p.joint, r.joint);
    EXPECT_EQ(p.constant_start, r.constant_start);
    EXPECT_EQ(text(p.state_horizon), r.state_horizon);
    EXPECT_EQ(text(p.pred_horizon), r.pred_horizon);
    EXPECT_EQ(p.read_pairs, r.read_pairs);
    EXPECT_EQ(p.state_blocks_alive(),
              int64_t(r.state.size()) - std::count(r.state.begin(), r.state.end(), '.'));
  }
}

TEST(Plan, DeepModelsAreDeadInTheLastBlockOnly) {
  for (const std::string scale : {"xs", "s", "m", "l", "xl"}) {
    const Plan sps = plan_for(scale, "family=sps"), reverse = plan_for(scale, "family=reverse_sps");
    const size_t layers = size_t(sps.config.state.layers);
    const std::string all(layers, 'A'), last = std::string(layers - 1, 'A') + "k";
    EXPECT_EQ(letters(sps.state), last);
    EXPECT_EQ(letters(sps.pred), all);
    EXPECT_EQ(letters(reverse.state), all);
    EXPECT_EQ(letters(reverse.pred), last);
  }
}

TEST(Plan, NothingIsDeadWithoutTheElimination) {
  for (const Variant& v : variants()) {
    SCOPED_TRACE(v.name);
    const ModelConfig c = config_for("s", v.settings);
    const Plan p = make_plan(c, false);
    EXPECT_FALSE(p.eliminate_dead);
    EXPECT_FALSE(p.constant_start);
    EXPECT_EQ(letters(p.state), std::string(size_t(c.state.layers), 'A'));
    EXPECT_EQ(letters(p.pred), std::string(size_t(c.pred.layers), 'A'));
    EXPECT_EQ(letters(p.pred_keys), std::string(size_t(c.pred.layers), c.pred_writes_keys() ? '1' : '0'));
    EXPECT_EQ(int64_t(p.own_readers.size()), c.has_pred() && c.read_kv == ReadKv::own ? c.pred.layers : 0);
  }
}

TEST(Plan, StagesRunEachBlockOnceInOrder) {
  const auto stages = [](const std::string& settings) {
    std::string all;
    for (const Stage s : plan_for("demo", settings).stages) all += fmt::format("{}/{} ", s.state, s.pred);
    return all;
  };
  EXPECT_EQ(stages("family=standard"), "0/-1 1/-1 2/-1 3/-1 ");
  EXPECT_EQ(stages("family=sps"), "0/0 1/1 2/2 3/3 ");
  EXPECT_EQ(stages("family=free_pause"), "0/0 1/1 2/2 3/3 ");
  EXPECT_EQ(stages("family=sequential state_layers=1 pred_layers=3"), "0/-1 -1/0 -1/1 -1/2 ");
  EXPECT_EQ(stages("family=free_pause pred_input=state"), "0/-1 1/-1 2/-1 3/-1 -1/0 -1/1 -1/2 -1/3 ");
}

TEST(Plan, ReadersOfOneLevelShareAProduct) {
  const auto readers = [](const std::string& settings) {
    std::string all;
    for (const Plan::LevelReaders& r : plan_for("demo", settings).own_readers) {
      all += fmt::format("{}:", r.level);
      for (const int64_t b : r.blocks) all += std::to_string(b);
      all += ' ';
    }
    return all;
  };
  EXPECT_EQ(readers("family=sequential"), "4:0123 ");
  EXPECT_EQ(readers("family=two_tower"), "1:0 2:1 3:2 4:3 ");
  EXPECT_EQ(readers("family=two_tower pred_layers=2"), "3:0 4:1 ");
  EXPECT_EQ(readers("family=two_tower read.level=3,1,3,0"), "0:3 1:1 3:02 ");
  EXPECT_EQ(readers("family=free_pause"), "");
}

TEST(Plan, LevelsThatAreReadThemselves) {
  const auto needed = [](const std::string& settings) {
    const Plan p = plan_for("demo", settings);
    std::string levels;
    for (int64_t l = 0; l <= p.config.state.layers; ++l)
      if (p.level_needed(l)) levels += std::to_string(l);
    return levels;
  };
  EXPECT_EQ(needed("family=standard"), "");
  EXPECT_EQ(needed("family=free_pause"), "");  // keys and values, not residuals
  EXPECT_EQ(needed("family=free_pause read.level=final"), "4");
  EXPECT_EQ(needed("family=free_pause pred_input=state"), "4");
  EXPECT_EQ(needed("family=sequential"), "4");
  EXPECT_EQ(needed("family=two_tower"), "1234");
  EXPECT_EQ(needed("family=two_tower read.level=3,1,3,0"), "013");
}

}  // namespace
}  // namespace sps
