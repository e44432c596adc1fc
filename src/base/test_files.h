// For tests: what a folder holds, to be compared with what another holds or with itself later.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "base/files.h"

namespace sps {

// Relative path -> content of every file, and "" for every folder (its name then ends in '/').
inline std::map<std::string, std::string> folder_content(const std::filesystem::path& folder) {
  namespace fs = std::filesystem;
  std::map<std::string, std::string> content;
  if (!fs::exists(folder)) return content;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = fs::relative(entry.path(), folder).string();
    if (entry.is_directory())
      content[name + "/"];
    else if (entry.is_regular_file())
      content[name] = read_text(entry.path());
  }
  return content;
}

}  // namespace sps
