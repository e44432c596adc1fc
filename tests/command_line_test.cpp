// The program as people meet it: help, versions, and one corpus from text to a report.
#include <gtest/gtest.h>

#include <fstream>
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

}  // namespace
}  // namespace sps
