#include "train/run_config.h"

#include <gtest/gtest.h>

#include "base/test_dir.h"

namespace sps {
namespace {

std::string refusal(const std::vector<std::string>& overrides,
                    const std::string& recipe = "demo_sps_w16_4m") {
  return error_of([&] { load_run_config(recipe, overrides); });
}

TEST(RunConfig, OverridesWinInOrder) {
  const RunConfig c = load_run_config(
      "s_sps_w64_20b", {"model.window=8", "optim.lr=1e-3", "optim.lr=3e-4", "train.tokens=30_000_000_000"});
  EXPECT_EQ(c.model.window, 8);
  EXPECT_EQ(c.optim.lr, 3e-4);
  EXPECT_EQ(c.train.tokens, 30'000'000'000);
  EXPECT_EQ(c.schedule.decay_tokens, 2'000'000'000);  // the recipe's
}

TEST(RunConfig, KeysOfTheModelNeedNoPrefix) {
  const RunConfig c =
      load_run_config("demo_sps_w16_4m", {"family=free_pause", "d_ffn=1,2,3,4", "read.level=final",
                                          "band.pp=0:3", "pred.input=token", "window=full"});
  EXPECT_EQ(c.model.family, "free_pause");
  EXPECT_EQ(c.model.d_ffn, (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(c.model.read_level, "final");
  EXPECT_EQ(c.model.band_pp, "0:3");
  EXPECT_EQ(c.model.pred_input, "token");
  EXPECT_EQ(c.model.window, kWindowFull);
  EXPECT_EQ(load_run_config("demo_sps_w16_4m", {"pred_input=vector"}).model.pred_input, "vector");
}

TEST(RunConfig, UnknownKeysSuggestTheNearest) {
  for (const auto& [given, nearest] : {std::pair("optim.lrr=1", "optim.lr"),
                                       {"train.micro_bach=4", "train.micro_batch"},
                                       {"model.windw=4", "model.window"},
                                       {"model.band.xq=none", "model.band.x"}}) {
    const std::string sentence = refusal({given});
    EXPECT_PRED2(mentions, sentence, std::string(given).substr(0, std::string(given).find('=')));
    EXPECT_PRED2(mentions, sentence, nearest);
  }
  EXPECT_PRED2(mentions, refusal({"window"}), "window");
  EXPECT_PRED2(mentions, refusal({"seeed=3"}), "seeed");
}

TEST(RunConfig, WrongValuesNameKeyAndValue) {
  struct Wrong {
    std::string given;
    std::vector<std::string> named;
  };
  for (const Wrong& w : std::vector<Wrong>{
           {"train.micro_batch=5", {"train.micro_batch = 5", "train.global_batch = 16"}},
           {"train.micro_batch=64", {"train.micro_batch = 64", "train.global_batch = 16"}},
           {"train.micro_batch=0", {"train.micro_batch", "0"}},
           {"train.tokens=0", {"train.tokens", "0"}},
           {"train.tokens=9223372036854775807", {"train.tokens", "9223372036854775807"}},
           {"train.global_batch=9223372036854775792",
            {"train.global_batch = 9223372036854775792", "tokens a step"}},
           {"train.tokens=many", {"train.tokens", "many"}},
           {"optim.name=sgd", {"optim.name = 'sgd'", "adamw"}},
           {"optim.lr=0", {"optim.lr", "0"}},
           {"optim.beta2=1", {"optim.beta2", "1"}},
           {"optim.min_lr=1", {"optim.min_lr"}},
           {"schedule.decay_tokens=5_000_000", {"schedule.decay_tokens"}},
           {"run.device=tpu", {"run.device = 'tpu'", "cpu"}},
           {"run.dtype=f8", {"f8"}},
           {"run.dtype=i32", {"i32"}},
           {"phase.at=1", {"phase.at = 1"}},
           {"phase.at=1.5", {"phase.at", "1.5"}},
           {"model.window=-3", {"model.window", "-3"}},
           {"model.window=wide", {"model.window", "wide"}},
       }) {
    SCOPED_TRACE(w.given);
    const std::string sentence = refusal({w.given});
    for (const std::string& thing : w.named) EXPECT_PRED2(mentions, sentence, thing);
  }
}

TEST(RunConfig, AResolvedConfigurationReadsBackFromItsFile) {
  const TestDir dir;
  for (const std::string name :
       {"s_standard_20b", "xs_sps_w64_20b", "s_sps_wfull_10b_seed1", "s_sequential_6+6_20b",
        "1b_free_pause_pooled_phase75_100b_seed2", "demo_sps_w16_tok_4m"}) {
    SCOPED_TRACE(name);
    RunConfig written =
        load_run_config(name, {"optim.lr=0.00030000000000000003", "data.dir=some/\"data\" dir"});
    const ModelConfig model = resolve(written.model);
    written.model = keys_of(model);
    const std::string text = bind(written).to_toml();
    RunConfig read = load_run_config(dir.write("mine.toml", text).string(), {});
    EXPECT_EQ(read.name, "mine");
    EXPECT_EQ(bind(read).to_toml(), text);
    EXPECT_EQ(resolve(read.model), model);
    EXPECT_EQ(read.optim.lr, written.optim.lr);
    EXPECT_EQ(read.data.dir, "some/\"data\" dir");
    EXPECT_EQ(read.phase.at, written.phase.at);
    EXPECT_EQ(read.train.seed, written.train.seed);
  }
}

TEST(RunConfig, Files) {
  const TestDir dir;
  const RunConfig c = load_run_config(
      dir.write("tiny.toml",
                "model.family = \"sps\"\n[train]\ntokens = 50_000_000\n[schedule]\nwarmup_tokens = 0\n"
                "decay_tokens = 0\n[model.band]\npp = \"0:7\"\n")
          .string(),
      {"window=8"});
  EXPECT_EQ(c.name, "tiny");
  EXPECT_EQ(c.run_dir(), "runs/tiny");
  EXPECT_EQ(c.train.tokens, 50'000'000);
  EXPECT_EQ(resolve(c.model).pp, (Band{0, 7}));
  EXPECT_EQ(resolve(c.model).xp, (Band{1, 8}));
  EXPECT_EQ(c.train.global_batch, 96);
  const std::string sentence =
      error_of([&] { load_run_config(dir.write("bad.toml", "[train]\n\ntoken = 5\n").string(), {}); });
  EXPECT_PRED2(mentions, sentence, "bad.toml:3");
  EXPECT_PRED2(mentions, sentence, "train.tokens");
  EXPECT_PRED2(mentions, error_of([&] { load_run_config((dir / "none.toml").string(), {}); }), "none.toml");
  EXPECT_PRED2(mentions, error_of([&] { load_run_config("nothing_known_20b", {}); }), "'nothing'");
}

TEST(RunConfig, RunDirectory) {
  EXPECT_EQ(load_run_config("demo_sps_w16_4m", {}).run_dir(), "runs/demo_sps_w16_4m");
  EXPECT_EQ(load_run_config("demo_sps_w16_4m", {"run.dir=a/b"}).run_dir(), "a/b");
}

TEST(RunConfig, EveryKeyHasHelp) {
  RunConfig c;
  const OptionTable table = bind(c);
  const std::string help = table.help();
  for (const std::string& key : table.keys()) EXPECT_PRED2(mentions, help, key);
  for (const char* key : {"model.family", "model.band.xp", "train.tokens", "optim.lr",
                          "schedule.decay_tokens", "phase.at", "data.dir", "run.dtype"})
    EXPECT_TRUE(table.has(key)) << key;
}

}  // namespace
}  // namespace sps
