// Token files: the ids of a corpus, ready to train on (docs/formats/token-files.md).
//
//   DIR/train.bin, DIR/val.bin   little-endian uint16 or uint32, nothing else
//   DIR/meta.json                what they hold; written last, so a folder with a complete one is complete
//
// Without meta.json a .bin is taken for uint16, unless it starts with the header of llm.c.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "base/hash.h"

namespace sps {

enum class TokenType : uint8_t { u16 = 2, u32 = 4 };  // value: bytes of a token
std::string_view token_type_name(TokenType type);     // "uint16", "uint32"
inline TokenType token_type_for(int64_t vocab_size) {
  return vocab_size <= 65536 ? TokenType::u16 : TokenType::u32;
}

struct SplitMeta {
  uint64_t tokens = 0, documents = 0;
  std::string hash;  // XXH3 of the file's bytes, 16 hexadecimal digits
  bool operator==(const SplitMeta&) const = default;
};

struct TokenMeta {
  std::string tokenizer, fingerprint;
  int32_t vocab_size = 0, eot = 0;
  TokenType type = TokenType::u16;
  SplitMeta train, val;
  uint64_t seed = 0;
  double val_fraction = 0;
  std::string text_field;
  std::vector<std::string> inputs;
  bool operator==(const TokenMeta&) const = default;

  std::string to_json() const;
  // Errors name `path`, the key, what it holds and what is expected.
  static TokenMeta from_json(std::string_view json, const std::filesystem::path& path);
};

// The data set's description, or nothing if DIR has none. An error if it is damaged or marked as unfinished.
std::optional<TokenMeta> read_token_meta(const std::filesystem::path& folder);
void write_token_meta(const std::filesystem::path& folder, const TokenMeta& meta);
// Makes readers refuse the folder until write_token_meta: its files are being replaced one by one.
void mark_unfinished(const std::filesystem::path& folder);
bool is_marked_unfinished(const std::filesystem::path& folder);

// A memory-mapped token file. Any number of threads may read one at the same time.
class TokenFile {
 public:
  // A data set's folder and the split ("train", "val"), or a .bin file itself. The size is checked against
  // meta.json, which describes only the train.bin and val.bin beside it.
  static TokenFile open(const std::filesystem::path& folder_or_file, std::string_view split = "train");

  int64_t size() const { return size_; }
  int32_t token(int64_t i) const {
    int32_t id;
    read(i, 1, &id);
    return id;
  }
  // Ids [begin, begin + n), which must be inside the file; an error if one is not below the vocabulary size.
  void read(int64_t begin, int64_t n, int32_t* out) const;
  // Reads everything: all ids are below the vocabulary size, and the hash is the one of meta.json, if there
  // is one.
  void verify() const;

  // The vocabulary that read() checks against: from meta.json, or from the model for files that have none.
  int64_t vocab_size() const { return vocab_size_; }
  void set_vocab_size(int64_t vocab_size) { vocab_size_ = vocab_size; }

  TokenType type() const { return type_; }
  const std::optional<TokenMeta>& meta() const { return meta_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::optional<TokenMeta> meta_;
  std::string expected_hash_;
  MappedFile file_;
  const std::byte* data_ = nullptr;
  int64_t size_ = 0, vocab_size_ = 0;
  TokenType type_ = TokenType::u16;
};

// Writes one token file; nothing remains without commit().
class TokenWriter {
 public:
  TokenWriter(const std::filesystem::path& path, TokenType type) : file_(path), type_(type) {}
  void append(std::span<const int32_t> ids);             // each must fit the type
  void append_bytes(std::span<const std::byte> tokens);  // already in the file's type
  uint64_t tokens() const { return (file_.written() + buffer_.size()) / uint64_t(type_); }
  std::string hash() const { return hex(hasher_.digest()); }
  void flush();  // what is buffered, so that commit() has little left that can fail
  void commit();

 private:
  AtomicFile file_;
  TokenType type_;
  Hasher hasher_;
  std::vector<std::byte> buffer_;
};

// Packs ids into the file's type, appending to `out`.
void pack_tokens(std::span<const int32_t> ids, TokenType type, std::vector<std::byte>& out);

}  // namespace sps
