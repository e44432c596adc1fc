// Stopping on request: Ctrl-C and `kill` ask long work to save what it has and to return.
#pragma once

#include <csignal>

namespace sps {

// From here on SIGINT and SIGTERM only set the returned flag to their number; it is 0 until then. A second
// one ends the process at once. The exit status of work that stopped for this is 128 + the number.
const volatile std::sig_atomic_t* catch_stop_signals();

}  // namespace sps
