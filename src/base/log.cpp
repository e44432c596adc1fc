#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <unistd.h>

namespace sps {

void set_up_logging(bool quiet) {
  auto logger = std::make_shared<spdlog::logger>("sps", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%v");
  logger->set_level(quiet ? spdlog::level::warn : spdlog::level::info);
  spdlog::set_default_logger(logger);
}

bool stderr_is_terminal() { return isatty(STDERR_FILENO) == 1; }

}  // namespace sps
