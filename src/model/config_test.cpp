#include "model/config.h"

#include <algorithm>

#include "base/error.h"
#include "base/test_dir.h"
#include "model/test_variants.h"

namespace sps {
namespace {

// The sentence with which `settings` are refused; also checks that it counts as wrong use.
std::string refusal(const std::string& settings, const std::string& scale = "demo") {
  try {
    config_for(scale, settings);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  ADD_FAILURE() << "accepted: " << settings;
  return "";
}

struct Refused {
  std::string settings;
  std::vector<std::string> named;  // keys and values that the sentence must mention
};
void expect_refused(const std::vector<Refused>& rows) {
  for (const Refused& r : rows) {
    SCOPED_TRACE(r.settings);
    const std::string sentence = refusal(r.settings);
    for (const std::string& thing : r.named) EXPECT_PRED2(mentions, sentence, thing);
  }
}

// Two-tower spec 5.2, rule by rule; demo: four blocks of width 256, three heads of 64.
TEST(Validity, Rule1StreamsThatAdvanceTogetherReadTheSameLevel) {
  expect_refused({
      {"family=sps read.level=post", {"model.band.xp", "read.level"}},
      {"family=sps read.level=final", {"model.band.xp", "read.level"}},
      {"family=two_tower band.xp=1:8", {"model.band.xp", "read.level"}},
      {"family=sequential pred_layers=2 band.xp=1:8", {"model.band.xp", "depth"}},
      {"family=free_pause ffn=pooled read.level=post", {"model.ffn = pooled", "read.level"}},
      {"family=sequential ffn=pooled", {"model.ffn = pooled", "read.level"}},
      {"family=sps pred_width=128 share=none read.kv=own pred_input=vector tie_head=false",
       {"model.band.xp", "width"}},
  });
}

TEST(Validity, Rule2ReusedKeysNeedEqualWidths) {
  expect_refused(
      {{"family=two_tower read.kv=state pred_width=128", {"model.read.kv = state", "256", "128", "own"}}});
  EXPECT_EQ(config_for("demo", "family=two_tower read.kv=own pred_width=128").pred.width, 128);
}

TEST(Validity, Rule3SharedWeightsNeedEqualShapes) {
  expect_refused({
      {"family=two_tower pred_layers=2 share=attention", {"model.share = attention", "depth"}},
      {"family=two_tower pred_width=128 share=norms", {"model.share = norms", "width"}},
      {"family=two_tower share=ffn d_ffn=576 pred_ffn=288", {"model.pred_ffn"}},
      {"family=two_tower share=norms d_ffn=0 pred_ffn=288", {"model.share = norms", "model.pred_ffn"}},
      {"family=free_pause ffn=pooled d_ffn=576 pred_ffn=288", {"model.pred_ffn"}},
      {"family=free_pause ffn=pooled d_ffn=576,576,288,576", {"model.ffn = pooled", "width"}},
      {"family=free_pause ffn=pooled d_ffn=0", {"model.ffn = pooled", "width"}},
      {"family=free_pause ffn=pooled share=all", {"model.ffn = pooled", "share = ffn"}},
      {"family=free_pause ffn=pooled share=ffn", {"model.ffn = pooled", "share = ffn"}},
  });
  // A list of widths may be shared block by block.
  EXPECT_TRUE(config_for("demo", "family=two_tower share=ffn d_ffn=576,288,288,576").share.ffn);
}

TEST(Validity, Rule4ATiedHeadIsAsWideAsTheEmbedding) {
  expect_refused(
      {{"family=two_tower pred_width=128 tie_head=true", {"model.tie_head = true", "256", "128"}}});
}

TEST(Validity, Rule5Bands) {
  expect_refused({
      {"family=sps band.xp=0:8", {"model.band.xp = 0:8", "1 step"}},
      {"family=standard band.xx=1:8", {"model.band.xx = 1:8"}},
      {"family=standard band.xx=none", {"model.band.xx = none"}},
      {"family=free_pause band.px=1:inf", {"model.band.px = 1:inf", "model.band.pp = none"}},
      {"family=free_pause band.px=none", {"model.band.px = none", "model.band.pp = none"}},
      {"family=sps band.px=none band.pp=1:4", {"model.band.pp = 1:4"}},
  });
  // One of them is enough.
  EXPECT_EQ(config_for("demo", "family=free_pause band.px=1:inf band.pp=0:0").px, (Band{1, Band::kInf}));
}

TEST(Validity, Rule6Levels) {
  const auto levels = [](const std::string& settings) { return config_for("demo", settings).levels; };
  using L = std::vector<int64_t>;
  const std::string tower = "family=two_tower read.level=";
  EXPECT_EQ(levels(tower + "same"), (L{0, 1, 2, 3}));
  EXPECT_EQ(levels(tower + "post"), (L{1, 2, 3, 4}));
  EXPECT_EQ(levels(tower + "top"), (L{1, 2, 3, 4}));  // equal depth: as post
  EXPECT_EQ(levels(tower + "top pred_layers=2"), (L{3, 4}));
  EXPECT_EQ(levels(tower + "top pred_layers=1"), (L{4}));
  EXPECT_EQ(levels(tower + "final"), (L{4, 4, 4, 4}));
  EXPECT_EQ(levels(tower + "final pred_layers=2"), (L{4, 4}));
  EXPECT_EQ(levels(tower + "final state_layers=1 pred_layers=3"), (L{1, 1, 1}));
  EXPECT_EQ(levels(tower + "4,0,4,2"), (L{4, 0, 4, 2}));
  EXPECT_EQ(config_for("s", "family=two_tower pred_layers=6").levels, (L{7, 8, 9, 10, 11, 12}));
  expect_refused({
      {tower + "same pred_layers=2", {"model.read.level = same", "4 and 2"}},
      {tower + "post pred_layers=2", {"model.read.level = post", "4 and 2"}},
      {tower + "top state_layers=2 pred_layers=4", {"model.read.level = top", "4 and 2"}},
      {tower + "pre", {"model.read.level = 'pre'", "same, post, top, final"}},
      {tower + "list", {"model.read.level", "list"}},
      {tower + "1,2,3", {"model.read.level", "3 levels", "4 prediction blocks"}},
      {tower + "1,2,3,5", {"model.read.level", "5", "0 to 4"}},
      {tower + "1,2,-1,3", {"model.read.level", "-1", "0 to 4"}},
      {tower + "1,2,x,3", {"model.read.level = '1,2,x,3'"}},
      {tower + "1,2,,3", {"model.read.level = '1,2,,3'"}},
  });
}

TEST(Validity, UnknownValuesNameTheKeyAndTheChoice) {
  expect_refused({
      {"family=pause", {"model.family = 'pause'", "free_pause"}},
      {"family=two_tower read.kv=both", {"model.read.kv = 'both'", "state, own"}},
      {"family=two_tower pred_input=column",
       {"model.pred_input = 'column'", "row, vector, table, token, state"}},
      {"family=two_tower share=embedding", {"model.share = 'embedding'", "attention, norms, ffn"}},
      {"family=two_tower share=attention,", {"model.share = 'attention,'"}},
      {"family=two_tower ffn=shared", {"model.ffn = 'shared'", "separate, pooled"}},
      {"family=two_tower readout=q", {"model.readout = 'q'", "x, p"}},
      {"family=two_tower tie_head=yes", {"model.tie_head = 'yes'", "true or false"}},
      {"family=standard rope_pairs=split", {"model.rope_pairs = 'split'", "half_split"}},
      {"family=sps band.pp=8", {"model.band.pp = '8'", "0:64"}},
      {"family=sps band.pp=0:x", {"model.band.pp = '0:x'"}},
      {"family=sps band.pp=:4", {"model.band.pp = ':4'"}},
      {"family=sps band.pp=-1:4", {"model.band.pp = '-1:4'", "negative"}},
      {"family=sps band.pp=0:-4", {"model.band.pp = '0:-4'", "negative"}},
      {"family=sps band.pp=0:4:5", {"model.band.pp = '0:4:5'"}},
      {"family=sps window=-1", {"model.window", "-1"}},
  });
}

TEST(Validity, ReadoutNeedsAReader) {
  expect_refused({
      {"family=standard readout=p", {"model.readout = p", "model.pred_layers"}},
      {"family=sps pred_layers=0", {"model.readout = p", "model.pred_layers"}},
      {"family=free_pause readout=x", {"model.readout = x", "model.band.xp"}},
      {"family=free_pause ffn=pooled readout=x", {"model.readout"}},
      {"family=sps window=0 readout=x", {"model.readout = x", "model.band.xp"}},
  });
}

TEST(Validity, PredictionInputs) {
  expect_refused({
      {"family=sps pred_input=state", {"model.pred_input = state", "model.band.xp"}},
      {"family=free_pause ffn=pooled pred_input=state", {"model.pred_input = state", "model.ffn = pooled"}},
      {"family=two_tower pred_width=128 pred_input=state", {"model.pred_input = state", "256", "128"}},
      {"family=two_tower pred_width=128 pred_input=token", {"model.pred_input = token", "256", "128"}},
      {"family=two_tower pred_width=128 pred_input=row", {"model.pred_input = row", "256", "128"}},
      {"family=sps vocab=300 eot=299", {"model.vocab = 300", "300"}},
      {"family=sps vocab=300 eot=10 pred_row=300", {"model.vocab = 300", "300"}},
  });
}

TEST(Validity, Backbone) {
  expect_refused({
      {"family=standard heads=5", {"model.heads = 5", "model.d_model = 256"}},
      {"family=standard heads=2 head_dim=64", {"model.heads = 2", "model.head_dim = 64"}},
      {"family=standard kv_heads=3", {"4 heads", "3", "model.kv_heads"}},
      {"family=standard kv_heads=0", {"model.kv_heads = 0"}},
      {"family=standard d_model=195 heads=3 kv_heads=3", {"model.head_dim = 65", "even"}},
      {"family=standard d_model=1536 heads=3", {"model.head_dim = 512", "256"}},
      {"family=standard state_layers=0", {"model.state_layers = 0"}},
      {"family=two_tower pred_layers=-2", {"model.pred_layers = -2"}},
      {"family=two_tower pred_width=100", {"model.pred_width = 100", "model.head_dim = 64"}},
      {"family=two_tower pred_width=0", {"model.pred_width = 0"}},
      {"family=standard vocab=1 eot=0", {"model.vocab = 1"}},
      {"family=standard vocab=300 eot=300", {"model.vocab = 300", "300"}},
      {"family=standard rope_fraction=0", {"model.rope_fraction = 0"}},
      {"family=standard rope_fraction=1.5", {"model.rope_fraction = 1.5"}},
      {"family=standard sliding_window=-1", {"model.sliding_window = -1"}},
      {"family=standard sliding_window=8 full_attention_every=-1", {"model.full_attention_every = -1"}},
      {"family=standard d_ffn=576,576", {"model.d_ffn", "2 widths", "4 blocks"}},
      {"family=standard d_ffn=576,576,-1,576", {"model.d_ffn", "-1"}},
      {"family=two_tower pred_layers=2 pred_ffn=576,576,576", {"model.pred_ffn", "3 widths", "2 blocks"}},
      // Lists of blocks and products of sizes must have room.
      {"family=standard layers=1000000000000", {"model.layers = 1000000000000", "4096"}},
      {"family=two_tower state_layers=4 pred_layers=1000000000000", {"model.pred_layers", "4096"}},
      {"family=standard d_model=9223372036854775807", {"model.d_model = 9223372036854775807", "1048576"}},
      {"family=standard head_dim=9223372036854775807", {"model.head_dim = 9223372036854775807"}},
      {"family=two_tower pred_width=9223372036854775807", {"model.pred_width = 9223372036854775807"}},
      {"family=standard d_ffn=576,576,576,9223372036854775807", {"model.d_ffn = 9223372036854775807"}},
      {"family=sps eot=9223372036854775807", {"model.eot = 9223372036854775807"}},
      // Keys of another block were rotated for its attention, not for the reader's.
      {"family=free_pause read.level=final sliding_window=8 full_attention_every=4 rope_fraction=0.5",
       {"model.read.kv = state", "rope_fraction"}},
  });
}

TEST(Config, AUniformListOfWidthsIsTheScalar) {
  EXPECT_EQ(config_for("demo", "family=two_tower d_ffn=576,576,576,576"),
            config_for("demo", "family=two_tower d_ffn=576"));
  EXPECT_EQ(config_for("demo", "family=two_tower d_ffn=0").state.ffn, (std::vector<int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(config_for("demo", "family=two_tower d_ffn=0").pred.ffn, (std::vector<int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(config_for("demo", "family=two_tower d_ffn=1,2,3,4").pred.ffn,
            (std::vector<int64_t>{1, 2, 3, 4}));
  // A tower of another depth takes the first width throughout.
  EXPECT_EQ(config_for("demo", "family=two_tower d_ffn=1,2,3,4 pred_layers=2").pred.ffn,
            (std::vector<int64_t>{1, 1}));
}

TEST(Config, OneSpellingForOneModel) {
  for (const auto& [list, word] : {std::pair("0,1,2,3", "same"), {"1,2,3,4", "post"}, {"4,4,4,4", "final"}}) {
    const ModelConfig c = config_for("demo", std::string("family=two_tower read.level=") + list);
    EXPECT_EQ(name_of(c.read_level), word);
    EXPECT_EQ(c, config_for("demo", std::string("family=two_tower read.level=") + word));
  }
  EXPECT_EQ(config_for("demo", "family=two_tower pred_layers=2 read.level=3,4").read_level, ReadLevel::top);
  EXPECT_EQ(config_for("demo", "family=two_tower read.level=1,2,4,4").read_level, ReadLevel::list);
  EXPECT_EQ(config_for("demo", "family=two_tower share=ffn,norms,attention"),
            config_for("demo", "family=two_tower share=all"));
  EXPECT_THROW(config_for("demo", "family=sps band.xp=5:2"), Error) << "none is written none";
}

TEST(Config, KeysOfAModelGiveTheModel) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const Variant& v : variants()) all.emplace_back("s", v.settings);
  for (const std::string scale : {"demo", "xs", "m", "l", "xl"}) all.emplace_back(scale, "family=sps");
  for (const std::string family : {"sps", "delayed_state", "reverse_sps", "free_pause"})
    for (const std::string window : {"0", "1", "16", "full"})
      all.emplace_back("demo", "family=" + family + " window=" + window);
  for (const std::string settings :
       {"family=free_pause sliding_window=2048 full_attention_every=6 qk_norm=true rope_fraction=0.5",
        "family=standard sliding_window=2048 full_attention_every=6 qk_norm=true rope_fraction=0.5",
        "family=free_pause ffn=pooled rope_theta=1e6 norm_eps=1e-5 rope_pairs=half_split vocab=100352 "
        "eot=100257"})
    all.emplace_back("1b", settings);
  for (const std::string settings :
       {"family=two_tower layers=6 read.level=6,6,6,4,5,6",
        "family=sequential pred_width=384 pred_ffn=96,0,96,96,1,2 layers=6",
        "family=sequential state_layers=1 pred_layers=3 d_ffn=7", "family=free_pause pred_input=state",
        "family=free_pause pred_input=token window=3", "family=sps band.xp=2:5 band.pp=0:9 band.px=1:inf",
        "family=sps share=none read.kv=own tie_head=false", "family=two_tower pred_layers=0 readout=x",
        "family=sps vocab=300 eot=256 pred_row=299 context=77", "family=two_tower share=norms"})
    all.emplace_back("s", settings);
  EXPECT_GT(all.size(), 45u);
  for (const auto& [scale, settings] : all) {
    SCOPED_TRACE(scale + " " + settings);
    const ModelConfig c = config_for(scale, settings);
    const ModelKeys keys = keys_of(c);
    EXPECT_EQ(resolve(keys), c);
    // Through text, as checkpoints store them.
    ModelKeys written = keys, read;
    OptionTable from, to;
    bind_model(from, written);
    bind_model(to, read);
    to.set_from_json(from.to_json(), "test");
    EXPECT_EQ(resolve(read), c);
  }
}

TEST(Config, BandsAsText) {
  for (const Band b : {Band{0, 64}, Band{1, Band::kInf}, Band::causal(), Band::none(), Band{3, 3}})
    EXPECT_EQ(parse_band("model.band.xx", band_text(b)), b);
  EXPECT_EQ(band_text({0, 64}), "0:64");
  EXPECT_EQ(band_text({1, Band::kInf}), "1:inf");
  EXPECT_EQ(band_text({5, 2}), "none");
}

TEST(Config, FullBlocksOfASlidingWindow) {
  const ModelConfig c = config_for(
      "1b", "family=free_pause sliding_window=2048 full_attention_every=6 rope_fraction=0.5 window=64");
  std::vector<int64_t> full;
  for (int64_t b = 0; b < 24; ++b)
    if (c.full_attention(b)) full.push_back(b);
  EXPECT_EQ(full, (std::vector<int64_t>{5, 11, 17, 23}));
  EXPECT_EQ(c.band_xx(0), (Band{0, 2047}));
  EXPECT_EQ(c.band_px(0), (Band{0, 2047}));
  EXPECT_EQ(c.band_xx(5), Band::causal());
  // Partial rotation belongs to the full-attention blocks.
  EXPECT_EQ(c.rotary_width(0), 96);
  EXPECT_EQ(c.rotary_width(5), 48);
  const ModelConfig never = config_for("demo", "family=standard sliding_window=16");
  EXPECT_FALSE(never.full_attention(3));
  EXPECT_TRUE(config_for("demo", "family=standard").full_attention(0));
  const ModelConfig narrow = config_for("demo", "family=delayed_state window=4 sliding_window=16");
  EXPECT_EQ(narrow.band_xx(0), (Band{0, 4}));
}

TEST(Config, RotatedWidthsAreEvenAndNeverNothing) {
  for (const auto& [fraction, width] :
       {std::pair(1.0, 64), {0.5, 32}, {0.25, 16}, {0.01, 2}, {0.99, 64}, {0.4, 26}})
    EXPECT_EQ(config_for("demo", fmt::format("family=standard rope_fraction={}", fraction)).rotary_width(0),
              width);
}

}  // namespace
}  // namespace sps
