#include "data/data_tokenizer.h"

#include "base/error.h"

namespace sps {
namespace fs = std::filesystem;

std::unique_ptr<Tokenizer> data_set_tokenizer(const fs::path& folder, const TokenMeta& meta) {
  const fs::path path = folder / kDataTokenizerFile;
  const std::string bytes = ByteTokenizer().name();
  const std::string source = meta.tokenizer == bytes ? bytes : path.string();
  std::error_code error;
  if (source != bytes && !fs::exists(path, error)) return nullptr;
  auto tokenizer = make_tokenizer(source);
  if (tokenizer->fingerprint() != meta.fingerprint)
    fail("{} was made by the tokenizer {} with the fingerprint {}, but {} has {}", folder.string(),
         meta.tokenizer, meta.fingerprint, source, tokenizer->fingerprint());
  return tokenizer;
}

}  // namespace sps
