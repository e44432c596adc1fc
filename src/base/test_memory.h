// For tests: the memory that something takes.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace sps {

// By how many bytes the largest memory of this process grows during a call beyond what it has before; 0 where
// the system does not tell, and with sanitizers, which keep freed memory.
template <class Call>
uint64_t memory_growth(Call&& call) {
  const auto field = [](const std::string& name) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
      if (line.starts_with(name)) return std::stoull(line.substr(name.size() + 1)) << 10;
    return 0ULL;
  };
  std::ofstream("/proc/self/clear_refs") << "5";  // forget the peak of earlier tests
  const uint64_t before = field("VmRSS");
  call();
  const uint64_t peak = field("VmHWM");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 0;
#endif
  return peak > before ? peak - before : 0;
}

}  // namespace sps
