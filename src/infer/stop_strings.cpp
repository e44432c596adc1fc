#include "infer/stop_strings.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace sps {

StopStrings::StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {
  for (const std::string& s : strings_)
    if (s.empty()) usage_error("a stop string is empty: expected at least one byte");
}

std::string StopStrings::feed(std::string_view bytes) {
  if (stopped_) return "";
  held_ += bytes;
  size_t first = std::string::npos;
  for (const std::string& s : strings_) first = std::min(first, held_.find(s));
  if (first != std::string::npos) {
    stopped_ = true;
    held_.resize(first);
    return std::exchange(held_, "");
  }
  // The longest end of the text that begins a stop string.
  size_t keep = 0;
  for (const std::string& s : strings_)
    for (size_t n = std::min(s.size() - 1, held_.size()); n > keep; --n)
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(s).substr(0, n)) keep = n;
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopStrings::flush() {
  return std::exchange(held_, "");
}

}  // namespace sps
