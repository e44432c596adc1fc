#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "base/json.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little, "token files are read in place");

constexpr int kVersion = 1;
constexpr std::string_view kUnfinished = "unfinished";

fs::path meta_path(const fs::path& folder) {
  return folder / "meta.json";
}

// A member of a JSON object, checked and named in errors.
class Member {
 public:
  Member(const nlohmann::json& object, const char* key, std::string name, const fs::path& path)
      : name_(std::move(name)), path_(path) {
    const auto it = object.find(key);
    if (it == object.end()) fail("{}: the key '{}' is missing", path.string(), name_);
    value_ = &*it;
  }
  const nlohmann::json& object() const { return expect(value_->is_object(), "an object"); }
  std::string text() const { return expect(value_->is_string(), "a string").get<std::string>(); }
  uint64_t count() const {
    return expect(value_->is_number_unsigned(), "a whole number >= 0").get<uint64_t>();
  }
  double number() const { return expect(value_->is_number(), "a number").get<double>(); }
  int32_t id_count() const {
    return expect(value_->is_number_unsigned() && value_->get<uint64_t>() <= uint64_t(INT32_MAX),
                  "a whole number from 0 to 2147483647")
        .get<int32_t>();
  }
  std::vector<std::string> texts() const {
    const bool all = value_->is_array() &&
                     std::all_of(value_->begin(), value_->end(), [](const auto& v) { return v.is_string(); });
    return expect(all, "a list of strings").get<std::vector<std::string>>();
  }
  const nlohmann::json& expect(bool holds, std::string_view expected) const {
    if (!holds)
      fail("{}: '{}' should be {}, but it is {}", path_.string(), name_, expected, dump_json(*value_));
    return *value_;
  }

 private:
  std::string name_;
  const fs::path& path_;
  const nlohmann::json* value_;
};

SplitMeta split_from(const nlohmann::json& root, const char* split, const fs::path& path) {
  const auto& object = Member(root, split, split, path).object();
  const auto member = [&](const char* key) {
    return Member(object, key, fmt::format("{}.{}", split, key), path);
  };
  return {member("tokens").count(), member("documents").count(), member("hash").text(),
          object.contains("text_bytes") ? member("text_bytes").count() : 0};
}

nlohmann::ordered_json split_to(const SplitMeta& split) {
  return {{"tokens", split.tokens},
          {"documents", split.documents},
          {"text_bytes", split.text_bytes},
          {"hash", split.hash}};
}

// One of a few names; the value's place in `names` is its number.
constexpr std::string_view kFormats[] = {"sps", "raw", "llmc"}, kSplitBy[] = {"text", "id"};

template <class E, size_t n>
std::optional<E> named(std::string_view name, const std::string_view (&names)[n]) {
  for (size_t i = 0; i < n; ++i)
    if (names[i] == name) return E(i);
  return std::nullopt;
}

// llm.c's header: 256 int32, of which the first three are magic number, version and token count.
struct HeadedType {
  int32_t magic, version;
  TokenType type;
};
constexpr HeadedType kHeaded[] = {{20240520, 1, TokenType::u16}, {20240801, 7, TokenType::u32}};
constexpr uint64_t kHeaderBytes = 256 * sizeof(int32_t);

std::array<int32_t, 256> header_for(TokenType type, uint64_t tokens, const fs::path& path) {
  constexpr uint64_t most = std::numeric_limits<int32_t>::max();
  if (tokens > most)
    fail(
        "{}: {} tokens are to be written, but the header of llm.c can count to {}; prepare fewer documents "
        "at a "
        "time, or without --format llmc",
        path.string(), tokens, most);
  std::array<int32_t, 256> header{};
  for (const HeadedType& headed : kHeaded)
    if (headed.type == type) header[0] = headed.magic, header[1] = headed.version;
  header[2] = int32_t(tokens);
  return header;
}

template <class T>
uint32_t copy_ids(const std::byte* from, int64_t n, int32_t* out) {
  const T* ids = reinterpret_cast<const T*>(from);
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t id = ids[i];
    largest = std::max(largest, id);
    out[i] = int32_t(id);
  }
  return largest;
}

template <class T>
void pack(std::span<const int32_t> ids, std::byte* to) {
  for (size_t i = 0; i < ids.size(); ++i) {
    SPS_CHECK(ids[i] >= 0 && uint32_t(ids[i]) <= std::numeric_limits<T>::max());
    const T id = T(ids[i]);
    std::memcpy(to + i * sizeof(T), &id, sizeof(T));
  }
}

constexpr size_t kBufferBytes = size_t{1} << 20;

}  // namespace

std::string_view token_type_name(TokenType type) {
  return type == TokenType::u16 ? "uint16" : "uint32";
}

std::string_view token_format_name(TokenFormat format) {
  return kFormats[size_t(format)];
}
TokenFormat token_format(std::string_view name) {
  if (const auto format = named<TokenFormat>(name, kFormats)) return *format;
  usage_error("the format is '{}', but sps, raw or llmc is expected", name);
}
std::string_view split_by_name(SplitBy by) {
  return kSplitBy[size_t(by)];
}
SplitBy split_by(std::string_view name) {
  if (const auto by = named<SplitBy>(name, kSplitBy)) return *by;
  usage_error("documents are to be split by '{}', but text or id is expected", name);
}

// ---- meta.json

std::string TokenMeta::to_json() const {
  nlohmann::ordered_json root;
  root["version"] = kVersion;
  root["tokenizer"] = {
      {"name", tokenizer}, {"fingerprint", fingerprint}, {"vocab_size", vocab_size}, {"eot", eot}};
  root["dtype"] = token_type_name(type);
  root["format"] = token_format_name(format);
  root["train"] = split_to(train);
  root["val"] = split_to(val);
  root["seed"] = seed;
  root["val_fraction"] = val_fraction;
  root["split_by"] = split_by_name(split_by);
  root["text_field"] = text_field;
  root["id_field"] = id_field;
  root["empty_documents"] = empty_documents;
  root["inputs"] = inputs;
  root["files"] = nlohmann::ordered_json::array();
  for (const InputMeta& file : files) root["files"].push_back({{"path", file.path}, {"bytes", file.bytes}});
  return root.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

TokenMeta TokenMeta::from_json(std::string_view text, const fs::path& path) {
  const nlohmann::json root = parse_json(text, path.string());
  if (!root.is_object())
    fail("{}: a JSON object is expected, but there is a JSON {}", path.string(), root.type_name());
  if (root.contains(kUnfinished))
    fail("{}: this data set is unfinished, its preparation was interrupted; run it again", path.string());
  const auto member = [&](const char* key) { return Member(root, key, key, path); };
  const uint64_t version = member("version").count();
  if (version != kVersion)
    fail("{}: version {} of the format is not known, {} is expected", path.string(), version, kVersion);

  TokenMeta meta;
  const auto& tokenizer = member("tokenizer").object();
  const auto of_tokenizer = [&](const char* key) {
    return Member(tokenizer, key, fmt::format("tokenizer.{}", key), path);
  };
  meta.tokenizer = of_tokenizer("name").text();
  meta.fingerprint = of_tokenizer("fingerprint").text();
  meta.vocab_size = of_tokenizer("vocab_size").id_count();
  meta.eot = of_tokenizer("eot").id_count();
  of_tokenizer("eot").expect(meta.eot < meta.vocab_size, fmt::format("below vocab_size {}", meta.vocab_size));
  const std::string dtype = member("dtype").text();
  member("dtype").expect(dtype == "uint16" || dtype == "uint32", "\"uint16\" or \"uint32\"");
  meta.type = dtype == "uint16" ? TokenType::u16 : TokenType::u32;
  meta.train = split_from(root, "train", path);
  meta.val = split_from(root, "val", path);
  meta.seed = member("seed").count();
  meta.val_fraction = member("val_fraction").number();
  meta.text_field = member("text_field").text();
  meta.inputs = member("inputs").texts();
  // Newer keys.
  if (root.contains("format")) {
    const auto format = named<TokenFormat>(member("format").text(), kFormats);
    member("format").expect(format.has_value(), R"("sps", "raw" or "llmc")");
    meta.format = *format;
  }
  if (root.contains("split_by")) {
    const auto by = named<SplitBy>(member("split_by").text(), kSplitBy);
    member("split_by").expect(by.has_value(), R"("text" or "id")");
    meta.split_by = *by;
  }
  if (root.contains("id_field")) meta.id_field = member("id_field").text();
  if (root.contains("empty_documents")) meta.empty_documents = member("empty_documents").count();
  if (root.contains("files")) {
    const auto& files = member("files").expect(root["files"].is_array(), "a list");
    for (const auto& entry : files) {
      if (!entry.is_object()) member("files").expect(false, "a list of objects");
      meta.files.push_back({Member(entry, "path", "files.path", path).text(),
                            Member(entry, "bytes", "files.bytes", path).count()});
    }
  }
  return meta;
}

std::optional<TokenMeta> read_token_meta(const fs::path& folder) {
  const fs::path path = meta_path(folder);
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  return TokenMeta::from_json(read_text(path), path);
}

void write_token_meta(const fs::path& folder, const TokenMeta& meta) {
  write_atomically(meta_path(folder), meta.to_json());
}

void mark_unfinished(const fs::path& folder) {
  write_atomically(meta_path(folder), dump_json(nlohmann::json{{kUnfinished, true}}) + "\n");
}

bool is_marked_unfinished(const fs::path& folder) {
  const fs::path path = meta_path(folder);
  std::error_code error;
  if (!fs::exists(path, error)) return false;
  const nlohmann::json root = parse_json(read_text(path), path.string());
  return root.is_object() && root.contains(kUnfinished);
}

// ---- TokenFile

TokenFile TokenFile::open(const fs::path& folder_or_file, std::string_view split) {
  TokenFile file;
  std::error_code error;
  const bool folder = fs::is_directory(folder_or_file, error);
  file.path_ = folder ? folder_or_file / fmt::format("{}.bin", split) : folder_or_file;
  const std::string name = file.path_.filename().string();
  const bool described = name == "train.bin" || name == "val.bin";
  if (described) {
    const fs::path parent = file.path_.parent_path();
    file.meta_ = read_token_meta(parent.empty() ? "." : parent);
  }
  if (!fs::exists(file.path_, error))
    fail("there is no token file {}{}", file.path_.string(),
         folder || described ? "; `sps prepare` writes it" : "");
  file.file_ = MappedFile(file.path_);
  file.data_ = file.file_.bytes().data();
  uint64_t bytes = file.file_.bytes().size();
  if (file.meta_) file.type_ = file.meta_->type;

  bool headed = false;
  if ((!file.meta_ || file.meta_->format == TokenFormat::llmc) && bytes >= kHeaderBytes) {
    int32_t head[3];
    std::memcpy(head, file.data_, sizeof head);
    for (const HeadedType& type : kHeaded) {
      if (head[0] != type.magic || head[1] != type.version) continue;
      if (file.meta_ && file.meta_->type != type.type)
        fail("{}: its header says tokens of {} bytes, but meta.json says {}", file.path_.string(),
             int(type.type), int(file.meta_->type));
      headed = true;
      file.type_ = type.type;
      file.data_ += kHeaderBytes;
      bytes -= kHeaderBytes;
      if (head[2] < 0 || bytes != uint64_t(head[2]) * uint64_t(file.type_))
        fail("{}: its header says {} tokens of {} bytes, but {} bytes follow", file.path_.string(), head[2],
             int(file.type_), bytes);
    }
  }
  if (file.meta_) {
    if (file.meta_->format == TokenFormat::llmc && !headed)
      fail("{}: meta.json says that the header of llm.c comes first, but it does not", file.path_.string());
    const SplitMeta& described_split = name == "train.bin" ? file.meta_->train : file.meta_->val;
    file.vocab_size_ = file.meta_->vocab_size;
    file.expected_hash_ = described_split.hash;
    const uint64_t width = uint64_t(file.type_);
    if (bytes % width != 0 || bytes / width != described_split.tokens)
      fail("{}: has {} bytes{}, but meta.json says {} tokens of {} bytes", file.path_.string(), bytes,
           headed ? " behind its header" : "", described_split.tokens, width);
  }
  if (bytes % uint64_t(file.type_) != 0)
    fail("{}: has {} bytes, but a whole number of {}-byte tokens is expected", file.path_.string(), bytes,
         int(file.type_));
  file.size_ = int64_t(bytes / uint64_t(file.type_));
  return file;
}

void TokenFile::read(int64_t begin, int64_t n, int32_t* out) const {
  SPS_CHECK(begin >= 0 && n >= 0 && begin <= size_ && n <= size_ - begin);
  const std::byte* from = data_ + begin * int64_t(type_);
  const uint32_t largest =
      type_ == TokenType::u16 ? copy_ids<uint16_t>(from, n, out) : copy_ids<uint32_t>(from, n, out);
  const uint32_t limit = uint32_t(vocab_size_ > 0 ? vocab_size_ : std::numeric_limits<int32_t>::max());
  if (n == 0 || largest < limit) return;
  for (int64_t i = 0; i < n; ++i)
    if (uint32_t(out[i]) >= limit)
      fail("{}: token {} is {}, but the vocabulary has {} ids", path_.string(), begin + i, uint32_t(out[i]),
           limit);
}

void TokenFile::verify() const {
  constexpr int64_t kPiece = 1 << 16;
  std::vector<int32_t> ids(kPiece);
  Hasher hasher;
  for (int64_t begin = 0; begin < size_; begin += kPiece) {
    const int64_t n = std::min(kPiece, size_ - begin);
    read(begin, n, ids.data());
    hasher.update(data_ + begin * int64_t(type_), size_t(n) * size_t(type_));
  }
  const std::string hash = hex(hasher.digest());
  if (!expected_hash_.empty() && hash != expected_hash_)
    fail("{}: its content has the hash {}, but meta.json says {}", path_.string(), hash, expected_hash_);
}

// ---- writing

void pack_tokens(std::span<const int32_t> ids, TokenType type, std::vector<std::byte>& out) {
  const size_t before = out.size();
  out.resize(before + ids.size() * size_t(type));
  if (type == TokenType::u16)
    pack<uint16_t>(ids, out.data() + before);
  else
    pack<uint32_t>(ids, out.data() + before);
}

TokenWriter::TokenWriter(const fs::path& path, TokenType type, uint64_t llmc_tokens)
    : file_(path), type_(type), announced_(llmc_tokens) {
  const auto header = header_for(type, llmc_tokens, path);
  file_.write(header.data(), sizeof header);
}

void TokenWriter::append(std::span<const int32_t> ids) {
  const size_t before = buffer_.size();
  pack_tokens(ids, type_, buffer_);
  hasher_.update(buffer_.data() + before, buffer_.size() - before);
  tokens_ += ids.size();
  if (buffer_.size() >= kBufferBytes) flush();
}

void TokenWriter::append_bytes(std::span<const std::byte> tokens) {
  SPS_CHECK(tokens.size() % size_t(type_) == 0);
  hasher_.update(tokens.data(), tokens.size());
  tokens_ += tokens.size() / size_t(type_);
  if (buffer_.size() + tokens.size() >= kBufferBytes) {
    flush();
    file_.write(tokens.data(), tokens.size());
  } else {
    buffer_.insert(buffer_.end(), tokens.begin(), tokens.end());
  }
}

void TokenWriter::flush() {
  file_.write(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void TokenWriter::commit() {
  SPS_CHECK(!announced_ || *announced_ == tokens_);
  flush();
  file_.commit();
}

}  // namespace sps
