#include "report/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "base/error.h"
#include "base/test_dir.h"
#include "data/test_corpus.h"
#include "model/flops.h"
#include "model/keys.h"
#include "model/load.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

ModelKeys model_keys(const std::string& family) {
  ModelKeys k;
  k.family = family, k.layers = 2, k.d_model = 16, k.heads = 2, k.d_ffn = {24}, k.vocab = 320, k.context = 16;
  k.eot = 256;
  if (family != "standard") k.window = 3;
  return keys_of(resolve(k));
}

// What a run leaves: a checkpoint and, for each step, a line of metrics.
fs::path make_run(const TestDir& dir, const std::string& name, ModelKeys keys, CheckpointKind kind,
                  const std::string& metrics) {
  const CheckpointName checkpoint{kind, 192};
  const fs::path run = dir / name, path = checkpoints_dir(run) / checkpoint.text();
  fs::create_directories(path);
  OptionTable table;
  bind_model(table, keys);
  const std::string config = storable_json(table.to_json(), "the model");
  write_atomically(path / kConfigFile, config);
  ModelOptions options;
  options.max_rows = 16, options.train = false;
  const Model model(resolve(keys), options);
  const WrittenFile weights =
      write_safetensors(path / kWeightsFile, named_weights(model.parameters(), model.store()));
  write_atomically(path / kStateFile, checkpoint_state_text(checkpoint, {{"step", 3}},
                                                            {{kConfigFile, {config.size(), hash64(config)}},
                                                             {kWeightsFile, weights}}));
  write_atomically(run / "metrics.jsonl", metrics);
  return run;
}

std::string metrics(const std::vector<double>& seconds, double val_loss, const std::string& more = "") {
  std::string text = R"({"step": 0, "tokens": 0, "val_loss": 5.77, "val_scored": 60})"
                     "\n";
  for (size_t i = 0; i < seconds.size(); ++i)
    text += fmt::format(R"({{"step": {}, "tokens": {}, "loss": 5.5, "seconds": {}}})"
                        "\n",
                        i + 1, 64 * (i + 1), seconds[i]);
  return text + fmt::format(R"({{"step": {}, "tokens": {}, "val_loss": {}{}}})"
                            "\n",
                            seconds.size(), 64 * seconds.size(), val_loss, more);
}

TEST(Report, ReadsARun) {
  const TestDir dir;
  const ModelKeys keys = model_keys("sps");
  const fs::path run = make_run(dir, "demo_sps", keys, CheckpointKind::final,
                                metrics({0.5, 0.02, 0.01}, 3.25, R"(, "val_bits_per_byte": 4.5)"));
  for (const fs::path& path : {run, run / ""}) {
    const RunSummary r = summarise_run(path);
    EXPECT_EQ(r.name, "demo_sps");
    EXPECT_TRUE(r.finished);
    EXPECT_EQ(r.steps, 3);
    EXPECT_EQ(r.tokens, 192);
    EXPECT_EQ(r.context, 16);
    EXPECT_EQ(r.val_loss, 3.25) << "the last validation";
    EXPECT_EQ(r.bits_per_byte, 4.5);
    EXPECT_EQ(r.seconds_per_step, 0.02) << "the median: the first step is slow";
    EXPECT_NEAR(r.tokens_per_second, 64 / 0.02, 1e-9);
    // Counted by hand: embedding, final norm, and per block two norms, qkv, out, gate_up and down.
    EXPECT_EQ(r.parameters, 320 * 16 + 16 + 2 * (2 * 16 + 48 * 16 + 16 * 16 + 48 * 16 + 24 * 16));
    EXPECT_EQ(r.flops_per_token, 3 * flops_required(resolve(keys), 16).total());
    EXPECT_GT(r.flops_per_token, r.executed_flops);
  }
}

TEST(Report, TableAndJsonCompareWithTheFirstRun) {
  const TestDir dir;
  const std::vector<RunSummary> runs{
      summarise_run(make_run(dir, "one", model_keys("standard"), CheckpointKind::final,
                             metrics({0.01, 0.01, 0.01}, 3.5, R"(, "val_bits_per_byte": 4.75)"))),
      summarise_run(make_run(dir, "another_run", model_keys("sps"), CheckpointKind::rolling,
                             metrics({0.025, 0.025, 0.025}, 3.25, R"(, "val_bits_per_byte": 4.5)")))};
  const std::string table = report_table(runs);
  std::vector<std::string> lines;
  for (size_t at = 0; at < table.size(); at = table.find('\n', at) + 1)
    lines.push_back(table.substr(at, table.find('\n', at) - at));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_PRED2(mentions, lines[0], "val loss");
  EXPECT_PRED2(mentions, lines[0], "bits/byte");
  EXPECT_PRED2(mentions, lines[1], "one");
  EXPECT_PRED2(mentions, lines[1], " 3.5000 ");
  EXPECT_PRED2(mentions, lines[1], " 4.7500 ");
  EXPECT_PRED2(mentions, lines[1], " 1.00 ");
  EXPECT_FALSE(mentions(lines[1], "unfinished"));
  EXPECT_PRED2(mentions, lines[2], "another_run");
  EXPECT_PRED2(mentions, lines[2], " 3.2500 ");
  EXPECT_PRED2(mentions, lines[2], " 25.0 ");
  EXPECT_PRED2(mentions, lines[2], " 2.50 ");
  EXPECT_PRED2(mentions, lines[2], "unfinished");
  EXPECT_EQ(lines[0].find("val loss") + 8, lines[1].find("3.5000") + 6) << "columns are aligned";
  EXPECT_EQ(lines[1].find("3.5000"), lines[2].find("3.2500"));

  const auto json = report_json(runs);
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[1].at("name"), "another_run");
  EXPECT_EQ(json[1].at("val_loss"), 3.25);
  EXPECT_EQ(json[1].at("finished"), false);
  EXPECT_EQ(json[0].at("finished"), true);
  EXPECT_EQ(json[0].at("tokens"), 192);
  EXPECT_EQ(json[0].at("parameters"), runs[0].parameters);
  EXPECT_EQ(json[0].at("seconds_per_step"), 0.01);
  EXPECT_EQ(parse_json(dump_json(json), "the report").size(), 2u);
}

TEST(Report, TheFooterSaysWhoIsAhead) {
  RunSummary a, b;
  a.name = "first", a.val_loss = 3, a.tokens = 1000, a.tokens_per_second = 200;
  b.name = "second", b.val_loss = 2.75, b.tokens = 1000, b.tokens_per_second = 100;
  EXPECT_PRED2(mentions, report_footer({a, b}),
               "second has the lowest loss, 0.2500 nats below first, at 2.00 times");
  EXPECT_PRED2(mentions, report_footer({b, a}), "no other run has gained anything");
  b.tokens = 2000;
  EXPECT_PRED2(mentions, report_footer({a, b}), "cannot be compared");
  EXPECT_FALSE(mentions(report_footer({a}), "lowest"));
}

// Bits per byte are a column only where every run knows them.
TEST(Report, RunsWithoutBytesHaveNoBits) {
  const TestDir dir;
  const std::vector<RunSummary> runs{
      summarise_run(make_run(dir, "with", model_keys("standard"), CheckpointKind::final,
                             metrics({0.01}, 3.5, R"(, "val_bits_per_byte": 4.75)"))),
      summarise_run(
          make_run(dir, "without", model_keys("standard"), CheckpointKind::final, metrics({0.01}, 3.5)))};
  EXPECT_FALSE(mentions(report_table(runs), "bits/byte"));
  EXPECT_TRUE(mentions(report_table({runs[0]}), "bits/byte"));
}

TEST(Report, WhatIsNoRunIsRefused) {
  const TestDir dir;
  fs::create_directory(dir / "empty");
  EXPECT_PRED2(mentions, error_of([&] { summarise_run(dir / "empty"); }), "empty");
  EXPECT_PRED2(mentions, error_of([&] { summarise_run(dir / "nowhere"); }), "nowhere");
  const ModelKeys keys = model_keys("standard");
  const fs::path unvalidated = make_run(dir, "unvalidated", keys, CheckpointKind::rolling,
                                        R"({"step": 1, "tokens": 64, "seconds": 1})"
                                        "\n");
  EXPECT_PRED2(mentions, error_of([&] { summarise_run(unvalidated); }), "no validation");
  const fs::path damaged =
      make_run(dir, "damaged", keys, CheckpointKind::rolling, metrics({0.5}, 3) + "{\"step\": 2, \"tok\n");
  EXPECT_PRED2(mentions, error_of([&] { summarise_run(damaged); }), "metrics.jsonl line 4");
  const fs::path strange = make_run(dir, "strange", keys, CheckpointKind::rolling,
                                    metrics({0.5}, 3) + "{\"seconds\": \"long\"}\n");
  EXPECT_PRED2(mentions, error_of([&] { summarise_run(strange); }), "metrics.jsonl line 4");
}

// An id is counted unless the id before it is an end of text.
TEST(UnigramEntropy, CountsWhatTheLossCounts) {
  const TestDir dir;
  std::string lines;
  for (const char* text : {"aab", "cba", "bacb", "aaabaa"})
    lines += fmt::format("{{\"text\": \"{}\"}}\n", text);
  PrepareOptions options;
  options.inputs = {dir.write("text.jsonl", lines)};
  options.out = dir / "data";
  options.val_fraction = 0;
  prepare(options);
  const TokenFile file = TokenFile::open(dir / "data", "train");
  std::map<int32_t, double> counts;
  double total = 0;
  for (int64_t i = 0; i < file.size(); ++i)
    if (i == 0 || file.token(i - 1) != 256) ++counts[file.token(i)], ++total;
  EXPECT_EQ(counts[256], 4);
  EXPECT_EQ(total, double(file.size() - 3));
  double want = 0;
  for (const auto& [id, n] : counts) want += n / total * std::log(total / n);
  EXPECT_NEAR(unigram_entropy(file), want, 1e-12);
}

// Chunks of the file are no borders.
TEST(UnigramEntropy, OfALongFileOfTwoEqualHalves) {
  const TestDir dir;
  std::string bytes;
  for (int i = 0; i < 200001; ++i) bytes += std::string(i % 2 == 0 ? "a\0" : "b\0", 2);
  dir.write("train.bin", bytes);
  EXPECT_NEAR(unigram_entropy(TokenFile::open(dir.path(), "train")), std::log(2.0), 1e-9);
}

}  // namespace
}  // namespace sps
