#include "model/flops.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "model/test_variants.h"

namespace sps {
namespace {

constexpr int64_t kLength = 4096;

double published(const std::string& scale, const std::string& settings) {
  return flops_published(config_for(scale, settings), kLength).total();
}
double required(const std::string& scale, const std::string& settings) {
  return flops_required(config_for(scale, settings), kLength).total();
}
double executed(const std::string& scale, const std::string& settings) {
  return flops_executed(make_plan(config_for(scale, settings)), kLength).total();
}

// Two-tower spec, 2.3.
TEST(Flops, TwoTowerTable) {
  for (const Variant& v : variants()) {
    SCOPED_TRACE(v.name);
    EXPECT_EQ(published("s", v.settings), double(v.published));
    EXPECT_NEAR(required("s", v.settings) / 1e9, v.required, 0.00005);
  }
}

TEST(Flops, ThePrunedFreePauseIsThePublishedOne) {
  // The spec's 0.5505 leaves out the last state block beyond its keys and values. We also project the one
  // start vector once: 2 d^2 a token less one row's share.
  const double start = 2.0 * 768 * 768 * (1 - 1.0 / kLength);
  EXPECT_NEAR((executed("s", "family=free_pause") + start) / 1e9, 0.5505, 0.00005);
  // The same to the last digit, from the spec's terms.
  const double pairs = double(kLength + 1) / 2;
  const double last = 2 * 2 * 768.0 * 768 + 6 * 768.0 * 2304 + pairs * (4 * 768 + 3 * 12);
  EXPECT_DOUBLE_EQ(required("s", "family=free_pause") - executed("s", "family=free_pause"), last + start);
}

TEST(Flops, TermsOfTheStandardModel) {
  const Flops f = flops_published(config_for("s", "family=standard"), kLength);
  for (const auto& [term, value] : {std::pair(f.qkv, 42.467),
                                    {f.out, 14.156},
                                    {f.ffn, 127.402},
                                    {f.scores, 75.497},
                                    {f.softmax, 1.769},
                                    {f.weighted, 75.497},
                                    {f.head, 77.195}})
    EXPECT_NEAR(term / 1e6, value, 0.0006);  // the spec prints some of them cut, not rounded
  EXPECT_EQ(f.read, 0);
  EXPECT_EQ(f.gates, 0);
}

TEST(Flops, OtherScales) {
  struct Row {
    std::string scale;
    double standard, sps;
  };
  for (const auto& [scale, standard, sps] : {Row{"xs", 0.17388, 0.29843}, Row{"m", 1.16461, 2.23902},
                                             Row{"l", 2.42602, 4.74726}, Row{"xl", 4.62874, 9.13644}}) {
    EXPECT_NEAR(published(scale, "family=standard") / 1e9, standard, 5e-6);
    EXPECT_NEAR(published(scale, "family=sps window=64") / 1e9, sps, 5e-6);
  }
}

TEST(Flops, AnchorIdentities) {
  constexpr double L = 12, d = 768, h = 12;
  const std::string s = "s", pause = "family=free_pause";
  EXPECT_EQ(published(s, pause),
            published(s, "family=sps window=64") - L * 4 * d * d - 2 * L * (4 * 64 * d + 3 * h * 64));
  EXPECT_EQ(published(s, pause + " read.level=post") - published(s, pause), 4 * d * d);
  EXPECT_EQ(published(s, pause + " read.level=final") - published(s, pause), 4 * d * d);
  const std::string tower = "family=two_tower read.level=same read.kv=";
  EXPECT_EQ(published(s, tower + "own") - published(s, tower + "state"), L * 4 * d * d);
  // The state tower's width moves the FFN term alone.
  const Flops wide = flops_published(config_for(s, "family=two_tower"), kLength),
              slim = flops_published(config_for(s, "family=two_tower d_ffn=1152 pred_ffn=2304"), kLength);
  EXPECT_EQ(wide.ffn - slim.ffn, L * 6 * d * 1152);
  EXPECT_EQ(wide.total() - slim.total(), wide.ffn - slim.ffn);
  // Sharing weights saves no work.
  EXPECT_EQ(published(s, "family=two_tower"), published(s, "family=two_tower share=all"));
  // 50304 rows instead of 50257 ids.
  const ModelConfig c = config_for(s, "family=standard");
  EXPECT_EQ(flops_required(c, kLength).head - flops_published(c, kLength).head, 72'192);
  // All three windowed families show as many pairs.
  for (const std::string family : {"delayed_state", "reverse_sps"})
    for (const std::string window : {"0", "16", "64", "full"}) {
      EXPECT_EQ(required(s, "family=" + family + " window=" + window),
                required(s, "family=sps window=" + window));
      EXPECT_EQ(published(s, "family=" + family + " window=" + window),
                published(s, "family=sps window=" + window));
    }
  EXPECT_EQ(published(s, "family=sps window=full"), published(s, "family=sps window=4096"));
}

// Analysis spec, section 6: MFLOP a token and ratios to it, causal area.
TEST(Flops, CausalAreaTable) {
  struct Row {
    std::string scale;
    double standard, w64, ratio64, ratio0, ratio_full;
  };
  for (const Row& r : {Row{"xs", 140.0, 230.6, 1.65, 1.63, 2.12}, Row{"s", 337.7, 602.9, 1.79, 1.77, 2.22},
                       Row{"m", 961.1, 1831.8, 1.91, 1.89, 2.32}, Row{"l", 2044.3, 3983.7, 1.95, 1.94, 2.31},
                       Row{"xl", 3992.5, 7863.9, 1.97, 1.96, 2.28}}) {
    SCOPED_TRACE(r.scale);
    const double standard = required(r.scale, "family=standard");
    EXPECT_NEAR(standard / 1e6, r.standard, 0.051);
    EXPECT_NEAR(required(r.scale, "family=sps window=64") / 1e6, r.w64, 0.051);
    EXPECT_NEAR(required(r.scale, "family=sps window=64") / standard, r.ratio64, 0.0051);
    // This w = 0 keeps every prediction row's own key, unlike the free pause.
    EXPECT_NEAR(required(r.scale, "family=sps window=0") / standard, r.ratio0, 0.0051);
    EXPECT_NEAR(required(r.scale, "family=sps window=full") / standard, r.ratio_full, 0.0051);
  }
}

TEST(Flops, TheSecondPapersModelCostsAboutAsMuchAsItSays) {
  const std::string backbone =
      "sliding_window=2048 full_attention_every=6 qk_norm=true vocab=100352 eot=100257 family=";
  const auto cost = [&](const std::string& family) {
    return flops_required(config_for("1b", backbone + family), 8192).total();
  };
  EXPECT_NEAR(cost("free_pause") / cost("standard"), 1.82, 0.005);
}

TEST(Flops, ExecutedIsRequiredWhereNothingIsDead) {
  for (const std::string settings : {"family=standard", "family=two_tower", "family=sequential layers=6",
                                     "family=two_tower pred_layers=6"}) {
    const Flops r = flops_required(config_for("s", settings), kLength),
                e = flops_executed(make_plan(config_for("s", settings)), kLength);
    EXPECT_EQ(r.total(), e.total()) << settings;
    EXPECT_EQ(r.read, e.read) << settings;
  }
}

TEST(Flops, ExecutedWithoutEliminationIsRequired) {
  for (const Variant& v : variants()) {
    const ModelConfig c = config_for("s", v.settings);
    const Flops e = flops_executed(make_plan(c, false), kLength);
    EXPECT_EQ(e.total(), flops_required(c, kLength).total()) << v.name;
  }
}

TEST(Flops, DeadWorkOfTheWindowedFamilies) {
  const double d = 768, rest = 2 * 2 * d * d + 6 * d * 2304;  // query, output, FFN
  const double start = 6 * d * d * (1 - 1.0 / kLength);  // one row's query, key and value in the first block
  const auto area = [](Band b) { return double(ops::band_area(b, kLength)) / kLength; };
  const double pair = 4 * d + 3 * 12;
  for (const std::string family : {"sps", "delayed_state", "reverse_sps"}) {
    const ModelConfig c = config_for("s", "window=64 family=" + family);
    const bool reads_state = family == "reverse_sps";  // the loss reads x, so the last p rows are dead
    const double pairs = reads_state ? area(c.px) + area(c.pp) : area(c.xx) + area(c.xp);
    EXPECT_NEAR(flops_required(c, kLength).total() - flops_executed(make_plan(c), kLength).total(),
                rest + start + pair * pairs, 1)
        << family;
  }
}

TEST(Flops, GatesOfThePooledLayers) {
  // Input gate 2d -> 1 and one output gate a stream; the last state gate is dead.
  const Flops e = flops_executed(make_plan(config_for("s", "family=free_pause ffn=pooled")), kLength);
  EXPECT_EQ(e.gates, 12 * 8 * 768.0 - 2 * 768);
  const Flops all =
      flops_executed(make_plan(config_for("s", "family=free_pause ffn=pooled"), false), kLength);
  EXPECT_EQ(all.gates, 12 * 8 * 768.0);
  EXPECT_EQ(flops_required(config_for("s", "family=free_pause ffn=pooled"), kLength).gates, all.gates);
  EXPECT_EQ(flops_published(config_for("s", "family=free_pause ffn=pooled"), kLength).gates, 0);
}

TEST(Flops, SlidingWindows) {
  const ModelConfig c = config_for("s", "family=standard sliding_window=100 full_attention_every=3");
  const double window = 100.0 * kLength - 100 * 99 / 2, full = double(kLength) * (kLength + 1) / 2;
  EXPECT_DOUBLE_EQ(flops_required(c, kLength).scores, 2 * 768 * (8 * window + 4 * full) / kLength);
}

// Model spec, section 3, told in the reference's slots: x_i is slot 2i, p_i slot 2i + 1; a query sees the
// slots up to its own, and of the windowed stream those at most w tokens back.
struct Reference {
  std::string family;
  int64_t window;  // -1: full

  bool visible(bool query_is_p, int64_t i, bool key_is_p, int64_t j) const {
    const bool two_streams = family != "standard";
    if (!two_streams && (query_is_p || key_is_p)) return false;
    if (2 * j + key_is_p > 2 * i + query_is_p) return false;
    const bool near = window < 0 || i - j <= window;
    if (family == "standard") return true;
    if (family == "sps") return !key_is_p || near;
    if (family == "delayed_state" || family == "reverse_sps") return key_is_p || near;
    // Two towers: prediction keys exist only in the windowed free pause, and only for its own stream.
    if (!key_is_p) return true;
    return family == "free_pause" && window != 0 && query_is_p && near;
  }
};

TEST(VisiblePairs, BandsAreTheRulesOfTheModelSpec) {
  for (const std::string family :
       {"standard", "sps", "delayed_state", "reverse_sps", "free_pause", "two_tower", "sequential"})
    for (const int64_t T : {1, 2, 5, 64, 65, 200})
      for (const int64_t w :
           {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{16}, int64_t{64}, T - 1, T, T + 1, int64_t{-1}}) {
        SCOPED_TRACE(fmt::format("{} T={} w={}", family, T, w));
        const Reference reference{family, w};
        const ModelConfig c = config_for(
            "demo", fmt::format("family={} window={}", family, w < 0 ? "full" : std::to_string(w)));
        int64_t total = 0;
        for (const bool q : {false, true})
          for (const bool k : {false, true}) {
            if (!c.has_pred() && (q || k)) continue;
            const Band band = q ? (k ? c.pp : c.px) : (k ? c.xp : c.xx);
            int64_t pairs = 0, differ = 0;
            for (int64_t i = 0; i < T; ++i)
              for (int64_t j = 0; j < T; ++j) {
                const bool seen = reference.visible(q, i, k, j);
                pairs += seen;
                differ += seen != (!band.empty() && band.lo <= i - j && i - j <= band.hi);
              }
            EXPECT_EQ(differ, 0) << q << k;
            EXPECT_EQ(ops::band_area(band, T), pairs) << q << k;
            total += pairs;
          }
        for (int64_t block = 0; block < c.state.layers; ++block) EXPECT_EQ(visible_pairs(c, block, T), total);
      }
}

// Model spec, 3.6.
TEST(VisiblePairs, ClosedForms) {
  const auto pairs = [](const std::string& family, const std::string& window, int64_t T) {
    return visible_pairs(config_for("s", "family=" + family + " window=" + window), 0, T);
  };
  EXPECT_EQ(pairs("standard", "0", 4096), 8'390'656);
  for (const std::string family : {"sps", "delayed_state", "reverse_sps"}) {
    EXPECT_EQ(pairs(family, "64", 4096), 17'305'536);
    EXPECT_EQ(pairs(family, "0", 4096), 16'785'408);
    EXPECT_EQ(pairs(family, "full", 4096), 33'558'528);
    for (const int64_t T : {1, 2, 5, 64, 65, 200})
      for (const int64_t w : {0, 1, 2, 16, 64, 199, 200, 1000}) {
        const int64_t expected = w <= T - 1 ? T * T + 2 * T + 2 * w * T - w * (w + 1) : T * (2 * T + 1);
        EXPECT_EQ(pairs(family, std::to_string(w), T), expected) << family << " T=" << T << " w=" << w;
      }
  }
  EXPECT_EQ(pairs("free_pause", "0", 4096), 2 * 8'390'656);
}

TEST(VisiblePairs, SlidingWindowsCutTheStateBandsOfTheirBlocks) {
  // The window counts the row itself: steps back 0 .. 4.
  const ModelConfig c = config_for("demo", "family=free_pause sliding_window=5 full_attention_every=4");
  for (const int64_t T : {1, 4, 5, 6, 200}) {
    int64_t near = 0, all = 0;
    for (int64_t i = 0; i < T; ++i)
      for (int64_t j = 0; j <= i; ++j) ++all, near += i - j < 5;
    for (int64_t block = 0; block < 4; ++block)
      EXPECT_EQ(visible_pairs(c, block, T), 2 * (block == 3 ? all : near)) << block << " " << T;
  }
}

}  // namespace
}  // namespace sps
