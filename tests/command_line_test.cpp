// The program as people meet it: help, versions, and one corpus from text to a report.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <regex>
#include <set>

#include "base/json.h"
#include "base/test_files.h"
#include "data/test_corpus.h"
#include "data/token_file.h"
#include "program.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/load_tokenizer_json.h"
#include "train/run_config.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

// The options that a sub-command's source adds: the quoted names after add_option( and add_flag(.
std::set<std::string> options_in_source(const std::string& command) {
  const fs::path folder = fs::path(SPS_SOURCE_DIR) / "src" / "cli";
  std::string text;
  for (const auto& entry : fs::directory_iterator(folder)) {
    // "bench.cpp" and what belongs to it: "bench_inference.cpp".
    const std::string stem = entry.path().stem(), extension = entry.path().extension();
    if (extension == ".cpp" && (stem == command || stem.starts_with(command + "_")))
      text += read_text(entry.path());
  }
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
  static const std::vector<std::string> all{"prepare", "data",  "train",  "eval",      "generate",
                                            "info",    "bench", "report", "tokenizer", "convert"};
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
      for (const char* what : {"train", "decode", "prefill", "attention", "gemm"})
        all += sps(dir, {command, what, "--help"}).out;
    if (command == "data")
      for (const char* what : {"show", "check"}) all += sps(dir, {command, what, "--help"}).out;
    if (command == "tokenizer")
      for (const char* what : {"train", "encode", "decode", "info"})
        all += sps(dir, {command, what, "--help"}).out;
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

// A tokenizer of one's own: trained twice with the same bytes, and its ids turn back into the text.
TEST(CommandLine, Tokenizer) {
  const TestDir dir;
  dir.write("a.jsonl", test_documents(200, 1));
  const auto trained = json_of(dir, {"tokenizer", "train", "a.jsonl", "--vocab-size", "300", "--out", "tok"});
  EXPECT_EQ(trained.at("vocab_size"), 300);
  EXPECT_EQ(trained.at("eot"), 299);
  EXPECT_EQ(trained.at("texts"), 200);
  const Arguments one_thread{"tokenizer",  "train",     "a.jsonl", "--vocab-size", "300", "--out",
                             "again.json", "--threads", "1"};
  EXPECT_EQ(json_of(dir, one_thread).at("fingerprint"), trained.at("fingerprint"));
  EXPECT_EQ(read_text(dir / "again.json"), read_text(dir / "tok/tokenizer.json"));
  EXPECT_TRUE(fs::exists(dir / "tok/tokenizer_config.json"));
  // The same tokenizer may be written again; another one only with --force.
  EXPECT_EQ(sps(dir, one_thread).status, 0);
  const Outcome other =
      sps(dir, {"tokenizer", "train", "a.jsonl", "--vocab-size", "280", "--out", "again.json"});
  EXPECT_EQ(other.status, 1);
  EXPECT_PRED2(mentions, other.err, "--force");
  EXPECT_EQ(read_text(dir / "again.json"), read_text(dir / "tok/tokenizer.json"));

  // peer-faults 25, 26: a text is what it is, without escapes and special tokens unless they are asked for.
  const std::string text = "the list\n<|endoftext|>";
  const auto plain = json_of(dir, {"tokenizer", "encode", text, "--tokenizer", "tok"});
  const auto parsed = json_of(dir, {"tokenizer", "encode", text, "--tokenizer", "tok", "--special", "parse"});
  EXPECT_EQ(parsed.at("ids").back(), 299);
  Arguments ids;
  for (const auto& id : plain.at("ids")) {
    EXPECT_NE(id, 299);
    ids.push_back(id.dump());
  }
  EXPECT_LT(ids.size(), text.size());
  EXPECT_EQ(sps(dir, Arguments{"tokenizer", "decode", "--tokenizer", "tok"} + ids).out, text);
  // Whole documents, a line each: the ids that each has alone, and the same in any number of threads.
  dir.write("b.jsonl", "{\"text\": \"the list\\n<|endoftext|>\"}\n{\"text\": null}\n{\"text\": \"of\"}\n");
  dir.write("c.txt", "c\n");
  const Arguments documents{"tokenizer", "encode", "--tokenizer", "tok", "--documents", "b.jsonl", "c.txt"};
  const Outcome lines = sps(dir, documents);
  EXPECT_EQ(lines.status, 0) << lines.err;
  const auto alone = [&](const std::string& t) {
    return sps(dir, {"tokenizer", "encode", t, "--tokenizer", "tok"}).out;
  };
  EXPECT_EQ(lines.out, alone(text) + "\n" + alone("of") + alone("c\n"));
  const auto lists = lines_of(sps(dir, documents + Arguments{"--json"}).out);
  ASSERT_EQ(lists.size(), 4u);
  EXPECT_EQ(parse_json(lists[0], "line"), plain.at("ids"));
  EXPECT_EQ(lists[1], "[]");
  const auto special = lines_of(sps(dir, documents + Arguments{"--json", "--special", "parse"}).out);
  EXPECT_EQ(parse_json(special[0], "line"), parsed.at("ids"));
  EXPECT_EQ(sps(dir, {"tokenizer", "encode", "--documents", "a.jsonl", "--text-field", "none"}).status, 1);
  const auto info = json_of(dir, {"tokenizer", "info", "tok", "--file", "a.jsonl"});
  EXPECT_EQ(info.at("fingerprint"), trained.at("fingerprint"));
  EXPECT_EQ(info.at("text_bytes"), trained.at("text_bytes"));
  EXPECT_GT(info.at("bytes_per_token"), 1.5);
  // A sample is the same text every time and less of it.
  const Arguments sample{"tokenizer", "train",  "a.jsonl",     "--vocab-size", "270",
                         "--out",     "s.json", "--max-bytes", "2000"};
  const auto sampled = json_of(dir, sample);
  EXPECT_EQ(json_of(dir, sample).at("fingerprint"), sampled.at("fingerprint"));
  EXPECT_LT(sampled.at("texts"), 100);
  EXPECT_GT(sampled.at("texts"), 5);
}

// A data set carries its tokenizer, a run and its checkpoints take it over, and nobody has to name it again.
TEST(CommandLine, ATokenizerGoesWithDataAndModel) {
  const TestDir dir;
  dir.write("a.jsonl", test_documents(300, 1));
  // Its end of text has a name of its own.
  EXPECT_EQ(json_of(dir, {"tokenizer", "train", "a.jsonl", "--vocab-size", "300", "--out", "bpe.json",
                          "--special", "<|endoftext|>", "--eot", "<fin>"})
                .at("eot"),
            298);
  const BpeTokenizer bpe(load_tokenizer_json(dir / "bpe.json"));
  EXPECT_EQ(bpe.eot(), 298);
  EXPECT_EQ(
      sps(dir, {"prepare", "a.jsonl", "--out", "data", "--tokenizer", "bpe.json", "--val-fraction", "0.2"})
          .status,
      0);
  fs::remove(dir / "bpe.json");
  EXPECT_EQ(sps(dir, {"data", "check", "data"}).out, "data: no fault found\n");

  const auto shown =
      json_of(dir, {"data", "show", "data", "--split", "val", "--windows", "2", "--context", "50"});
  const TokenMeta meta = *read_token_meta(dir / "data");
  EXPECT_EQ(shown.at("tokens"), meta.val.tokens);
  EXPECT_EQ(shown.at("documents"), meta.val.documents);
  EXPECT_NEAR(shown.at("bytes_per_token").get<double>(),
              double(meta.val.text_bytes) / double(meta.val.tokens), 1e-9);
  EXPECT_EQ(shown.at("length").at("mean"), double(meta.val.tokens) / double(meta.val.documents));
  uint64_t in_histogram = 0;
  for (const auto& bin : shown.at("length").at("histogram"))
    in_histogram += bin.at("documents").get<uint64_t>();
  EXPECT_EQ(in_histogram, meta.val.documents);
  ASSERT_EQ(shown.at("windows").size(), 2u);
  // The pieces of a window are parts of documents.
  const std::string corpus = read_text(dir / "a.jsonl");
  for (const auto& window : shown.at("windows")) {
    EXPECT_GE(window.at("texts").size(), 2u);
    for (const std::string text : window.at("texts")) EXPECT_PRED2(mentions, corpus, text);
  }
  const Outcome table = sps(dir, {"data", "show", "data"});
  EXPECT_EQ(table.status, 0) << table.err;
  EXPECT_PRED2(mentions, table.out, "(end of text)");

  const auto trained =
      json_of(dir, Arguments{"train", "demo_sps_w4_15k", "data.dir=data", "run.dir=run"} + tiny_model() +
                       Arguments{"run.dtype=f32", "train.tokens=2560", "schedule.warmup_tokens=256",
                                 "schedule.decay_tokens=512"});
  EXPECT_GT(trained.at("val_bits_per_byte"), 0);
  EXPECT_EQ(read_text(dir / "run/tokenizer.json"), bpe.to_json());
  const auto scored = json_of(dir, {"eval", "run", "--data", "data", "--dtype", "f32", "--tokens", "8192"});
  EXPECT_NEAR(scored.at("bits_per_byte").get<double>(), trained.at("val_bits_per_byte").get<double>(), 1e-9);

  fs::remove_all(dir / "data");
  const auto made = json_of(dir, {"generate", "run", "--prompt", "the list", "--tokens", "12"});
  EXPECT_LT(made.at("prompt_tokens"), 8);
  EXPECT_EQ(made.at("prompt_tokens"), [&] {
    std::vector<int32_t> ids;
    bpe.encode("the list", ids);
    return ids.size();
  }());
  // A checkpoint without it says what is missing.
  const std::string checkpoint = scored.at("checkpoint");
  std::ofstream(dir / "run/tokenizer.json") << "of no importance";
  EXPECT_EQ(json_of(dir, {"generate", checkpoint, "--prompt", "the list", "--tokens", "12"}), made);
  std::ofstream(dir.path() / checkpoint / "tokenizer.json") << "{}";
  const Outcome damaged = sps(dir, {"generate", checkpoint});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_PRED2(mentions, damaged.err, "tokenizer.json");
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

// Every prompt of a file becomes what it becomes alone, in the order of the file, whatever runs beside it.
TEST_F(EndToEnd, AFileOfPrompts) {
  const std::vector<std::string> prompts{"the list", "a", "item 12 of the", "the list", "words and"};
  std::string lines;
  for (size_t i = 0; i < prompts.size(); ++i)
    lines += nlohmann::json{{"prompt", prompts[i]}, {"id", fmt::format("p{}", i)}}.dump() + "\n";
  dir_->write("prompts.jsonl", lines);
  const Arguments common{"--tokens", "12", "--dtype", "f32", "--temperature", "0.9", "--log-probabilities"};
  for (const char* sequences : {"1", "3"}) {
    const Outcome o = sps(*dir_, Arguments{"generate", "one", "--file", "prompts.jsonl", "--sequences",
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
    const Outcome o = sps(*dir_, Arguments{"generate", "one", "--prompt", "a", "--tokens", "4", "--device",
                                           "cpu", "--dtype", "bf16", "--memory"} +
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
  const Outcome shown = sps(*dir_, generate({"--stop", stop}));
  EXPECT_EQ(shown.out, "the list" + text.substr(0, text.find(stop)) + "\n");
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
  const Outcome text = sps(*dir_, {"info", "s_sps_w64_20b", "--device", "cuda", "train.recompute=ffn"});
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_PRED2(mentions, text.out, "norms and the FFN's inside are made again");
  const Outcome wrong = sps(*dir_, {"info", "s_sps_w64_20b", "train.recompute=all"});
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
  EXPECT_PRED2(mentions, sps(*dir_, {"info", "frozen"}).out, "no gradient, no moments, no update");
  const Outcome gone = sps(*dir_, Arguments{"info", recipe} + frozen);
  EXPECT_EQ(gone.status, 2);
  EXPECT_PRED2(mentions, gone.err, "source does not exist");
}

}  // namespace
}  // namespace sps
