// For tests: a folder of their own that disappears with the object.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "base/error.h"

namespace sps {

class TestDir {
 public:
  TestDir() {
    std::string pattern = testing::TempDir() + "sps-test-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) fail("cannot create a test folder like {}", pattern);
    path_ = pattern;
  }
  ~TestDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestDir(const TestDir&) = delete;
  TestDir& operator=(const TestDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

  // Writes a file below the folder, creating the folders in between.
  std::filesystem::path write(std::string_view name, std::string_view content) const {
    std::filesystem::path file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary).write(content.data(), std::streamsize(content.size()));
    return file;
  }

  // Everything below the folder, hidden files too.
  size_t count_entries() const {
    size_t n = 0;
    for (auto it = std::filesystem::recursive_directory_iterator(path_); it != end(it); ++it) ++n;
    return n;
  }

 private:
  std::filesystem::path path_;
};

// The sentence of the sps::Error that `call` throws; empty (and a failed test) if it throws none.
template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

// For EXPECT_PRED2(mentions, error_of(...), "the thing"), which shows the sentence when it does not.
inline bool mentions(const std::string& sentence, const std::string& thing) {
  return sentence.find(thing) != std::string::npos;
}

}  // namespace sps
