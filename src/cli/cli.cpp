#include "cli/cli.h"

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <limits>

#include "base/error.h"
#include "base/log.h"

namespace sps {

namespace {

int exit_status = 0;

int say(const std::string& sentence, int status) {
  std::fflush(stdout);
  std::fprintf(stderr, "sps: %s\n", sentence.c_str());
  return status;
}

template <class T>
std::string not_a_number(const std::string& text) {
  T value;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (stop == end && error == std::errc() && fmt::format("{}", value) == text) return "";
  return fmt::format("'{}': expected a whole number from {} to {}", text, std::numeric_limits<T>::min(),
                     std::numeric_limits<T>::max());
}

// CLI11 itself wraps -1 and 2^64 around without a word and takes 010 for eight.
void check_whole_numbers(CLI::App* app) {
  for (CLI::Option* option : app->get_options({})) {
    const std::string type = option->get_type_name();
    if (type.starts_with("UINT")) option->check(CLI::Validator(not_a_number<uint64_t>, ""));
    if (type.starts_with("INT")) option->check(CLI::Validator(not_a_number<int64_t>, ""));
  }
  for (CLI::App* command : app->get_subcommands({})) check_whole_numbers(command);
}

}  // namespace

void set_exit_status(int status) {
  exit_status = status;
}

void add_sampling_options(CLI::App* cmd, SamplingOptions& sampling) {
  cmd->add_option("--temperature", sampling.temperature, "0 = always the most likely token")
      ->capture_default_str();
  cmd->add_option("--top-k", sampling.top_k, "Only the k most likely tokens; 0 = all")->capture_default_str();
  cmd->add_option("--top-p", sampling.top_p, "Only the smallest set with this probability")
      ->capture_default_str();
  cmd->add_option("--min-p", sampling.min_p, "Only tokens with this part of the likeliest's probability")
      ->capture_default_str();
  cmd->add_option("--repetition-penalty", sampling.repetition_penalty,
                  "Logits of tokens in the text so far are divided by it; 1 = off")
      ->capture_default_str();
  cmd->add_option("--seed", sampling.seed, "Seed of the draws")->capture_default_str();
}

void add_threads_option(CLI::App* cmd, int& threads) {
  constexpr int kMost = 1024;
  cmd->add_option("--threads", threads, "0 = all cores")->capture_default_str()->check(CLI::Range(0, kMost));
}

void flush_output() {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.flush()) return;
  fail("standard output cannot be written: {}", errno == 0 ? "a write has failed" : std::strerror(errno));
}

int run_command_line(int argc, const char* const* argv) {
  exit_status = 0;
  CLI::App app{"sps: language models whose forward pass is split into a state and a prediction stream",
               "sps"};
  app.require_subcommand(1);
  bool quiet = false;
  app.add_flag("-q,--quiet", quiet, "Warnings and errors only");
  app.set_version_flag("--version", "sps " SPS_VERSION);
  app.parse_complete_callback([&quiet] { set_up_logging(quiet); });
  app.fallthrough();
  add_prepare(app);
  add_data(app);
  add_train(app);
  add_eval(app);
  add_generate(app);
  add_info(app);
  add_bench(app);
  add_report(app);
  add_tokenizer(app);
  add_convert(app);
  check_whole_numbers(&app);
  try {
    try {
      app.parse(argc, argv);
    } catch (const CLI::Success& e) {  // --help, --version
      exit_status = app.exit(e);
    }
    flush_output();
  } catch (const CLI::ParseError& e) {
    if (const auto words = app.remaining(); !words.empty() && app.get_subcommands().empty())
      return say("there is no command '" + words[0] + "' (see sps --help)", 2);
    return say(std::string(e.what()) + " (see sps --help)", 2);
  } catch (const Error& e) {
    return say(e.what(), e.exit_status());
  } catch (const std::bad_alloc&) {
    return say("out of memory", 1);
  } catch (const std::exception& e) {
    return say(e.what(), 1);
  }
  return exit_status;
}

}  // namespace sps
