#include "base/signals.h"

namespace sps {

namespace {

volatile std::sig_atomic_t stop_signal = 0;

void on_signal(int signal) {
  if (stop_signal != 0) std::signal(signal, SIG_DFL);
  stop_signal = signal;
}

}  // namespace

const volatile std::sig_atomic_t* catch_stop_signals() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  return &stop_signal;
}

}  // namespace sps
