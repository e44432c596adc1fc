// Ids one at a time to text that can be shown at once: only whole UTF-8 sequences come out, so a terminal or
// a reader of a stream never sees part of a character. What can no longer become UTF-8 comes out as U+FFFD,
// one for each piece that begins a character and is not continued.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "tokenizer/tokenizer.h"

namespace sps {

class StreamDecoder {
 public:
  // The tokenizer must outlive it. `previous` is the id before the first one; -1: there is none.
  explicit StreamDecoder(const Tokenizer& tokenizer, int32_t previous = -1)
      : tokenizer_(&tokenizer), previous_(previous) {}

  std::string feed(int32_t id) { return feed(tokenizer_->text_of(id, std::exchange(previous_, id))); }
  std::string feed(std::string_view bytes);
  std::string flush();  // what is held back is not continued

 private:
  const Tokenizer* tokenizer_;
  int32_t previous_;
  std::string held_;  // the beginning of a character, at most 3 bytes
};

}  // namespace sps
