#include "tokenizer/tokenizer.h"

#include "base/error.h"
#include "base/hash.h"

namespace sps {

void ByteTokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  const size_t before = ids.size();
  ids.resize(before + text.size());
  for (size_t i = 0; i < text.size(); ++i) ids[before + i] = static_cast<unsigned char>(text[i]);
}

std::string ByteTokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  text.reserve(ids.size());
  for (const int32_t id : ids)
    if (id >= 0 && id < 256) text += char(id);
  return text;
}

std::string ByteTokenizer::fingerprint() const {
  return hex(hash64("bytes 0-255, end of text 256"));
}

std::unique_ptr<Tokenizer> make_tokenizer(std::string_view name) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  usage_error("no tokenizer is called '{}'; known: bytes", name);
}

}  // namespace sps
