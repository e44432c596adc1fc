// Messages for people go to standard error through spdlog, results to standard output.
#pragma once

#include <spdlog/spdlog.h>

namespace sps {

void set_up_logging(bool quiet);  // plain "message" lines on stderr; quiet: warnings and errors only
bool stderr_is_terminal();

}  // namespace sps
