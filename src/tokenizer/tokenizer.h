// Tokenizers: text to ids and back. A tokenizer is immutable: any number of threads may use one at the same
// time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sps {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;
  virtual int32_t vocab_size() const = 0;  // every id is in [0, vocab_size)
  virtual int32_t eot() const = 0;  // end of text: stands after each document, never comes out of encode()
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;  // appends
  virtual std::string decode(std::span<const int32_t> ids) const = 0;  // bytes; special ids give none
  virtual std::string fingerprint() const = 0;  // equal exactly when all texts give equal ids
};

// Ids 0..255 are the bytes themselves, 256 is end of text.
class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  int32_t vocab_size() const override { return 257; }
  int32_t eot() const override { return 256; }
  void encode(std::string_view text, std::vector<int32_t>& ids) const override;
  std::string decode(std::span<const int32_t> ids) const override;
  std::string fingerprint() const override;
};

// By name: "bytes". A usage error for any other.
std::unique_ptr<Tokenizer> make_tokenizer(std::string_view name);

}  // namespace sps
