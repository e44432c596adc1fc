#include "tokenizer/stream_decoder.h"

#include "tokenizer/utf8.h"

namespace sps {

namespace {
constexpr std::string_view kReplacement = "\uFFFD";
}

std::string StreamDecoder::feed(std::string_view bytes) {
  held_ += bytes;
  std::string text;
  const char* p = held_.data();
  const char* const end = p + held_.size();
  while (p != end) {
    const Utf8Char c = read_utf8(p, end);
    if (c.state == Utf8::incomplete) break;
    if (c.state == Utf8::valid)
      text.append(p, size_t(c.length));
    else
      text += kReplacement;
    p += c.length;
  }
  held_.erase(0, size_t(p - held_.data()));
  return text;
}

std::string StreamDecoder::flush() {
  if (held_.empty()) return "";
  held_.clear();
  return std::string(kReplacement);
}

}  // namespace sps
