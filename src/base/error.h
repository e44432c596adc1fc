// Errors. Users cause `Error`s (a bad file, flag or key): one sentence that names the thing, the value found and
// what was expected. Our own mistakes are SPS_CHECKs (check.h).
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/error.h"

namespace sps {

enum class ErrorKind { usage, failure };  // exit status 2, exit status 1

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& sentence) : std::runtime_error(sentence), kind_(kind) {}
  ErrorKind kind() const { return kind_; }
  int exit_status() const { return kind_ == ErrorKind::usage ? 2 : 1; }

 private:
  ErrorKind kind_;
};

// The program was asked for correctly but could not do it (exit status 1).
template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::failure, fmt::format(format, std::forward<Args>(args)...));
}

// The program was asked for something wrong: unknown key, bad value (exit status 2).
template <class... Args>
[[noreturn]] void usage_error(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::usage, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace sps
