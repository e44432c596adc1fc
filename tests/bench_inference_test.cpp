// sps bench decode, prefill and attention: what they measure is counted from the models, in the order that
// was asked for.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>
#include <string>

#include "base/json.h"
#include "base/test_files.h"
#include "infer/cache.h"
#include "infer/step_cost.h"
#include "program.h"
#include "train/run_config.h"

namespace sps {
namespace {

const Arguments& models() {
  static const Arguments all{"demo_sps_w4_4m", "demo_standard_4m", "demo_free_pause_4m", "vocab=72",
                             "eot=69"};
  return all;
}

nlohmann::json bench(const char* what, const Arguments& more) {
  const TestDir dir;
  const Outcome o =
      run_program(dir.path(), Arguments{"bench", what} + models() + tiny_model() + more +
                                  Arguments{"--device", "cpu", "--dtype", "f32", "--json", "figures.json"});
  EXPECT_EQ(o.status, 0) << o.err;
  // A title, a heading and a line for each model and batch.
  EXPECT_EQ(lines_of(o.out).size(), 2u + 3 * 2) << o.out;
  return parse_json(read_text(dir / "figures.json"), what);
}

Plan plan_of(const std::string& recipe) {
  return make_plan(resolve(load_run_config(recipe, Arguments{"vocab=72", "eot=69"} + tiny_model()).model));
}

void rows_are_in_order(const nlohmann::json& j) {
  ASSERT_EQ(j.at("results").size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    const auto& row = j["results"][i];
    EXPECT_EQ(row.at("model"), models()[i % 3]);
    EXPECT_EQ(row.at("batch"), i < 3 ? 1 : 3);
    EXPECT_EQ(row.contains("error"), false);
    EXPECT_GT(row.at("over_standard"), 0);
    if (i % 3 == 1) {
      EXPECT_EQ(row["over_standard"], 1);
    }
    EXPECT_EQ(
        row["memory_bytes"].at("rings"),
        i % 3 == 0 ? row["memory_bytes"].at("per_text").get<int64_t>() * row["batch"].get<int64_t>() : 0);
    // Every master weight and nothing else: the model computes in f32.
    const Plan plan = plan_of(row["model"]);
    EXPECT_EQ(row.at("parameters"), describe_parameters(plan.config).count());
    EXPECT_GE(row["memory_bytes"].at("weights"), 4 * row["parameters"].get<int64_t>());
    EXPECT_LT(row["memory_bytes"]["weights"], 5 * row["parameters"].get<int64_t>());
    EXPECT_GT(row["memory_bytes"].at("scratch"), 0);
    const CacheSize cache = cache_size(plan, DType::f32);
    EXPECT_EQ(row["memory_bytes"].at("per_position"), cache.bytes_per_position);
    EXPECT_EQ(row["memory_bytes"].at("per_text"), cache.bytes_per_sequence);
    // A page of 64 positions for each text.
    EXPECT_EQ(row["memory_bytes"].at("persistent"),
              64 * row["batch"].get<int64_t>() * row["memory_bytes"].at("per_position").get<int64_t>());
  }
}

TEST(BenchDecode, FiguresOfEveryModelAndBatch) {
  const auto j = bench("decode", {"--batch", "1,3", "--prompt", "20", "--tokens", "6,10", "--rounds", "2"});
  rows_are_in_order(j);
  EXPECT_EQ(j.at("ceiling"), "memory read");
  for (const auto& row : j["results"]) {
    // Five steps follow the first new token, or nine: the ids at positions 20 to 24 are read, or to 28.
    const bool one = row["batch"] == 1;
    EXPECT_EQ(row.at("tokens"), one ? 6 : 10);
    const std::vector<int64_t> middle(row["batch"].get<size_t>(), one ? 22 : 24);
    const StepBytes bytes = StepTraffic(plan_of(row["model"]), DType::f32).of(middle);
    EXPECT_EQ(row["bytes_per_step"].at("weights"), bytes.weights);
    EXPECT_EQ(row["bytes_per_step"].at("keys"), bytes.keys);
    EXPECT_EQ(row["bytes_per_step"].at("logits"), bytes.logits);
    EXPECT_LE(row["ms_per_step"].at("low"), row["ms_per_step"].at("median"));
    EXPECT_LE(row["ms_per_step"].at("median"), row["ms_per_step"].at("high"));
    EXPECT_EQ(row["bytes_per_step"].at("total"), bytes.total());
    EXPECT_GT(row.at("tokens_per_sec"), 0);
    EXPECT_GT(row.at("decode_tokens_per_sec"), 0);
    EXPECT_GT(row.at("prefill_ms"), 0);
    EXPECT_GT(row.at("gbytes_per_second"), 0);
    EXPECT_GT(row.at("ceiling_gbytes_per_second"), 0);
    EXPECT_GT(row.at("of_ceiling"), 0);
  }
}

// What was drawn depends on nothing but model, weights and prompts.
TEST(BenchDecode, DrawsTheSameAgain) {
  const Arguments once{"--batch", "1,3", "--prompt", "20", "--tokens", "12", "--rounds", "1", "--no-ceiling"};
  const auto first = bench("decode", once + Arguments{"--threads", "1"}),
             again = bench("decode", once + Arguments{"--threads", "2", "--step-rows", "64"});
  std::set<std::string> drawn;
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(first["results"][i].at("drawn_xxh3"), again["results"][i].at("drawn_xxh3"));
    drawn.insert(first["results"][i]["drawn_xxh3"]);
  }
  EXPECT_EQ(drawn.size(), 6u);
}

TEST(BenchDecode, DrawsAsItIsTold) {
  const Arguments once{"--batch", "1,3", "--prompt", "20", "--tokens", "12", "--rounds", "1", "--no-ceiling"};
  const auto drawn = [&](const Arguments& how) {
    const auto j = bench("decode", once + how);
    EXPECT_EQ(j.at("sampling").at("temperature"), how.empty() ? 0 : 2);
    std::vector<std::string> all;
    for (const auto& row : j["results"]) all.push_back(row.at("drawn_xxh3"));
    return all;
  };
  const auto likeliest = drawn({}), first = drawn({"--temperature", "2", "--seed", "1"}),
             again = drawn({"--temperature", "2", "--seed", "1"}),
             other = drawn({"--temperature", "2", "--seed", "9", "--top-p", "0.9", "--top-k", "50"});
  EXPECT_EQ(first, again);
  for (size_t i = 0; i < first.size(); ++i)
    EXPECT_EQ((std::set{likeliest[i], first[i], other[i]}.size()), 3u);
}

TEST(BenchDecode, PromptsInPieces) {
  // Texts of 20 in pieces of 7: the first one begins to grow while the others still read.
  const auto j = bench("decode", {"--batch", "1,3", "--prompt", "20", "--tokens", "12", "--rounds", "1",
                                  "--step-rows", "7", "--no-ceiling"});
  rows_are_in_order(j);
  EXPECT_EQ(j.contains("ceiling"), false);
}

TEST(BenchDecode, WeightsIn8Bits) {
  const TestDir dir;
  const Outcome o =
      run_program(dir.path(), Arguments{"bench", "decode"} + models() + tiny_model() +
                                  Arguments{"--device", "cpu", "--dtype", "bf16", "--weights", "int8",
                                            "--batch", "1", "--prompt", "20", "--tokens", "6", "--rounds",
                                            "1", "--no-ceiling", "--json", "-"});
  ASSERT_EQ(o.status, 0) << o.err;
  const auto j = parse_json(o.out, "bench");
  EXPECT_EQ(j.at("weights"), "int8");
  ASSERT_EQ(j.at("results").size(), 3u);
  for (const auto& row : j["results"]) {
    const StepTraffic traffic(plan_of(row["model"]), DType::bf16, true);
    EXPECT_EQ(row["bytes_per_step"].at("weights"), traffic.of(std::vector<int64_t>{22}).weights);
    EXPECT_GT(row["memory_bytes"].at("int8_weights"), row.at("parameters").get<int64_t>() / 2);
    EXPECT_LT(row["memory_bytes"]["int8_weights"], 2 * row["parameters"].get<int64_t>());
  }
}

TEST(BenchPrefill, FlopsAreTheDecoders) {
  const auto j = bench("prefill", {"--batch", "1,3", "--prompt", "20", "--rounds", "1"});
  rows_are_in_order(j);
  for (const auto& row : j["results"]) {
    const auto batch = row["batch"].get<double>(), seconds = 1e-3 * row["ms"].at("median").get<double>();
    EXPECT_EQ(row.at("executed_flops"), batch * decoder_prefill_flops(plan_of(row["model"]), 20).total());
    EXPECT_NEAR(row.at("tokens_per_sec"), batch * 20 / seconds, 1e-6 * batch * 20 / seconds);
    EXPECT_NEAR(row.at("executed_gflops"), 1e-9 * row["executed_flops"].get<double>() / seconds,
                1e-6 * row["executed_gflops"].get<double>());
  }
}

// Both passes of the three families in turns, so that what a window costs is seen; rates are of the pairs
// that the masks show.
TEST(BenchAttention, TimesBothPassesWithAndWithoutAWindow) {
  const TestDir dir;
  const auto j =
      json_of(dir, {"bench", "attention", "--device", "cpu", "--dtype", "f32", "--batch", "2", "--length",
                    "40", "--heads", "2", "--head-dim", "8", "--window", "8", "--document", "0"});
  EXPECT_EQ(j.at("window"), 8);
  for (const auto& [family, pairs] :
       std::map<std::string, double>{{"standard", 40 * 41 / 2},
                                     {"sps", 40 * 40 + 2 * 40 + 2 * 8 * 40 - 8 * 9},
                                     {"free_pause", 40 * 41}})
    for (const auto& [pass, flops] : {std::pair{"forward", 4.0}, {"backward", 10.0}}) {
      const auto figure = [&, f = family, p = pass](const char* unit) {
        return j.at(f).at(p + std::string(unit)).get<double>();
      };
      EXPECT_GT(figure("_ms"), 0);
      EXPECT_NEAR(figure("_ms") * figure("_tflops") * 1e9, flops * 2 * pairs * 16,
                  1e-6 * flops * 2 * pairs * 16)
          << family;
    }
}

TEST(BenchDecode, MistakesAreOneSentence) {
  const TestDir dir;
  const std::array<std::pair<Arguments, const char*>, 8> cases{{
      {{"layers=2"}, "no model to measure"},
      {{"demo_nothing_4m"}, "demo_nothing_4m"},
      {{"demo_standard_4m", "--tokens", "1"}, "--tokens 1: expected 2 or more"},
      {{"demo_standard_4m", "--prompt", "200", "--tokens", "57"}, "do not fit the model's context of 256"},
      {{"demo_standard_4m", "--dtype", "f64"}, "the reference is not measured"},
      {{"demo_standard_4m", "--batch", "0"}, "--batch"},
      {{"demo_standard_4m", "--batch", "1,2,4", "--tokens", "8,9"}, "--tokens has 2 numbers, --batch 3"},
      {{"demo_standard_4m", "--weights", "int8", "--dtype", "f32"}, "in bf16 alone, not in f32"},
  }};
  for (const auto& [arguments, sentence] : cases) {
    const Outcome o =
        run_program(dir.path(), Arguments{"bench", "decode"} + arguments + Arguments{"--device", "cpu"});
    EXPECT_EQ(o.status, 2) << sentence;
    EXPECT_PRED2(mentions, o.err, sentence);
    EXPECT_EQ(lines_of(o.err).size(), 1u) << o.err;
  }
  // Where the figures cannot be put nothing is measured.
  const Outcome o = run_program(dir.path(), {"bench", "decode", "demo_standard_4m", "--device", "cpu",
                                             "--json", "nowhere/figures.json"});
  EXPECT_EQ(o.status, 1);
  EXPECT_EQ(o.out, "");
  EXPECT_PRED2(mentions, o.err, "nowhere/figures.json");
}

}  // namespace
}  // namespace sps
