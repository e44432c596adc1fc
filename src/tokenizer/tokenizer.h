// Tokenizers: text to ids and back. A tokenizer is immutable: any number of threads may use one at the same
// time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sps {

// What encode() does with text that spells a special token, such as "<|endoftext|>". Documents are plain:
// their text cannot put a border between documents. Prompts may name special tokens.
enum class SpecialText : uint8_t { plain, parsed };

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;
  virtual int32_t vocab_size() const = 0;  // every id is in [0, vocab_size)
  virtual int32_t eot() const = 0;  // end of text: stands after each document, never comes out of encode()
  // The id that models of this tokenizer read before every text; -1: none. Where it is eot(), one id does
  // both. It never comes out of encode() either.
  virtual int32_t bos() const { return -1; }
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;  // appends; plain
  virtual void encode(std::string_view text, std::vector<int32_t>& ids, SpecialText special) const = 0;
  // The ids of encode(text), plain, some thousands at a time: for texts whose ids should not all be in
  // memory.
  virtual void encode_in_parts(std::string_view text,
                               const std::function<void(std::span<const int32_t>)>& take) const = 0;
  // The bytes an id stands for; none for special ids and for numbers that are no id. Lives as long as the
  // tokenizer.
  virtual std::string_view token_bytes(int32_t id) const = 0;
  // The same where `previous` stands before the id; -1: nothing does. Some vocabularies begin every text with
  // a space that is not in it.
  virtual std::string_view text_of(int32_t id, int32_t /*previous*/) const { return token_bytes(id); }
  std::string decode(std::span<const int32_t> ids) const;  // the text that they are alone
  virtual std::string fingerprint() const = 0;             // equal exactly when all texts give equal ids
  virtual std::string to_json() const { return ""; }       // as a tokenizer.json; empty: it needs no file
};

// Ids 0..255 are the bytes themselves, 256 is end of text. No text spells a special token.
class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  int32_t vocab_size() const override { return 257; }
  int32_t eot() const override { return 256; }
  void encode(std::string_view text, std::vector<int32_t>& ids) const override;
  void encode(std::string_view text, std::vector<int32_t>& ids, SpecialText) const override {
    encode(text, ids);
  }
  void encode_in_parts(std::string_view text,
                       const std::function<void(std::span<const int32_t>)>& take) const override;
  std::string_view token_bytes(int32_t id) const override;
  std::string fingerprint() const override;
};

struct TokenizerOptions {
  // The added token that ends a text, by its text or by its id. Neither: the token that the file itself
  // notes; the first that is there of <|endoftext|>, <|end_of_text|>, <|im_end|>, </s>; or the one that a
  // tokenizer_config.json, special_tokens_map.json or generation_config.json beside the file names
  // (docs/formats/tokenizer.md).
  std::string eot{};
  int32_t eot_id = -1;
  // The pre-tokenizer's pattern, for files that do not say it: GPT-2's two files (empty: GPT-2's) and rank
  // files.
  std::string pattern{};
};

// "bytes", or by its files a byte-level BPE:
//   a tokenizer.json of Hugging Face;
//   encoder.json or vocab.json, with vocab.bpe or merges.txt beside it;
//   a rank file of tiktoken;
// or a BPE whose pieces have scores (score_bpe.h):
//   a .bin of llama2.c, a .model of sentencepiece, or the tokenizer.json that we write of one;
// or a folder with one of these sets (of the .bin only tokenizer.bin).
// Usage error if nothing of the kind is there; Error if a file is not what it should be.
std::unique_ptr<Tokenizer> make_tokenizer(std::string_view name_or_path,
                                          const TokenizerOptions& options = {});

}  // namespace sps
