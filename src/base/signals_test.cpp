#include "base/signals.h"

#include <gtest/gtest.h>

namespace sps {
namespace {

TEST(StopSignalsDeathTest, TheFirstSetsTheFlagTheSecondEndsTheProcess) {
  const auto raise_twice = [](int signal) {
    const auto* flag = catch_stop_signals();
    if (*flag != 0) std::_Exit(1);
    std::raise(signal);
    if (*flag != signal) std::_Exit(2);
    std::raise(signal);  // handled once more, and from then on no longer
    std::raise(signal);
    std::_Exit(3);
  };
  for (const int signal : {SIGINT, SIGTERM})
    EXPECT_EXIT(raise_twice(signal), testing::KilledBySignal(signal), "");
}

}  // namespace
}  // namespace sps
