// For the spanning tests: the sps program as a process, run in a folder of its own.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/files.h"
#include "base/json.h"
#include "base/test_dir.h"

namespace sps {

using Arguments = std::vector<std::string>;

inline Arguments operator+(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Outcome {
  int status = -1;  // exit status; -1 if a signal ended it
  int signal = 0;   // the signal that ended it
  std::string out, err;
};

// A running program. Its output goes to files, so that it never waits for a reader.
class Program {
 public:
  // `folder` becomes its working directory.
  Program(const std::filesystem::path& folder, const Arguments& arguments,
          const std::string& program = SPS_BINARY) {
    std::vector<char*> argv{const_cast<char*>(program.c_str())};
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    const std::string out = output_ / "out", err = output_ / "err";
    pid_ = ::fork();
    if (pid_ != 0) return;
    const bool ready = ::chdir(folder.c_str()) == 0 && std::freopen(out.c_str(), "w", stdout) != nullptr &&
                       std::freopen(err.c_str(), "w", stderr) != nullptr &&
                       // Threads that spin while they wait would starve those that work on a busy machine.
                       ::setenv("OMP_WAIT_POLICY", "passive", 1) == 0;
    if (ready) ::execv(program.c_str(), argv.data());
    ::_exit(127);
  }
  ~Program() {
    if (pid_ > 0) ::kill(pid_, SIGKILL), wait();
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // What it has written up to now.
  std::string out() const { return written("out"); }

  void signal(int number) const { ::kill(pid_, number); }

  bool running() {
    if (pid_ > 0 && ::waitpid(pid_, &raw_, WNOHANG) == pid_) pid_ = 0;
    return pid_ > 0;
  }

  // Returns whether `condition` came true while the program ran.
  template <class Condition>
  bool wait_until(Condition&& condition) {
    while (!condition()) {
      if (!running()) return condition();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }

  Outcome wait() {
    if (pid_ > 0) ::waitpid(pid_, &raw_, 0), pid_ = 0;
    Outcome o;
    if (WIFEXITED(raw_)) o.status = WEXITSTATUS(raw_);
    if (WIFSIGNALED(raw_)) o.signal = WTERMSIG(raw_);
    o.out = written("out"), o.err = written("err");
    return o;
  }

 private:
  // Nothing is there if it was killed before it began.
  std::string written(const char* name) const {
    return std::filesystem::exists(output_ / name) ? read_text(output_ / name) : "";
  }

  TestDir output_;
  pid_t pid_ = 0;
  int raw_ = 0;
};

inline Outcome run_program(const std::filesystem::path& folder, const Arguments& arguments) {
  return Program(folder, arguments).wait();
}

// The standard output of a command that must succeed and print one JSON object.
inline nlohmann::json json_of(const TestDir& dir, const Arguments& arguments) {
  const Outcome o = run_program(dir.path(), arguments + Arguments{"--json"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), o.status == 0 ? 1 : 0) << o.out;
  return parse_json(o.status == 0 ? o.out : "{}", arguments[0]);
}

// Settings that make any demo recipe a model of a few thousand numbers and steps of 256 tokens.
inline Arguments tiny_model() {
  return {"layers=2",   "d_model=32",    "heads=2",           "kv_heads=2",           "d_ffn=48",
          "context=32", "optim.lr=5e-3", "optim.min_lr=5e-4", "train.global_batch=8", "train.micro_batch=4"};
}

// The lines of a text.
inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

}  // namespace sps
