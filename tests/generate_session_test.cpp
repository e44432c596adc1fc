// sps generate --interactive through a pipe.
#include <gtest/gtest.h>

#include <utility>

#include "byte_model.h"

namespace sps {
namespace {

class GenerateSession : public ByteModel {
 protected:
  static Arguments options(const Arguments& more) {
    return Arguments{"generate", "run", "--dtype", "f32", "--temperature", "0.6"} + more;
  }
  static Outcome session(const std::string& input, const Arguments& more, int seed = 5) {
    dir_->write("input", input);
    std::string line = std::string("exec ") + SPS_BINARY;
    for (const std::string& word : options(more)) line += " '" + word + "'";
    return Program(dir_->path(), {"-c", line + " --seed " + std::to_string(seed) + " --interactive < input"},
                   "/bin/sh")
        .wait();
  }
  // What the model makes of a prompt.
  static std::string made(const std::string& prompt, int seed, const Arguments& more) {
    const Outcome o =
        run_program(dir_->path(), options({"--prompt", prompt, "--seed", std::to_string(seed)}) + more);
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_TRUE(o.out.starts_with(prompt) && o.out.ends_with("\n")) << o.out;
    return o.out.substr(prompt.size(), o.out.size() - prompt.size() - 1);
  }

  // The first seed with which "the list" and `tokens` more stay one text (or end before, if `ends`), and that
  // text.
  static std::pair<int, std::string> search(int tokens, bool ends) {
    for (int seed = 0; seed < 60; ++seed) {
      const std::string text = made("the list", seed, {"-n", std::to_string(tokens)});
      if ((int64_t(text.size()) < tokens) == ends) return {seed, text};
    }
    ADD_FAILURE() << "no seed";
    return {};
  }
};

TEST_F(GenerateSession, LinesGoOnInOneText) {
  const std::string first = made("the list", 5, {"-n", "6"});
  const std::string second = made("the list" + first + " of", 6, {"-n", "6"});
  const std::string third = made("the list" + first + " of" + second, 7, {"-n", "6"});
  const Outcome o = session("the list\n of\n\n", {"-n", "6"});
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.err, "");
  EXPECT_EQ(o.out, first + "\n" + second + "\n" + third + "\n");
  // Lines as other systems end them, and a last one without an end.
  EXPECT_EQ(session("the list\r\n of", {"-n", "6"}).out, first + "\n" + second + "\n");
}

TEST_F(GenerateSession, CommandsAndText) {
  const Outcome o = session("/help\nthe list\n/new\n//a\n/nonsense\n/quit\nno more\n", {"-n", "6"});
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.out, made("the list", 5, {"-n", "6"}) + "\n" + made("/a", 6, {"-n", "6"}) + "\n");
  for (const char* command : {"/new", "/quit", "/help"}) EXPECT_PRED2(mentions, o.err, command);
  EXPECT_PRED2(mentions, o.err, "there is no command /nonsense");
}

TEST_F(GenerateSession, AFullContextIsSaid) {
  // 8 bytes and 23 new tokens leave one place: with the next line in it none is left for what follows.
  const auto [seed, text] = search(23, false);
  const Outcome o = session("the list\nx\n/new\na\n", {"-n", "23"}, seed);
  EXPECT_EQ(o.status, 0);
  EXPECT_TRUE(o.err.starts_with(
      "[the context of 32 tokens is full: 31 are taken, 1 would come; /new begins another text]\n"))
      << o.err;
  EXPECT_EQ(o.out, text + "\n" + made("a", seed + 1, {"-n", "23"}) + "\n");
  // What was asked for does not fit: the last of it does not come.
  const Outcome more = session("the list\n\n", {"-n", "30"}, search(24, false).first);
  EXPECT_EQ(lines_of(more.err).front(), "[the context of 32 tokens is full; /new begins another text]");
  EXPECT_EQ(lines_of(more.err).back(),
            "[the context of 32 tokens is full: 32 are taken, 0 would come; /new begins another text]");
  // A line that is too long by itself leaves the text as it was.
  const Outcome wide = session(std::string(32, 'a') + "\nthe list\n", {"-n", "6"});
  EXPECT_EQ(wide.out, made("the list", 5, {"-n", "6"}) + "\n");
  EXPECT_PRED2(mentions, wide.err, "0 are taken, 32 would come");
}

TEST_F(GenerateSession, AfterTheEndOfATextAnotherBegins) {
  const auto [seed, text] = search(23, true);
  const Outcome o = session("the list\na\n", {"-n", "23"}, seed);
  EXPECT_EQ(lines_of(o.err).front(), "[the text has ended; the next line begins another]");
  EXPECT_EQ(o.out, text + "\n" + made("a", seed + 1, {"-n", "23"}) + "\n");
}

TEST_F(GenerateSession, StopStringsEndAContinuation) {
  const std::string whole = made("the list", 5, {"-n", "12"});
  const std::string stop = whole.substr(4, 2), cut = whole.substr(0, whole.find(stop));
  const Outcome o = session("the list\n of\n", {"-n", "12", "--stop", stop});
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.out, cut + "\n" + made("the list" + cut + " of", 6, {"-n", "12", "--stop", stop}) + "\n");
}

TEST_F(GenerateSession, MemoryIsSaidFirst) {
  const Outcome o = session("the list\n", {"-n", "6", "--memory"});
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.out, made("the list", 5, {"-n", "6"}) + "\n");
  ASSERT_EQ(lines_of(o.err).size(), 1u) << o.err;
  EXPECT_TRUE(o.err.starts_with("memory in MiB: weights ")) << o.err;
}

// Bytes that are no UTF-8 and a NUL are bytes of the text like others.
TEST_F(GenerateSession, AnyByteMayBeTyped) {
  const std::string odd("a\0\xFF\xC3 b", 6);
  const Outcome o = session(odd + "\n\n", {"-n", "6"});
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.err, "");
  const Outcome again = session(odd + "\n\n", {"-n", "6", "--threads", "1"});
  EXPECT_EQ(again.out, o.out);
  EXPECT_GE(o.out.size(), 14u);
}

// Ctrl-C ends it at once; what the model has said is there.
TEST_F(GenerateSession, AnInterruptKeepsWhatWasSaid) {
  const std::string said = made("the list", 5, {"-n", "6"}) + "\n";
  std::string line = std::string("exec ") + SPS_BINARY;
  for (const std::string& word : options({"-n", "6", "--seed", "5", "--interactive"}))
    line += " '" + word + "'";
  // Somebody who types a line and then waits.
  Program program(
      dir_->path(),
      {"-c", "mkfifo typed; { echo the list; exec sleep 60; } > typed & echo $! > pid; " + line + " < typed"},
      "/bin/sh");
  EXPECT_TRUE(program.wait_until([&] { return program.out() == said; }));
  program.signal(SIGINT);
  const Outcome o = program.wait();
  EXPECT_EQ(o.signal, SIGINT);
  EXPECT_EQ(o.out, said);
  EXPECT_EQ(o.err, "");
  ::kill(pid_t(std::stol(read_text(*dir_ / "pid"))), SIGKILL);
}

TEST_F(GenerateSession, NothingTypedNothingMade) {
  const Outcome o = session("", {"-n", "6"});
  EXPECT_EQ(o.status, 0);
  EXPECT_EQ(o.out + o.err, "");
  for (const char* other : {"--prompt=a", "--file=input", "--json"}) {
    const Outcome both = session("", {other});
    EXPECT_EQ(both.status, 2) << other;
    EXPECT_EQ(lines_of(both.err).size(), 1u) << both.err;
  }
}

}  // namespace
}  // namespace sps
