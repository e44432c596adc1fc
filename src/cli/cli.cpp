#include "cli/cli.h"

#include <cstdio>
#include <exception>

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

}  // namespace

void set_exit_status(int status) {
  exit_status = status;
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
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
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
