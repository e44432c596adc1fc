// Strings that end a text: it is cut before the first of them. They are looked for in bytes, wherever the
// borders of tokens lie, so text that may be the beginning of one is held back until it is known not to be.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sps {

class StopStrings {
 public:
  // Usage error for an empty string, which every text holds.
  explicit StopStrings(std::vector<std::string> strings);

  // Takes more of the text and returns what can be shown now. After a stop string nothing is.
  std::string feed(std::string_view bytes);
  bool stopped() const { return stopped_; }
  std::string flush();  // the text ends here: what was held back

 private:
  std::vector<std::string> strings_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace sps
