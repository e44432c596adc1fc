// The lines of a text, for small line-based files.
#pragma once

#include <cstdint>
#include <string_view>

namespace sps {

// Calls line(number, text) for every line that is not empty; numbers start at 1, a carriage return at the end
// of a line is not part of it.
template <class Line>
void for_each_line(std::string_view text, Line&& line) {
  int64_t number = 0;
  while (!text.empty()) {
    const size_t length = text.find('\n');
    std::string_view one = text.substr(0, length);
    text.remove_prefix(length == std::string_view::npos ? text.size() : length + 1);
    if (one.ends_with('\r')) one.remove_suffix(1);
    ++number;
    if (!one.empty()) line(number, one);
  }
}

}  // namespace sps
