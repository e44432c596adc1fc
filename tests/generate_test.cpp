// sps generate at the edges: odd prompts, prompts as long as the context, many lines, readers that go away.
#include <gtest/gtest.h>

#include "base/json.h"
#include "byte_model.h"

namespace sps {
namespace {

class Generate : public ByteModel {
 protected:
  static Arguments options(const Arguments& more) {
    return Arguments{"generate", "run", "--dtype", "f32"} + more;
  }
  static nlohmann::json made(const Arguments& more) { return json_of(*dir_, options(more)); }
  // Through a shell, in which $sps is the program with these options.
  static Outcome shell(const std::string& line) {
    return Program(dir_->path(),
                   {"-c", "sps='" + std::string(SPS_BINARY) + " generate run --dtype f32'; " + line},
                   "/bin/sh")
        .wait();
  }
  static std::vector<nlohmann::json> objects(const std::string& text) {
    std::vector<nlohmann::json> all;
    for (const std::string& line : lines_of(text)) all.push_back(parse_json(line, "line"));
    return all;
  }
};

// Nothing before it: the text begins as a document does.
TEST_F(Generate, AnEmptyPromptIsANewDocument) {
  const auto nothing = made({"--tokens", "8"});
  EXPECT_EQ(nothing.at("prompt"), "");
  EXPECT_EQ(nothing.at("prompt_tokens"), 0);
  EXPECT_GT(nothing.at("new_tokens"), 0);
  EXPECT_EQ(made({"--tokens", "8", "--prompt", ""}), nothing);
  // In a file too, where each line has its text, whatever stands beside it.
  dir_->write("prompts.jsonl",
              "{\"prompt\": \"\"}\n\n{\"prompt\": \"the\"}\n{\"prompt\": \"\", \"id\": 7}\n");
  const Outcome o = run_program(dir_->path(), options({"--tokens", "8", "--file", "prompts.jsonl"}));
  ASSERT_EQ(o.status, 0) << o.err;
  const auto lines = objects(o.out);
  ASSERT_EQ(lines.size(), 3u);
  for (const size_t i : {0, 2}) {
    EXPECT_EQ(lines[i].at("text"), nothing.at("text"));
    EXPECT_EQ(lines[i].at("prompt_tokens"), 0);
  }
  EXPECT_EQ(lines[0].at("id"), "prompts.jsonl:1");
  EXPECT_EQ(lines[2].at("id"), "7");
  EXPECT_EQ(lines[1].at("text"), made({"--tokens", "8", "--prompt", "the"}).at("text"));
  dir_->write("texts.jsonl", "{\"to\": {\"read\": \"the\"}}\n");
  const Outcome other = run_program(
      dir_->path(), options({"--tokens", "8", "--file", "texts.jsonl", "--text-field", "to.read"}));
  ASSERT_EQ(other.status, 0) << other.err;
  EXPECT_EQ(objects(other.out).at(0).at("text"), lines[1].at("text"));
}

TEST_F(Generate, PromptsAsLongAsTheContext) {
  const std::string whole(32, 'a'), almost(31, 'a');
  const auto read = made({"--prompt", whole, "--tokens", "0"});
  EXPECT_EQ(read.at("prompt_tokens"), 32);
  EXPECT_EQ(read.at("new_tokens"), 0);
  EXPECT_EQ(read.at("text"), "");
  EXPECT_EQ(read.at("finish"), "length");
  EXPECT_EQ(run_program(dir_->path(), options({"--prompt", whole, "--tokens", "0"})).out, whole + "\n");
  const auto one = made({"--prompt", almost, "--tokens", "1", "--temperature", "1"});
  EXPECT_EQ(one.at("prompt_tokens"), 31);
  EXPECT_EQ(one.at("new_tokens"), one.at("finish") == "length" ? 1 : 0);
  // What does not fit is refused (bad_input_test).
}

TEST_F(Generate, HowManyIsWhatIsAsked) {
  const auto nothing = made({"--prompt", "the", "--tokens", "0", "--log-probabilities"});
  EXPECT_EQ(nothing.at("new_tokens"), 0);
  EXPECT_EQ(nothing.at("log_probabilities"), nlohmann::json::array());
  const auto all = made(
      {"--prompt", "the list", "--tokens", "9", "--top-k", "9223372036854775807", "--temperature", "0.8"});
  EXPECT_EQ(all, made({"--prompt", "the list", "--tokens", "9", "--temperature", "0.8"}));
}

// Bytes that are no UTF-8 are bytes like others; JSON shows each as U+FFFD.
TEST_F(Generate, AnyByteMayBePrompt) {
  const std::string odd = "a\xFF\xC3(\xE2\x82";
  const auto json = made({"--prompt", odd, "--tokens", "6"});
  EXPECT_EQ(json.at("prompt_tokens"), 6);
  EXPECT_EQ(json.at("prompt"), "a\uFFFD\uFFFD(\uFFFD");
  const Outcome text = run_program(dir_->path(), options({"--prompt", odd, "--tokens", "6"}));
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_TRUE(text.out.starts_with(odd)) << text.out;
  // A text file is one prompt, byte for byte; no argument can hold a NUL, a file can.
  dir_->write("odd.txt", std::string("a\0b\xFF", 4));
  const Outcome file = run_program(dir_->path(), options({"--file", "odd.txt", "--tokens", "6"}));
  ASSERT_EQ(file.status, 0) << file.err;
  EXPECT_EQ(objects(file.out).at(0).at("prompt_tokens"), 4);
  EXPECT_EQ(objects(file.out).at(0).at("prompt"), std::string("a\0b\uFFFD", 6));
}

// Whatever the prompt holds and however unlikely the text is.
TEST_F(Generate, EveryLineIsJson) {
  dir_->write("prompts.jsonl", "{\"prompt\": \"the \\\"list\\\"\\n\\u0000\\u20ac\"}\n");
  const Outcome o = run_program(dir_->path(), options({"--file", "prompts.jsonl", "--tokens", "5",
                                                       "--temperature", "1e9", "--log-probabilities"}));
  ASSERT_EQ(o.status, 0) << o.err;
  const auto line = objects(o.out).at(0);
  EXPECT_EQ(line.at("prompt"), std::string("the \"list\"\n\0\u20ac", 15));
  EXPECT_EQ(line.at("prompt_tokens"), 15);
  for (const auto& p : line.at("log_probabilities")) EXPECT_LE(p, 0);
}

// A mistake in a later line: those before it are there, the sentence names the line.
TEST_F(Generate, AMistakeInTheMiddleOfAFile) {
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += "{\"prompt\": \"the list\"}\n";
  dir_->write("prompts.jsonl", lines + "{\"prompt\": 5}\n" + lines);
  const Outcome o =
      run_program(dir_->path(), options({"--file", "prompts.jsonl", "--tokens", "2", "--sequences", "2"}));
  EXPECT_EQ(o.status, 1);
  EXPECT_PRED2(mentions, o.err, "prompts.jsonl:21");
  EXPECT_EQ(lines_of(o.err).size(), 1u) << o.err;
  EXPECT_GE(lines_of(o.out).size(), 10u);
  for (const auto& line : objects(o.out)) EXPECT_EQ(line.at("prompt"), "the list");
}

TEST_F(Generate, PromptsThroughAPipe) {
  const Outcome o = shell("printf '{\"prompt\": \"the\"}\\n{\"prompt\": \"a\"}' | $sps --file - --tokens 4");
  ASSERT_EQ(o.status, 0) << o.err;
  const auto lines = objects(o.out);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].at("id"), "stdin:1");
  EXPECT_EQ(lines[0].at("text"), made({"--prompt", "the", "--tokens", "4"}).at("text"));
  const Outcome text = shell("printf 'the' | $sps --file - --tokens 4");
  EXPECT_EQ(objects(text.out).at(0).at("text"), lines[0].at("text"));
  const Outcome none = shell("$sps --file - --tokens 4 < /dev/null");
  EXPECT_EQ(none.status, 1);
  EXPECT_EQ(none.err, "sps: standard input holds no prompt\n");
}

// A reader that has enough ends the program without a word; a disk that is full is an error.
TEST_F(Generate, OutputThatGoesNowhere) {
  std::string lines;
  for (int i = 0; i < 300; ++i) lines += "{\"prompt\": \"the list\"}\n";
  dir_->write("prompts.jsonl", lines);
  const Outcome head = shell("$sps --file prompts.jsonl --tokens 20 | head -n 1");
  EXPECT_EQ(head.status, 0);
  EXPECT_EQ(lines_of(head.out).size(), 1u);
  EXPECT_EQ(head.err, "");
  if (!std::filesystem::is_character_file("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  for (const std::string what : {"--file prompts.jsonl", "--prompt the", "--prompt the --json", "--help"}) {
    const Outcome full = shell("$sps " + what + " --tokens 4 > /dev/full");
    EXPECT_EQ(full.status, 1) << what;
    EXPECT_EQ(lines_of(full.err).size(), 1u) << full.err;
    EXPECT_PRED2(mentions, full.err, "No space left on device") << what;
  }
  const Outcome session = shell("printf 'the\\na\\n' | $sps --interactive --tokens 4 > /dev/full");
  EXPECT_EQ(session.status, 1);
  EXPECT_EQ(lines_of(session.err).size(), 1u) << session.err;
}

}  // namespace
}  // namespace sps
