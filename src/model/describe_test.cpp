#include "model/describe.h"

#include <algorithm>

#include "base/error.h"
#include "base/test_dir.h"
#include "model/test_variants.h"

namespace sps {
namespace {

Plan plan_for(const std::string& scale, const std::string& settings, bool eliminate_dead = true) {
  return make_plan(config_for(scale, settings), eliminate_dead);
}
const std::string& settings_of(const std::string& name) {
  for (const Variant& v : variants())
    if (v.name == name) return v.settings;
  throw std::logic_error(name);
}

// Two-tower spec, 1.9: KiB a token in bf16, MFLOP a token of a 4096-token prompt, blocks in a row for one
// token.
TEST(Describe, InferenceTable) {
  struct Row {
    std::string name;
    double kib, mflop;
    int64_t serial;
  };
  for (const Row& r : std::vector<Row>{{"standard tied", 36, 260.4, 12},
                                       {"sps tied", 36, 525.6, 12},
                                       {"two-tower 12+12", 72, 288.7, 13},
                                       {"sequential 12+12", 72, 288.7, 24},
                                       {"two-tower 6+6", 36, 144.4, 7},
                                       {"sequential 6+6", 36, 144.4, 12},
                                       {"sequential 3+9", 36, 86.3, 12},
                                       {"sequential 9+3", 36, 202.4, 12},
                                       {"two-tower 12+6", 54, 269.3, 13},
                                       {"free pause", 36, 260.4, 12},
                                       {"shared sequential", 39, 262.8, 24},
                                       {"AF-SPS faithful", 36, 365.2, 12}}) {
    SCOPED_TRACE(r.name);
    const Plan plan = plan_for("s", settings_of(r.name));
    EXPECT_EQ(2.0 * double(decode_cache(plan).persistent_numbers()) / 1024, r.kib);
    EXPECT_EQ(serial_blocks(plan), r.serial);
    // The spec leaves out the few p rows and the one head row that a prompt does need: below 0.3 MFLOP a
    // token here.
    const double mflop = prefill_flops(plan_for("s", settings_of(r.name), false), 4096) / 1e6;
    EXPECT_GE(mflop, r.mflop - 0.05);
    EXPECT_LE(mflop, r.mflop + 0.05 + 0.3);
  }
  EXPECT_NEAR(prefill_flops(plan_for("s", "family=free_pause"), 4096) / 1e6, 241.1, 0.05 + 0.15);
}

TEST(Describe, RingsOfTheWindowedStreams) {
  const auto ring_mib = [](const std::string& settings) {
    return 2.0 * double(decode_cache(plan_for("s", settings)).ring_numbers()) / (1 << 20);
  };
  EXPECT_EQ(ring_mib("family=sps window=64"), 2.25);
  EXPECT_EQ(ring_mib("family=delayed_state window=64"), 2.25);
  EXPECT_EQ(ring_mib("family=reverse_sps window=64"), 2.25);
  EXPECT_EQ(ring_mib("family=free_pause window=64"), 2.25);
  EXPECT_EQ(decode_cache(plan_for("s", "family=sps window=64")).ring_numbers(10), 12 * 1536 * 10);
  EXPECT_EQ(ring_mib("family=sps window=0"), 0);
  EXPECT_EQ(ring_mib("family=sps window=full"), 0);
  EXPECT_EQ(decode_cache(plan_for("s", "family=sps window=full")).persistent_numbers() * 2, 72 * 1024);
}

TEST(Describe, CachesFollowTheBandsOfEachBlock) {
  const auto lines = [](const std::string& scale, const std::string& settings) {
    std::string text;
    for (const CacheLine& l : decode_cache(plan_for(scale, settings)).lines)
      text += fmt::format("{}:{}x{}{} ", "sprh"[l.kind], l.blocks, l.numbers,
                          l.horizon.kind == Horizon::ring ? fmt::format("@{}", l.horizon.steps) : "");
    return text;
  };
  EXPECT_EQ(lines("s", "family=standard"), "s:12x1536 ");
  EXPECT_EQ(lines("s", "family=free_pause"), "s:12x1536 ");
  EXPECT_EQ(lines("s", "family=delayed_state window=16"), "s:12x1536@16 p:12x1536 ");
  EXPECT_EQ(lines("s", "family=free_pause read.level=final"), "s:12x1536 h:1x1536 ");
  EXPECT_EQ(lines("s", "family=two_tower"), "s:12x1536 r:12x1536 ");
  // Dead blocks keep nothing; a block that only serves readers keeps what they see.
  EXPECT_EQ(lines("s", "family=two_tower read.level=same"), "s:11x1536 r:12x1536 ");
  EXPECT_EQ(lines("demo", "family=free_pause read.level=0,0,0,0 band.px=0:9"), "s:1x512@9 ");
  // The second paper's grouped heads and sliding windows: four blocks of 24 see everything.
  EXPECT_EQ(lines("1b", "family=free_pause sliding_window=2048 full_attention_every=6"),
            "s:20x1536@2047 s:4x1536 ");
  EXPECT_EQ(lines("s", "family=sequential layers=6 pred_width=384 pred_ffn=96"), "s:6x1536 r:6x768 ");
}

TEST(Describe, PromptRowsOfThePredictionStream) {
  const auto rows = [](const std::string& settings) { return prefill_rows(plan_for("demo", settings), 100); };
  using R = std::vector<int64_t>;
  EXPECT_EQ(rows("family=standard"), R{});
  EXPECT_EQ(rows("family=free_pause"), (R{1, 1, 1, 1}));
  EXPECT_EQ(rows("family=sequential pred_layers=2"), (R{1, 1}));
  EXPECT_EQ(rows("family=sps window=0"), (R{1, 1, 1, 1}));
  EXPECT_EQ(rows("family=free_pause window=16"), (R{49, 33, 17, 1}));
  EXPECT_EQ(rows("family=free_pause window=40"), (R{100, 81, 41, 1}));
  EXPECT_EQ(rows("family=free_pause window=full"), (R{100, 100, 100, 1}));
  for (const std::string settings :
       {"family=sps window=1", "family=delayed_state", "family=reverse_sps", "family=free_pause ffn=pooled"})
    EXPECT_EQ(rows(settings), (R{100, 100, 100, 100})) << settings;
}

TEST(Describe, AWindowedPromptCostsMoreWithItsWindowAndNeverMoreThanEveryRow) {
  double last = prefill_flops(plan_for("demo", "family=free_pause", false), 200);
  for (const std::string w : {"1", "4", "16", "50", "full"}) {
    const Plan plan = plan_for("demo", "family=free_pause window=" + w, false);
    const double cost = prefill_flops(plan, 200);
    EXPECT_GT(cost, last) << w;
    const Flops all = flops_executed(plan, 200);
    EXPECT_LE(cost, all.total() - all.head + all.head / 200) << w;
    last = cost;
  }
  // A prompt of one token is one row of everything.
  for (const std::string settings :
       {"family=free_pause", "family=sequential", "family=sps", "family=free_pause window=9"}) {
    const Plan plan = plan_for("demo", settings);
    EXPECT_NEAR(prefill_flops(plan, 1), flops_executed(plan, 1).total(), 1e-3) << settings;
  }
}

TEST(Describe, SerialDepth) {
  EXPECT_EQ(serial_blocks(plan_for("s", "family=reverse_sps")), 12);
  EXPECT_EQ(serial_blocks(plan_for("s", "family=free_pause pred_input=state")), 24);
  EXPECT_EQ(serial_blocks(plan_for("s", "family=two_tower layers=6 read.level=0,0,0,0,0,0")), 6);
  EXPECT_EQ(serial_blocks(plan_for("s", "family=two_tower layers=6 read.level=6,6,6,4,5,6")), 12);
}

TEST(Describe, DeadWorkInWords) {
  const auto dead = [](const std::string& settings) { return dead_work(plan_for("demo", settings)); };
  EXPECT_TRUE(dead("family=standard").empty());
  EXPECT_TRUE(dead("family=two_tower").empty());
  EXPECT_EQ(dead("family=two_tower read.level=2,0,1,2"),
            std::vector<std::string>{"state blocks 2 to 3: everything"});
  ASSERT_EQ(dead("family=sps").size(), 2u);
  EXPECT_EQ(dead("family=sps")[0], "state block 3: all but keys and values");
  EXPECT_PRED2(mentions, dead("family=sps")[1], "once");
  EXPECT_EQ(dead("family=reverse_sps")[0], "prediction block 3: all but keys and values");
  EXPECT_PRED2(mentions, dead("family=free_pause ffn=pooled")[0], "state block 3: the gate");
}

TEST(Describe, MaskPicture) {
  EXPECT_EQ(mask_picture(config_for("demo", "family=sps window=1"), 0, 4),
            "          keys x    keys p\n"
            "  x_0     # . . .   . . . .\n"
            "  x_1     # # . .   # . . .\n"
            "  x_2     # # # .   . # . .\n"
            "  x_3     # # # #   . . # .\n"
            "\n"
            "  p_0     # . . .   # . . .\n"
            "  p_1     # # . .   # # . .\n"
            "  p_2     # # # .   . # # .\n"
            "  p_3     # # # #   . . # #\n");
  EXPECT_EQ(mask_picture(config_for("demo", "family=free_pause"), 0, 2),
            "          keys x   keys p\n"
            "  x_0     # .      . .\n"
            "  x_1     # #      . .\n"
            "\n"
            "  p_0     # .      . .\n"
            "  p_1     # #      . .\n");
  EXPECT_EQ(mask_picture(config_for("demo", "family=standard sliding_window=2 full_attention_every=4"), 0, 3),
            "          keys x\n"
            "  x_0     # . .\n"
            "  x_1     # # .\n"
            "  x_2     . # #\n");
  EXPECT_EQ(mask_picture(config_for("demo", "family=standard sliding_window=2 full_attention_every=4"), 3, 3),
            "          keys x\n"
            "  x_0     # . .\n"
            "  x_1     # # .\n"
            "  x_2     # # #\n");
}

TEST(Describe, EveryPictureCountsThePairs) {
  for (const std::string family : {"standard", "sps", "delayed_state", "reverse_sps", "free_pause"})
    for (const int64_t length : {int64_t{1}, int64_t{7}, int64_t{16}, kMaxPicture}) {
      const ModelConfig c = config_for("demo", "family=" + family + " window=3");
      const std::string picture = mask_picture(c, 0, length);
      EXPECT_EQ(std::count(picture.begin(), picture.end(), '#'), visible_pairs(c, 0, length))
          << family << length;
    }
}

TEST(Describe, JsonHasEveryNumberUnderAStableKey) {
  DescribeOptions options;
  options.name = "the name";
  options.micro_batch = 6;
  const auto j = to_json(describe(config_for("s", "family=sps window=64"), options));
  std::vector<std::string> keys;
  for (const auto& [key, value] : j.items()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"name", "family", "config", "parameters", "memory", "length",
                                            "bands", "order", "cache", "prefill", "dead_work",
                                            "flops_per_token", "blocks"}));
  EXPECT_EQ(j["name"], "the name");
  EXPECT_EQ(j["family"], "sps");
  EXPECT_EQ(j["config"]["band"]["pp"], "0:64");
  EXPECT_EQ(j["parameters"], (nlohmann::ordered_json{{"total", 130'665'216},
                                                     {"non_embedding", 92'031'744},
                                                     {"embedding", 38'633'472},
                                                     {"no_decay", 19'200},
                                                     {"frozen", 0}}));
  const auto& memory = j["memory"];
  EXPECT_EQ(memory["dtype"], "f32");
  EXPECT_EQ(memory["micro_batch"], 6);
  EXPECT_EQ(memory["weights_bytes"], 4 * 130'665'216);
  EXPECT_EQ(memory["gradients_bytes"], 4 * 130'665'216);
  EXPECT_EQ(memory["optimizer_bytes"], 8 * 130'665'216);
  EXPECT_EQ(memory["device"], "cpu");
  EXPECT_EQ(memory["recompute"], "none");
  EXPECT_EQ(memory["scratch_bytes"], 0);
  EXPECT_EQ(memory["context_bytes"], 0);
  EXPECT_EQ(memory["total_bytes"].get<int64_t>(), 16 * int64_t{130'665'216} +
                                                      memory["activations_bytes"].get<int64_t>() +
                                                      memory["tables_bytes"].get<int64_t>());
  EXPECT_EQ(j["length"], 4096);
  EXPECT_EQ(j["bands"]["xx"], (nlohmann::ordered_json{{"lo", 0}, {"hi", nullptr}, {"pairs", 8'390'656}}));
  EXPECT_EQ(j["bands"]["xp"],
            (nlohmann::ordered_json{{"lo", 1}, {"hi", 64}, {"pairs", 64 * 4096 - 64 * 65 / 2}}));
  EXPECT_EQ(j["order"], (nlohmann::ordered_json{{"lockstep", true}, {"joint", true}, {"serial_blocks", 12}}));
  EXPECT_EQ(j["cache"]["bytes_per_token"], 36 * 1024);
  EXPECT_EQ(j["cache"]["ring_bytes_per_sequence"], 2304 * 1024);
  EXPECT_EQ(j["cache"]["lines"][1],
            (nlohmann::ordered_json{
                {"what", "prediction"}, {"blocks", 12}, {"bytes_per_block", 3072}, {"steps", 64}}));
  EXPECT_EQ(j["prefill"]["prediction_rows"].size(), 12u);
  EXPECT_EQ(j["dead_work"].size(), 2u);
  const auto& flops = j["flops_per_token"];
  EXPECT_EQ(flops["published"]["total"], 755'547'648.0);
  EXPECT_EQ(flops["published"]["head"], 77'194'752.0);
  EXPECT_EQ(flops["training"]["published"], 3 * 755'547'648.0);
  for (const char* convention : {"published", "required", "executed"}) {
    double sum = 0;
    for (const auto& [term, value] : flops[convention].items())
      sum += term == "total" ? 0.0 : value.get<double>();
    EXPECT_EQ(flops[convention]["total"].get<double>(), sum) << convention;
  }
  EXPECT_EQ(j["blocks"].size(), 12u);
  EXPECT_EQ(j["blocks"][11]["state"]["need"], "keys");
  EXPECT_EQ(j["blocks"][11]["prediction"]["need"], "all");
  EXPECT_EQ(j["blocks"][0]["state"]["visible_pairs"].get<int64_t>() +
                j["blocks"][0]["prediction"]["visible_pairs"].get<int64_t>(),
            17'305'536);
  const auto standard = to_json(describe(config_for("demo", "family=standard"), {}));
  EXPECT_TRUE(standard["bands"]["px"].is_null());
  EXPECT_FALSE(standard["blocks"][0].contains("prediction"));
}

TEST(Describe, TextNamesEveryConventionAndStaysNarrow) {
  for (const auto& [scale, settings] : std::vector<std::pair<std::string, std::string>>{
           {"demo", "family=standard"},
           {"s", "family=sps window=64"},
           {"s", settings_of("two-tower 12+6")},
           {"1b",
            "family=free_pause ffn=pooled sliding_window=2048 full_attention_every=6 qk_norm=true "
            "rope_fraction=0.5"},
           {"xl", "family=free_pause window=64"}}) {
    SCOPED_TRACE(settings);
    DescribeOptions options;
    options.name = "a model";
    const Description d = describe(config_for(scale, settings), options);
    const std::string text = to_text(d);
    for (const std::string part :
         {"published", "square", "V 50257", "required", "causal area", "V 50304", "executed", "no dead work",
          "3 x", "bf16 caches", "no weight decay", "Mask", "Bands", "activations"})
      EXPECT_PRED2(mentions, text, part);
    EXPECT_PRED2(mentions, text, grouped(d.total));
    EXPECT_PRED2(mentions, text, grouped(int64_t(d.published.total())));
    for (size_t at = 0; at < text.size();) {
      const size_t end = text.find('\n', at);
      ASSERT_NE(end, std::string::npos);
      const std::string line = text.substr(at, end - at);
      EXPECT_LE(line.size(), 110u) << line;
      EXPECT_TRUE(line.empty() || line.back() != ' ') << '[' << line << ']';
      at = end + 1;
    }
  }
  // The table of blocks appears where they differ.
  const auto text = [](const std::string& settings) {
    return to_text(describe(config_for("s", settings), {}));
  };
  EXPECT_PRED2(mentions, text(settings_of("two-tower 12+6")), "p reads level");
  EXPECT_FALSE(mentions(text("family=two_tower"), "p reads level"));
}

TEST(Describe, LengthAndPictureAreChecked) {
  const ModelConfig c = config_for("demo", "family=sps");
  DescribeOptions options;
  options.length = 100;
  EXPECT_EQ(describe(c, options).required.head, flops_required(c, 100).head);
  EXPECT_EQ(describe(c, options).required.total(), flops_required(c, 100).total());
  EXPECT_EQ(describe(c, {}).options.length, 256);
  options.length = -1;
  EXPECT_PRED2(mentions, error_of([&] { describe(c, options); }), "--length -1");
  options.length = 0;
  options.picture = kMaxPicture + 1;
  EXPECT_PRED2(mentions, error_of([&] { describe(c, options); }), "--mask 49");
}

TEST(Describe, GroupedDigits) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(1'678'081'600), "1,678,081,600");
  EXPECT_EQ(grouped(-123456), "-123,456");
  EXPECT_EQ(grouped(-123), "-123");
}

}  // namespace
}  // namespace sps
