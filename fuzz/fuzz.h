// What the fuzzers share. Each gives the bytes that libFuzzer makes to one reader of the program. The reader
// may take them or throw Error; anything else ends the fuzzer: another exception, a signal, a sanitizer's
// report, a failed SPS_CHECK, 10 seconds, or more memory than scripts/fuzz.sh allows.
#pragma once

#include <stdlib.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/log.h"

namespace sps::fuzz {

// A fuzzer's own lines are the only ones.
inline const bool kQuiet = (spdlog::set_level(spdlog::level::off), true);

// Stands between the parts of an input that is several texts; in fuzz/dictionary too.
inline constexpr std::string_view kBorder = "\n%%%%\n";

// An input from the front: single bytes that choose, then texts.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  // A number below n.
  size_t choose(size_t n) {
    if (rest_.empty()) return 0;
    const size_t chosen = uint8_t(rest_[0]) % n;
    rest_.remove_prefix(1);
    return chosen;
  }
  // What comes before the next border.
  std::string_view part() {
    const size_t end = rest_.find(kBorder);
    const std::string_view part = rest_.substr(0, end);
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + kBorder.size());
    return part;
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

// Whether the call came back; false if it threw Error.
template <class Call>
bool accepts(Call&& call) {
  try {
    call();
    return true;
  } catch (const Error&) {
    return false;
  }
}

// For what the program itself has written: there an Error is a finding too.
template <class Call>
void must_accept(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    std::fputs(e.what(), stderr);
    SPS_CHECK(!"no error is expected here");
  }
}

// A folder of this process for readers of files, in TMPDIR; removed when the process ends well.
class Scratch {
 public:
  Scratch() {
    std::string pattern = (std::filesystem::temp_directory_path() / "sps-fuzz-XXXXXX").string();
    SPS_CHECK(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(std::string_view name, std::string_view content) const {
    const std::filesystem::path file = path_ / name;
    std::ofstream out(file, std::ios::binary);
    out.write(content.data(), std::streamsize(content.size()));
    SPS_CHECK(out.good());
    return file;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace sps::fuzz
