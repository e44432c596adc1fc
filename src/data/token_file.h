// Token files: the ids of a corpus, ready to train on (docs/formats/token-files.md).
//
//   DIR/train.bin, DIR/val.bin   little-endian uint16 or uint32, nothing else
//   DIR/tokenizer.json           the tokenizer, unless it is "bytes"
//   DIR/meta.json                what they hold; written last, so a folder with a complete one is complete
//
// Where meta.json says so, a .bin starts with the header of llm.c.
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

// How a .bin is laid out: ids alone, of 2 or 4 bytes; the same, never of 4 bytes; or after llm.c's header.
enum class TokenFormat : uint8_t { sps, raw, llmc };
std::string_view token_format_name(TokenFormat format);  // "sps", "raw", "llmc"
TokenFormat token_format(std::string_view name);         // a usage error for another name

// The documents' own key that decides their split: their text or their id.
enum class SplitBy : uint8_t { text, id };
std::string_view split_by_name(SplitBy by);  // "text", "id"
SplitBy split_by(std::string_view name);     // a usage error for another name

struct SplitMeta {
  uint64_t tokens = 0, documents = 0;
  std::string hash;         // XXH3 of the tokens' bytes, 16 hexadecimal digits
  uint64_t text_bytes = 0;  // that the tokens stand for; 0 in files of before this was recorded
  bool operator==(const SplitMeta&) const = default;
};

struct InputMeta {
  std::string path;
  uint64_t bytes = 0;
  bool operator==(const InputMeta&) const = default;
};

struct TokenMeta {
  std::string tokenizer, fingerprint;
  int32_t vocab_size = 0, eot = 0;
  TokenType type = TokenType::u16;
  TokenFormat format = TokenFormat::sps;
  SplitMeta train, val;
  uint64_t seed = 0;
  double val_fraction = 0;
  SplitBy split_by = SplitBy::text;
  std::string text_field, id_field = "id";
  uint64_t empty_documents = 0;  // left out
  std::vector<std::string> inputs;
  std::vector<InputMeta> files;  // that the inputs stood for, in the order of reading
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
  // With llm.c's header, which says before the first token how many will follow: commit() wants that many. An
  // error for more than the header can say, 2^31 - 1.
  TokenWriter(const std::filesystem::path& path, TokenType type, uint64_t llmc_tokens);
  void append(std::span<const int32_t> ids);             // each must fit the type
  void append_bytes(std::span<const std::byte> tokens);  // already in the file's type
  uint64_t tokens() const { return tokens_; }
  std::string hash() const { return hex(hasher_.digest()); }
  void flush();  // what is buffered, so that commit() has little left that can fail
  void commit();

 private:
  AtomicFile file_;
  TokenType type_;
  uint64_t tokens_ = 0;
  std::optional<uint64_t> announced_;  // by the header
  Hasher hasher_;
  std::vector<std::byte> buffer_;
};

// Packs ids into the file's type, appending to `out`.
void pack_tokens(std::span<const int32_t> ids, TokenType type, std::vector<std::byte>& out);

}  // namespace sps
