#include "model/family.h"

#include "base/test_dir.h"
#include "model/test_variants.h"

namespace sps {
namespace {

// Design, section 1, second table.
TEST(Family, Presets) {
  struct Row {
    std::string settings, xx, xp, px, pp, readout, level, kv, input, share, tie_head;
  };
  for (const Row& r : {
           Row{"family=sps window=64", "0:inf", "1:64", "0:inf", "0:64", "p", "same", "state", "row", "all",
               "true"},
           {"family=sps window=0", "0:inf", "none", "0:inf", "0:0", "p", "same", "state", "row", "all",
            "true"},
           {"family=sps window=full", "0:inf", "1:inf", "0:inf", "0:inf", "p", "same", "state", "row", "all",
            "true"},
           {"family=delayed_state window=64", "0:64", "1:inf", "0:64", "0:inf", "p", "same", "state", "row",
            "all", "true"},
           {"family=reverse_sps window=64", "0:64", "1:inf", "0:64", "0:inf", "x", "same", "state", "row",
            "all", "true"},
           {"family=reverse_sps window=0", "0:0", "1:inf", "0:0", "0:inf", "x", "same", "state", "row", "all",
            "true"},
           {"family=free_pause", "0:inf", "none", "0:inf", "none", "p", "same", "state", "vector", "all",
            "true"},
           {"family=free_pause window=16", "0:inf", "none", "0:inf", "0:16", "p", "same", "state", "vector",
            "all", "true"},
           {"family=free_pause window=full", "0:inf", "none", "0:inf", "0:inf", "p", "same", "state",
            "vector", "all", "true"},
           {"family=free_pause ffn=pooled", "0:inf", "none", "0:inf", "none", "p", "same", "state", "vector",
            "attention,norms", "true"},
           {"family=two_tower", "0:inf", "none", "0:inf", "none", "p", "post", "own", "table", "none",
            "false"},
           {"family=two_tower pred_layers=2", "0:inf", "none", "0:inf", "none", "p", "top", "own", "table",
            "none", "false"},
           {"family=sequential", "0:inf", "none", "0:inf", "none", "p", "final", "own", "table", "none",
            "false"},
           {"family=sequential pred_layers=2", "0:inf", "none", "0:inf", "none", "p", "final", "own", "table",
            "none", "false"},
       }) {
    SCOPED_TRACE(r.settings);
    const ModelKeys k = keys_of(config_for("demo", r.settings));
    EXPECT_EQ(k.band_xx, r.xx);
    EXPECT_EQ(k.band_xp, r.xp);
    EXPECT_EQ(k.band_px, r.px);
    EXPECT_EQ(k.band_pp, r.pp);
    EXPECT_EQ(k.readout, r.readout);
    EXPECT_EQ(k.read_level, r.level);
    EXPECT_EQ(k.read_kv, r.kv);
    EXPECT_EQ(k.pred_input, r.input);
    EXPECT_EQ(k.share, r.share);
    EXPECT_EQ(k.tie_head, r.tie_head);
  }
  const ModelConfig standard = config_for("demo", "family=standard");
  EXPECT_FALSE(standard.has_pred());
  EXPECT_EQ(standard.xx, Band::causal());
  EXPECT_EQ(standard.readout, Readout::state);
  EXPECT_TRUE(standard.tie_head);
}

TEST(Family, DefaultWindows) {
  EXPECT_EQ(keys_of(config_for("s", "family=sps")).window, 64);
  EXPECT_EQ(keys_of(config_for("s", "family=delayed_state")).window, 64);
  EXPECT_EQ(keys_of(config_for("s", "family=reverse_sps")).window, 64);
  EXPECT_EQ(keys_of(config_for("s", "family=free_pause")).window, 0);
}

TEST(Family, WindowsAreReadBackFromTheBands) {
  for (const std::string family : {"sps", "delayed_state", "reverse_sps", "free_pause"})
    for (const int64_t w : {int64_t{0}, int64_t{1}, int64_t{64}, kWindowFull}) {
      ModelKeys keys = keys_for("demo", "family=" + family);
      keys.window = w;
      EXPECT_EQ(family_window(resolve(keys)), w) << family;
    }
  EXPECT_EQ(family_window(config_for("demo", "family=standard")), 0);
  EXPECT_EQ(family_window(config_for("demo", "family=two_tower")), 0);
}

TEST(Family, AKeyThatIsSetWins) {
  const ModelConfig c =
      config_for("demo", "family=sps window=64 band.xp=1:3 pred_input=vector share=attention readout=p");
  EXPECT_EQ(c.xp, (Band{1, 3}));
  EXPECT_EQ(c.pp, (Band{0, 64}));
  EXPECT_EQ(c.pred_input, PredInput::vector);
  EXPECT_EQ(share_text(c.share), "attention");
}

TEST(Family, TheNameIsOnlyALabel) {
  // The same keys from another preset are the same model.
  ModelConfig a = config_for("s", "family=free_pause"),
              b = config_for(
                  "s",
                  "family=two_tower read.level=same read.kv=state pred_input=vector share=all tie_head=true"),
              c = config_for("s", "family=sps window=0 band.pp=none pred_input=vector");
  b.family = c.family = a.family;
  EXPECT_EQ(a, b);
  EXPECT_EQ(a, c);
}

TEST(Family, NamesAndScales) {
  EXPECT_EQ(family_names(), (std::vector<std::string>{"standard", "sps", "delayed_state", "reverse_sps",
                                                      "free_pause", "two_tower", "sequential"}));
  EXPECT_EQ(scale_names(), "demo, xs, s, m, l, xl, 1b");
  EXPECT_EQ(find_scale("xxl"), nullptr);
  // Training spec, section 11; the second paper's model is its section 12.
  const auto dims = [](std::string_view name) {
    const Scale& s = *find_scale(name);
    return std::vector<int64_t>{s.layers, s.heads, s.kv_heads, s.d_model, s.d_ffn, s.context};
  };
  EXPECT_EQ(dims("xs"), (std::vector<int64_t>{8, 8, 8, 512, 1536, 4096}));
  EXPECT_EQ(dims("s"), (std::vector<int64_t>{12, 12, 12, 768, 2304, 4096}));
  EXPECT_EQ(dims("m"), (std::vector<int64_t>{24, 16, 16, 1024, 3072, 4096}));
  EXPECT_EQ(dims("l"), (std::vector<int64_t>{36, 20, 20, 1280, 3840, 4096}));
  EXPECT_EQ(dims("xl"), (std::vector<int64_t>{48, 25, 25, 1600, 4800, 4096}));
  EXPECT_EQ(dims("1b"), (std::vector<int64_t>{24, 16, 8, 1536, 6144, 8192}));
}

TEST(Family, DefaultsOfTheBackbone) {
  const ModelConfig c = resolve({});
  EXPECT_EQ(c.family, "standard");
  EXPECT_EQ(c.state.ffn, std::vector<int64_t>(12, 3 * 768));
  EXPECT_EQ(c.head_dim, 64);
  EXPECT_EQ(c.state.kv_heads, 12);
  EXPECT_EQ(c.vocab, 50304);
  EXPECT_EQ(c.eot, 50256);
  EXPECT_EQ(config_for("s", "family=sps").pred_row, 50257);
  EXPECT_EQ(c.context, 4096);
  EXPECT_EQ(c.norm_eps, 1e-6);
}

}  // namespace
}  // namespace sps
