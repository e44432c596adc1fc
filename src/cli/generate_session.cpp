#include "cli/generate_session.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <optional>

#include "base/log.h"
#include "cli/cli.h"
#include "infer/stop_strings.h"
#include "tokenizer/stream_decoder.h"

namespace sps {

namespace {

constexpr size_t kLongestLine = size_t{16} << 20;

constexpr std::string_view kHelp =
    "A line is put behind the text as it is typed, and the model goes on from there; an empty line just goes "
    "on.\n"
    "  /new   begin another text\n"
    "  /quit  leave (so does the end of the input)\n"
    "  /help  this\n"
    "A line that begins with // is text that begins with /.";

template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  std::fflush(stdout);
  fmt::print(stderr, "[{}]\n", fmt::format(format, std::forward<Args>(args)...));
}

class Session {
 public:
  Session(const Model& model, const Int8Weights* int8, const Tokenizer& tokenizer,
          const GenerateOptions& options, const std::vector<std::string>& stops)
      : c_(model.config()),
        tokenizer_(tokenizer),
        options_(options),
        stops_(stops),
        engine_(c_, model.parameters(), model.store(), {.max_sequences = 1, .int8 = int8}),
        terminal_(tokenizer),
        is_terminal_(isatty(STDOUT_FILENO) == 1),
        asks_(is_terminal_ && isatty(STDIN_FILENO) == 1) {}

  EngineMemory memory() const { return engine_.memory(); }

  void run() {
    if (asks_) say("a line of text begins; /help says more");
    while (auto line = next_line()) {
      if (*line == "/quit") return;
      try {
        take(*line);
      } catch (const Error& e) {
        if (e.kind() != ErrorKind::usage) throw;
        say("{}", e.what());
      }
    }
    if (asks_) fmt::print("\n");
  }

 private:
  std::optional<std::string> next_line() const {
    if (asks_) {
      fmt::print("> ");
      std::fflush(stdout);
    }
    std::streambuf& in = *std::cin.rdbuf();
    std::string line;
    for (int c; (c = in.sbumpc()) != std::char_traits<char>::eof();) {
      if (c == '\n') {
        if (line.ends_with('\r')) line.pop_back();
        return line;
      }
      if (line.size() == kLongestLine)
        fail("a line is longer than {} MiB: no context holds so much", kLongestLine >> 20);
      line.push_back(char(c));
    }
    return line.empty() ? std::nullopt : std::optional(line);
  }

  void take(const std::string& line) {
    std::string_view text = line;
    if (text.starts_with("//"))
      text.remove_prefix(1);
    else if (text.starts_with('/'))
      return command(line);
    std::vector<int32_t> ids = ids_;
    if (ids.empty())
      ids = prompt_ids(c_, tokenizer_, text);
    else
      tokenizer_.encode(text, ids);
    if (ids.empty()) ids.push_back(int32_t(c_.eot));  // nothing yet: a document begins
    const int64_t room = c_.context - int64_t(ids.size());
    if (room < 1) {
      say("the context of {} tokens is full: {} are taken, {} would come; /new begins another text",
          c_.context, ids_.size(), ids.size() - ids_.size());
      return;
    }
    ids_ = std::move(ids);
    go_on(room);
  }

  void command(const std::string& line) {
    if (line == "/new")
      ids_.clear();
    else if (line == "/help")
      fmt::print(stderr, "{}\n", kHelp);
    else
      say("there is no command {}: /help names them all", line);
  }

  void go_on(int64_t room) {
    Request request;
    request.prompt = ids_;
    request.options = options_;
    request.options.max_new = std::min(options_.max_new, room);
    request.options.sampling.seed += lines_++;
    const int64_t most = request.options.max_new;
    const int64_t handle = engine_.add(std::move(request));
    StopStrings stops(stops_);
    std::string text;
    const auto show = [&](const std::string& piece) {
      text += piece;
      fmt::print("{}", is_terminal_ ? terminal_.feed(piece) : piece);
      flush_output();
    };
    std::vector<int32_t> drawn;
    int32_t previous = ids_.back();
    Finish finish = Finish::no;
    std::string error;
    while (!engine_.idle())
      for (const Drawn& d : engine_.step()) {
        finish = d.finish, error = d.error;
        if (d.id < 0 || d.finish == Finish::end_of_text) continue;
        drawn.push_back(d.id);
        show(stops.feed(tokenizer_.text_of(d.id, std::exchange(previous, d.id))));
        if (stops.stopped()) engine_.cancel(handle);
      }
    show(stops.flush());
    fmt::print("{}\n", is_terminal_ ? terminal_.flush() : "");
    flush_output();
    // A stop string may begin and end inside tokens: the text goes on from what has been shown.
    if (stops.stopped())
      tokenizer_.encode(text, ids_);
    else
      ids_.insert(ids_.end(), drawn.begin(), drawn.end());
    if (finish == Finish::failed) say("{}", error);
    if (finish == Finish::end_of_text) {
      say("the text has ended; the next line begins another");
      ids_.clear();
    } else if (most < options_.max_new && int64_t(drawn.size()) == most) {
      say("the context of {} tokens is full; /new begins another text", c_.context);
    }
  }

  const ModelConfig& c_;
  const Tokenizer& tokenizer_;
  const GenerateOptions& options_;
  const std::vector<std::string>& stops_;
  Engine engine_;
  StreamDecoder terminal_;
  const bool is_terminal_, asks_;
  std::vector<int32_t> ids_;  // of the text so far
  uint64_t lines_ = 0;        // that were continued
};

}  // namespace

std::string memory_text(const Model& model, const EngineMemory& m) {
  const auto mib = [](size_t bytes) { return double(bytes) / double(1 << 20); };
  return fmt::format(
      "memory in MiB: weights {:.1f}{}, {} pages of keys and values {:.1f}, windows {:.1f}, a step {:.1f}; "
      "{} bytes a token, {} a sequence",
      mib(model.store().bytes()),
      m.decoder.int8 > 0 ? fmt::format(", in 8 bits {:.1f}", mib(m.decoder.int8)) : "", m.pages,
      mib(m.decoder.persistent), mib(m.decoder.rings), mib(m.decoder.step), m.bytes_per_position,
      m.bytes_per_sequence);
}

std::vector<int32_t> prompt_ids(const ModelConfig& c, const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  if (c.bos >= 0) ids.push_back(int32_t(c.bos));
  tokenizer.encode(text, ids);
  return ids;
}

void run_generate_session(const Model& model, const Int8Weights* int8, const Tokenizer& tokenizer,
                          const GenerateOptions& options, const std::vector<std::string>& stops,
                          bool memory) {
  Session session(model, int8, tokenizer, options, stops);
  if (memory) spdlog::info("{}", memory_text(model, session.memory()));
  session.run();
}

}  // namespace sps
