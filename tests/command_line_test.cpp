// The program as people meet it: help, versions, and one corpus from text to a report.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <regex>
#include <set>

#include "base/json.h"
#include "base/test_files.h"
#include "data/test_corpus.h"
#include "program.h"
#include "train/run_config.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

// The options that a sub-command's source adds: the quoted names after add_option( and add_flag(.
std::set<std::string> options_in_source(const std::string& command) {
  const std::string text =
      read_text(fs::path(SPS_SOURCE_DIR) / "src" / "cli" / (command.substr(0, command.find(' ')) + ".cpp"));
  std::set<std::string> names;
  const std::regex call("add_(?:option|flag)\\(\\s*\"([^\"]+)\"");
  for (std::sregex_iterator at(text.begin(), text.end(), call), end; at != end; ++at) {
    std::string list = (*at)[1];
    // "-n,--tokens": two names; "!--no-ceiling": a flag that switches off.
    for (std::string name; !list.empty();) {
      name = list.substr(0, list.find(','));
      list.erase(0, name.size() + 1);
      names.insert(name.starts_with('!') ? name.substr(1) : name);
    }
  }
  return names;
}

const std::vector<std::string>& commands() {
  static const std::vector<std::string> all{"prepare", "train", "eval",  "generate",
                                            "info",    "bench", "report"};
  return all;
}

Outcome sps(const TestDir& dir, const Arguments& arguments) {
  return run_program(dir.path(), arguments);
}

// The standard output of a command that must succeed and print one JSON object.
nlohmann::json json_of(const TestDir& dir, const Arguments& arguments) {
  const Outcome o = sps(dir, arguments + Arguments{"--json"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(lines_of(o.out).size(), 1u) << o.out;
  return parse_json(o.out, arguments[0]);
}

TEST(CommandLine, HelpNamesEveryCommand) {
  const TestDir dir;
  const Outcome o = sps(dir, {"--help"});
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.err, "");
  for (const std::string& command : commands()) EXPECT_PRED2(mentions, o.out, command);
  // Every file that adds a sub-command is in the list above.
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(SPS_SOURCE_DIR) / "src" / "cli"))
    if (entry.path().extension() == ".cpp") files += mentions(read_text(entry.path()), "(CLI::App& app) {");
  EXPECT_EQ(files, commands().size());
}

TEST(CommandLine, HelpOfEveryCommandNamesEveryOptionAndAnExample) {
  const TestDir dir;
  for (const std::string& command : commands()) {
    const Outcome o = sps(dir, {command, "--help"});
    EXPECT_EQ(o.status, 0) << command;
    EXPECT_EQ(o.err, "") << command;
    EXPECT_PRED2(mentions, o.out, "Example") << command;
    EXPECT_PRED2(mentions, o.out, "sps " + command) << command;
    std::string all = o.out;
    if (command == "bench")
      for (const char* what : {"train", "gemm"}) all += sps(dir, {command, what, "--help"}).out;
    const auto options = options_in_source(command);
    EXPECT_GE(options.size(), 2u) << command;
    for (const std::string& option : options) EXPECT_PRED2(mentions, all, option) << command;
    for (const std::string& line : lines_of(o.out)) EXPECT_LE(line.size(), 130u) << line;
  }
  EXPECT_EQ(dir.count_entries(), 0u);
}

TEST(CommandLine, Version) {
  const TestDir dir;
  const Outcome o = sps(dir, {"--version"});
  EXPECT_EQ(o.status, 0);
  EXPECT_TRUE(std::regex_match(o.out, std::regex("sps \\d+\\.\\d+\\.\\d+\\n"))) << o.out;
}

TEST(CommandLine, KeysAreAllOfThem) {
  const TestDir dir;
  const Outcome o = sps(dir, {"train", "--keys"});
  EXPECT_EQ(o.status, 0);
  RunConfig config;
  const auto keys = bind(config).keys();
  const auto lines = lines_of(o.out);
  EXPECT_EQ(lines.size(), keys.size());
  for (size_t i = 0; i < keys.size(); ++i) EXPECT_TRUE(lines[i].starts_with(keys[i] + " ")) << lines[i];
}

// The worked examples of the design: text in, a trained and compared model out.
class EndToEnd : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = std::make_unique<TestDir>();
    dir_->write("text/a.jsonl", test_documents(250, 1));
    for (const char* name : {"b.txt", "deep/c.txt"})
      dir_->write("text/" + std::string(name), test_documents(2, 2));
    const Outcome prepared = sps(*dir_, {"prepare", "text", "--out", "data", "--val-fraction", "0.2"});
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
  const Outcome o = sps(*dir_, train("one", "demo_sps_w4_15k"));
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
  const Outcome text = sps(*dir_, generate({}));
  EXPECT_EQ(text.status, 0);
  EXPECT_EQ(text.out, "the list" + greedy.at("text").get<std::string>() + "\n");
}

// The prediction row and the rows that pad the vocabulary are ids without text: none may be drawn, however
// hot.
TEST_F(EndToEnd, EveryNewTokenIsAByte) {
  for (int seed = 0; seed < 6; ++seed) {
    const Outcome o = sps(*dir_, generate({"--temperature", "1e9", "--seed", std::to_string(seed)}));
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
  const Outcome table = sps(*dir_, {"report", "one", "two", "--data", "data"});
  EXPECT_EQ(table.status, 0);
  EXPECT_PRED2(mentions, table.out, "unigram entropy");
  EXPECT_GE(lines_of(table.out).size(), 4u);
}

TEST_F(EndToEnd, InfoOfARunAndOfARecipe) {
  const auto recipe =
      json_of(*dir_, Arguments{"info", "demo_sps_w4_15k", "vocab=320", "eot=256"} + tiny_model());
  const auto run = json_of(*dir_, {"info", "one"});
  EXPECT_TRUE(recipe.is_object() && run.is_object());
  const Outcome text = sps(*dir_, {"info", "one"});
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_PRED2(mentions, text.out, "15,360 tokens trained");
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
    EXPECT_EQ(bytes(*j), bytes(whole) - 8 * tower);
    const auto training = [](const nlohmann::json& info) {
      return info["flops_per_token"]["training"]["executed"].get<double>();
    };
    EXPECT_LT(training(*j), training(whole));
    EXPECT_GT(training(*j), whole["flops_per_token"]["executed"]["total"].get<double>());
  }
  EXPECT_PRED2(mentions, sps(*dir_, {"info", "frozen"}).out, "no gradient, no moments, no update");
  const Outcome gone = sps(*dir_, Arguments{"info", recipe} + frozen);
  EXPECT_EQ(gone.status, 2);
  EXPECT_PRED2(mentions, gone.err, "source does not exist");
}

}  // namespace
}  // namespace sps
