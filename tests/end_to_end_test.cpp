// Text in; a trained, evaluated, sampled and compared model out: the program from end to end.
#include <gtest/gtest.h>

#include <memory>
#include <regex>

#include "data/test_corpus.h"
#include "program.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

// The worked examples of the design: text in, a trained and compared model out.
class EndToEnd : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = std::make_unique<TestDir>();
    dir_->write("text/a.jsonl", test_documents(250, 1));
    for (const char* name : {"b.txt", "deep/c.txt"})
      dir_->write("text/" + std::string(name), test_documents(2, 2));
    const Outcome prepared =
        run_program(dir_->path(), {"prepare", "text", "--out", "data", "--val-fraction", "0.2"});
    ASSERT_EQ(prepared.status, 0) << prepared.err;
    EXPECT_PRED2(mentions, prepared.out, "training tokens");
    // 250 lines of a.jsonl, and b.txt and deep/c.txt as one document each.
    EXPECT_TRUE(
        std::regex_search(prepared.out, std::regex("training tokens in 200 documents.* in 52 documents")))
        << prepared.out;
    trained_ = json_of(*dir_, train("one", "demo_sps_w4_15k"));
  }
  static void TearDownTestSuite() { dir_.reset(); }

  static Arguments train(const std::string& run, const std::string& recipe) {
    return Arguments{"train", recipe, "data.dir=data", "run.dir=" + run, "run.dtype=f32"} + tiny_model() +
           Arguments{"train.tokens=15360", "schedule.warmup_tokens=1280", "schedule.decay_tokens=3840"};
  }
  static Arguments generate(const Arguments& more) {
    return Arguments{"generate", "one", "--prompt", "the list", "--tokens", "20", "--dtype", "f32"} + more;
  }

  static inline std::unique_ptr<TestDir> dir_;
  static inline nlohmann::json trained_;
};

TEST_F(EndToEnd, TrainingReportsWhatItDid) {
  EXPECT_EQ(trained_.at("end"), "finished");
  EXPECT_EQ(trained_.at("steps"), 60);
  EXPECT_EQ(trained_.at("tokens"), 15360);
  EXPECT_LT(trained_.at("val_loss"), 4.0);
  EXPECT_GT(trained_.at("val_loss"), 0.5);
  EXPECT_GT(trained_.at("tokens_per_second"), 0);
  // The resolved configuration is a recipe of its own.
  fs::copy_file(*dir_ / "one/config.toml", *dir_ / "again.toml", fs::copy_options::overwrite_existing);
  const auto again = json_of(*dir_, {"train", "again.toml", "run.dir=again"});
  EXPECT_EQ(again.at("val_loss"), trained_.at("val_loss"));
}

TEST_F(EndToEnd, AFinishedRunSaysSo) {
  const Outcome o = run_program(dir_->path(), train("one", "demo_sps_w4_15k"));
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_PRED2(mentions, o.out, "had already finished");
}

TEST_F(EndToEnd, EvaluationIsTheFinalValidation) {
  const auto whole = json_of(*dir_, {"eval", "one", "--data", "data", "--dtype", "f32"});
  EXPECT_EQ(whole.at("tokens_trained"), 15360);
  EXPECT_EQ(whole.at("family"), "sps");
  EXPECT_EQ(whole.at("bands"), "xx 0:inf, xp 1:4, px 0:inf, pp 0:4");
  // The run validated on the first windows of a fixed order: as many as train.eval_tokens asked for.
  const auto validated =
      json_of(*dir_, {"eval", "one", "--data", "data", "--dtype", "f32", "--tokens", "8192"});
  EXPECT_EQ(validated.at("scored"), trained_.at("val_scored"));
  EXPECT_NEAR(validated.at("nats_per_token").get<double>(), trained_.at("val_loss").get<double>(), 1e-9);
  EXPECT_NEAR(validated.at("bits_per_byte").get<double>(), trained_.at("val_bits_per_byte").get<double>(),
              1e-9);
  for (const char* batch : {"1", "3"}) {
    const auto other = json_of(
        *dir_, {"eval", "one", "--data", "data", "--dtype", "f32", "--tokens", "8192", "--batch", batch});
    EXPECT_EQ(other.at("nats_per_token"), validated.at("nats_per_token"));
  }
  // A checkpoint, its run, and a .bin without a description are the same thing.
  const std::string checkpoint = validated.at("checkpoint");
  EXPECT_PRED2(mentions, checkpoint, "-final");
  const auto plain = json_of(*dir_, {"eval", checkpoint, "--data", "data/val.bin", "--dtype", "f32"});
  EXPECT_EQ(plain.at("nats_per_token"), whole.at("nats_per_token"));
}

TEST_F(EndToEnd, GenerationIsDeterministic) {
  const auto first = json_of(*dir_, generate({"--temperature", "0.9", "--seed", "3"}));
  EXPECT_EQ(first.at("prompt"), "the list");
  EXPECT_EQ(first.at("prompt_tokens"), 8);
  EXPECT_EQ(json_of(*dir_, generate({"--temperature", "0.9", "--seed", "3"})), first);
  EXPECT_EQ(json_of(*dir_, generate({"--temperature", "0.9", "--seed", "3", "--threads", "1"})), first);
  EXPECT_NE(json_of(*dir_, generate({"--temperature", "0.9", "--seed", "4"})), first);
  const auto greedy = json_of(*dir_, generate({}));
  EXPECT_EQ(json_of(*dir_, generate({"--temperature", "0"})), greedy);
  EXPECT_EQ(json_of(*dir_, generate({"--temperature", "0.7", "--top-k", "1"})), greedy);
  EXPECT_EQ(json_of(*dir_, generate({"--seed", "9"})), greedy);
  const Outcome text = run_program(dir_->path(), generate({}));
  EXPECT_EQ(text.status, 0);
  EXPECT_EQ(text.out, "the list" + greedy.at("text").get<std::string>() + "\n");
}

// Every prompt of a file becomes what it becomes alone, in the order of the file, whatever runs beside it.
TEST_F(EndToEnd, AFileOfPrompts) {
  const std::vector<std::string> prompts{"the list", "a", "item 12 of the", "the list", "words and"};
  std::string lines;
  for (size_t i = 0; i < prompts.size(); ++i)
    lines += nlohmann::json{{"prompt", prompts[i]}, {"id", fmt::format("p{}", i)}}.dump() + "\n";
  dir_->write("prompts.jsonl", lines);
  const Arguments common{"--tokens", "12", "--dtype", "f32", "--temperature", "0.9", "--log-probabilities"};
  for (const char* sequences : {"1", "3"}) {
    const Outcome o =
        run_program(dir_->path(), Arguments{"generate", "one", "--file", "prompts.jsonl", "--sequences",
                                            sequences, "--seed", "7", "--memory"} +
                                      common);
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_PRED2(mentions, o.err, "bytes a token");
    std::istringstream out(o.out);
    std::string line;
    for (size_t i = 0; i < prompts.size(); ++i) {
      ASSERT_TRUE(std::getline(out, line));
      auto made = nlohmann::json::parse(line);
      EXPECT_EQ(made.at("id"), fmt::format("p{}", i));
      made.erase("id");
      EXPECT_EQ(made.at("log_probabilities").size(), made.at("new_tokens"));
      EXPECT_EQ(made, json_of(*dir_, Arguments{"generate", "one", "--prompt", prompts[i], "--seed",
                                               std::to_string(7 + i)} +
                                         common));
    }
    EXPECT_FALSE(std::getline(out, line));
  }
}

TEST_F(EndToEnd, WeightsIn8Bits) {
  const auto made = [](const Arguments& more) {
    return json_of(*dir_, Arguments{"generate", "one", "--prompt", "the list", "--tokens", "20", "--device",
                                    "cpu", "--dtype", "bf16", "--log-probabilities"} +
                              more);
  };
  const auto int8 = made({"--weights", "int8"});
  EXPECT_EQ(made({"--weights", "int8", "--threads", "1"}), int8);
  const double a = int8.at("log_probabilities").at(0), b = made({}).at("log_probabilities").at(0);
  EXPECT_NE(a, b);
  EXPECT_NEAR(a, b, 0.1);
  for (const Arguments& weights : {Arguments{}, {"--weights", "int8"}}) {
    const Outcome o = run_program(dir_->path(), Arguments{"generate", "one", "--prompt", "a", "--tokens", "4",
                                                          "--device", "cpu", "--dtype", "bf16", "--memory"} +
                                                    weights);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_PRED2(mentions, o.err, "pages of keys and values");
    EXPECT_EQ(mentions(o.err, "in 8 bits"), !weights.empty()) << o.err;
  }
}

TEST_F(EndToEnd, RulesOfChoosing) {
  const auto whole = json_of(*dir_, generate({}));
  const std::string text = whole.at("text");
  ASSERT_GT(text.size(), 8u);
  EXPECT_EQ(json_of(*dir_, generate({"--temperature", "0.7", "--min-p", "1"})).at("text"), text);
  EXPECT_NE(json_of(*dir_, generate({"--repetition-penalty", "5"})).at("text"), text);
  // A stop string of two bytes from the middle; the text ends before its first place.
  const std::string stop = text.substr(6, 2);
  const auto stopped = json_of(*dir_, generate({"--stop", "no such text", "--stop", stop}));
  EXPECT_EQ(stopped.at("text"), text.substr(0, text.find(stop)));
  EXPECT_EQ(stopped.at("finish"), "stop_string");
  const Outcome shown = run_program(dir_->path(), generate({"--stop", stop}));
  EXPECT_EQ(shown.out, "the list" + text.substr(0, text.find(stop)) + "\n");
}

// The prediction row and the rows that pad the vocabulary are ids without text: none may be drawn, however
// hot.
TEST_F(EndToEnd, EveryNewTokenIsAByte) {
  for (int seed = 0; seed < 6; ++seed) {
    const Outcome o =
        run_program(dir_->path(), generate({"--temperature", "1e9", "--seed", std::to_string(seed)}));
    const auto json = json_of(*dir_, generate({"--temperature", "1e9", "--seed", std::to_string(seed)}));
    // Each new token puts one byte behind the prompt; an id that is none would put nothing.
    EXPECT_EQ(o.out.size(), 8 + json.at("new_tokens").get<size_t>() + 1) << "seed " << seed;
  }
}

TEST_F(EndToEnd, ReportComparesRuns) {
  const auto other = json_of(*dir_, train("two", "demo_standard_15k"));
  const auto report = json_of(*dir_, {"report", "one", "two", "--data", "data"});
  ASSERT_EQ(report.at("runs").size(), 2u);
  EXPECT_EQ(report["runs"][0]["name"], "one");
  EXPECT_EQ(report["runs"][0]["val_loss"], trained_.at("val_loss"));
  EXPECT_EQ(report["runs"][0]["steps"], 60);
  EXPECT_EQ(report["runs"][1]["val_loss"], other.at("val_loss"));
  EXPECT_EQ(report["runs"][1]["finished"], true);
  EXPECT_GT(report.at("unigram_entropy"), 2.0);
  EXPECT_LT(report.at("unigram_entropy"), std::log(27.0)) << "letters and spaces only, and unevenly";
  const Outcome table = run_program(dir_->path(), {"report", "one", "two", "--data", "data"});
  EXPECT_EQ(table.status, 0);
  EXPECT_PRED2(mentions, table.out, "unigram entropy");
  EXPECT_GE(lines_of(table.out).size(), 4u);
}

TEST_F(EndToEnd, InfoOfARunAndOfARecipe) {
  const auto recipe =
      json_of(*dir_, Arguments{"info", "demo_sps_w4_15k", "vocab=320", "eot=256"} + tiny_model());
  const auto run = json_of(*dir_, {"info", "one"});
  EXPECT_TRUE(recipe.is_object() && run.is_object());
  const Outcome text = run_program(dir_->path(), {"info", "one"});
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_PRED2(mentions, text.out, "15,360 tokens trained");
}

// What is made again costs products and saves memory; a GPU is planned for where there is none.
TEST_F(EndToEnd, InfoForecastsRecomputation) {
  const auto info = [&](const Arguments& more) {
    return json_of(*dir_, Arguments{"info", "s_sps_w64_20b", "run.dtype=bf16"} + more);
  };
  const auto number = [](const nlohmann::json& j, const char* part, const char* key) {
    return j[part][key].get<double>();
  };
  const auto none = info({"--device", "cpu"}), block = info({"--device", "cpu", "train.recompute=block"}),
             gpu = info({"--device", "cuda"});
  EXPECT_LT(number(block, "memory", "activations_bytes"), 0.5 * number(none, "memory", "activations_bytes"));
  EXPECT_GT(block["flops_per_token"]["training"]["executed"].get<double>(),
            1.1 * none["flops_per_token"]["training"]["executed"].get<double>());
  EXPECT_EQ(block["flops_per_token"]["training"]["required"],
            none["flops_per_token"]["training"]["required"]);
  EXPECT_EQ(number(none, "memory", "context_bytes"), 0);
  EXPECT_GT(number(gpu, "memory", "context_bytes"), 4e8);
  EXPECT_GT(number(gpu, "memory", "scratch_bytes"), 2e8);
  const Outcome text =
      run_program(dir_->path(), {"info", "s_sps_w64_20b", "--device", "cuda", "train.recompute=ffn"});
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_PRED2(mentions, text.out, "norms and the FFN's inside are made again");
  const Outcome wrong = run_program(dir_->path(), {"info", "s_sps_w64_20b", "train.recompute=all"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_PRED2(mentions, wrong.err, "train.recompute = 'all': expected none, ffn or block");
}

// Of a recipe the source tells what is frozen, of a run its own state: the source may be gone.
TEST_F(EndToEnd, InfoCountsWhatIsFrozen) {
  json_of(*dir_, train("source", "demo_sequential_15k"));
  const std::string recipe = "demo_sequential_15k";
  const Arguments frozen{"freeze.from=source", "train.seed=7"}, data{"vocab=320", "eot=256"};
  json_of(*dir_, train("frozen", recipe) + frozen);
  const auto whole = json_of(*dir_, Arguments{"info", recipe} + tiny_model() + data);
  const auto planned = json_of(*dir_, Arguments{"info", recipe} + tiny_model() + data + frozen);
  fs::remove_all(*dir_ / "source");
  const auto run = json_of(*dir_, {"info", "frozen"});
  const int64_t block = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32, tower = 320 * 32 + 2 * block;
  EXPECT_EQ(whole["parameters"]["frozen"], 0);
  for (const auto* j : {&planned, &run}) {
    EXPECT_EQ((*j)["parameters"]["frozen"], tower);
    EXPECT_EQ((*j)["parameters"]["total"], whole["parameters"]["total"]);
    const auto bytes = [](const nlohmann::json& info) {
      return info["memory"]["optimizer_bytes"].get<int64_t>();
    };
    // Each moment of the tower's four norms, 32 numbers, fills 256 bytes.
    EXPECT_EQ(bytes(*j), bytes(whole) - 8 * tower - 2 * 4 * 128);
    const auto training = [](const nlohmann::json& info) {
      return info["flops_per_token"]["training"]["executed"].get<double>();
    };
    EXPECT_LT(training(*j), training(whole));
    EXPECT_GT(training(*j), whole["flops_per_token"]["executed"]["total"].get<double>());
  }
  EXPECT_PRED2(mentions, run_program(dir_->path(), {"info", "frozen"}).out,
               "no gradient, no moments, no update");
  const Outcome gone = run_program(dir_->path(), Arguments{"info", recipe} + frozen);
  EXPECT_EQ(gone.status, 2);
  EXPECT_PRED2(mentions, gone.err, "source does not exist");
}

}  // namespace
}  // namespace sps
