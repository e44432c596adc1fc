#include "data/documents.h"

#include <glob.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr const char* kExtensions[] = {".txt", ".rst", ".md", ".jsonl"};

std::string lower_extension(const fs::path& path) {
  std::string extension = path.extension().string();
  for (char& c : extension)
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
  return extension;
}

bool known_extension(const fs::path& path) {
  return std::find(std::begin(kExtensions), std::end(kExtensions), lower_extension(path)) !=
         std::end(kExtensions);
}

// The known files below a folder, sorted by the bytes of their relative paths.
std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error, dangling;
  fs::recursive_directory_iterator entry(folder, error);
  while (!error && entry != fs::recursive_directory_iterator()) {
    const fs::path& path = entry->path();
    if (path.filename().string().starts_with('.'))
      entry.disable_recursion_pending();
    else if (known_extension(path) && entry->is_regular_file(dangling))
      found.push_back(path.lexically_relative(folder));
    entry.increment(error);
  }
  if (error) fail("cannot read the folder {}: {}", folder.string(), error.message());
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.native() < b.native(); });
  return found;
}

std::vector<std::string> matches(const std::string& pattern) {
  glob_t result{};
  const int status = ::glob(pattern.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &result);
  std::vector<std::string> paths(result.gl_pathv, result.gl_pathv + result.gl_pathc);
  ::globfree(&result);
  if (status != 0 && status != GLOB_NOMATCH) fail("cannot read the folders of the pattern {}", pattern);
  std::sort(paths.begin(), paths.end());  // by bytes: glob's own order depends on the locale
  return paths;
}

// Packed files would otherwise become one long document of noise.
void refuse_packed(const fs::path& path, std::string_view head) {
  const std::pair<std::string_view, const char*> packed[] = {{"\x1F\x8B", "gzip"},
                                                             {"\x28\xB5\x2F\xFD", "zstd"},
                                                             {"PK\x03\x04", "zip"},
                                                             {"BZh", "bzip2"},
                                                             {"\xFD"
                                                              "7zXZ",
                                                              "xz"},
                                                             {"PAR1", "Parquet"}};
  for (const auto& [magic, name] : packed)
    if (head.starts_with(magic))
      fail("{} is a {} file, but plain text or .jsonl is expected: unpack it first", path.string(), name);
}

bool blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos;
}

}  // namespace

DocumentReader::DocumentReader(const std::vector<std::string>& inputs, std::string text_field)
    : text_field_(std::move(text_field)) {
  if (inputs.empty()) usage_error("no input is given: name files, folders or patterns");
  for (const std::string& input : inputs) {
    std::error_code error;
    if (fs::exists(input, error)) {  // first: a file may have a star in its name
      add_input(input);
      continue;
    }
    const auto paths = matches(input);
    if (paths.empty()) {
      if (input.find_first_of("*?[") != std::string::npos) fail("no file matches the pattern {}", input);
      fail("there is no file or folder {}", input);
    }
    for (const std::string& path : paths) add_input(path);
  }
}

void DocumentReader::add_input(const std::string& input) {
  const fs::path path(input);
  std::error_code error;
  if (!fs::is_directory(path, error)) return add_file(path, input);
  const auto found = files_below(path);
  if (found.empty()) fail("the folder {} holds no .txt, .rst, .md or .jsonl file", input);
  for (const fs::path& file : found) add_file(path / file, file.string());
}

void DocumentReader::add_file(const fs::path& path, const std::string& id) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) fail("{} is neither a regular file nor a folder", path.string());
  const fs::path canonical = fs::canonical(path, error);
  if (!error && !seen_.insert(canonical.native()).second) return;
  const uint64_t size = fs::file_size(path, error);
  if (error) fail("cannot read {}: {}", path.string(), error.message());
  total_bytes_ += size;
  files_.push_back({path, id, lower_extension(path) == ".jsonl"});
}

bool DocumentReader::next(Document& document) {
  for (RawDocument raw; next_raw(raw); ++empty_) {
    parse(raw, document);
    if (!document.text.empty()) return true;
  }
  return false;
}

bool DocumentReader::next_raw(RawDocument& raw) {
  while (current_ < files_.size()) {
    const File& file = files_[current_];
    if (file.json_lines) {
      if (next_line(raw)) return true;
      ++current_;
      continue;
    }
    raw.bytes = read_text(file.path);
    raw.id = file.id;
    raw.place.clear();
    bytes_read_ += raw.bytes.size();
    refuse_packed(file.path, raw.bytes);
    if (raw.bytes.starts_with(kByteOrderMark)) raw.bytes.erase(0, kByteOrderMark.size());
    ++current_;
    return true;
  }
  return false;
}

bool DocumentReader::next_line(RawDocument& raw) {
  const File& file = files_[current_];
  if (!stream_.is_open()) {
    stream_.open(file.path, std::ios::binary);
    if (!stream_) fail("cannot open {}", file.path.string());
    line_ = 0;
  }
  while (std::getline(stream_, raw.bytes)) {
    ++line_;
    bytes_read_ += raw.bytes.size() + (stream_.eof() ? 0 : 1);
    if (line_ == 1) {
      refuse_packed(file.path, raw.bytes);
      if (raw.bytes.starts_with(kByteOrderMark)) raw.bytes.erase(0, kByteOrderMark.size());
    }
    if (blank(raw.bytes)) continue;
    raw.id = fmt::format("{}:{}", file.id, line_);
    raw.place = fmt::format("{}:{}", file.path.string(), line_);
    return true;
  }
  if (stream_.bad()) fail("cannot read {} after line {}", file.path.string(), line_);
  stream_.close();
  stream_.clear();
  return false;
}

void DocumentReader::parse(RawDocument& raw, Document& document) const {
  document.id = raw.id;
  const std::string& place = raw.place;
  if (place.empty()) {
    document.text.swap(raw.bytes);
    return;
  }
  nlohmann::json record = parse_json(raw.bytes, place);
  if (!record.is_object())
    fail("{}: a JSON object is expected, but there is a JSON {}", place, record.type_name());
  const auto text = record.find(text_field_);
  if (text == record.end()) {
    std::string names;
    for (const auto& [name, value] : record.items()) names += (names.empty() ? "" : ", ") + name;
    fail("{}: the object has no field '{}' (its fields: {}); name the text's field with --text-field", place,
         text_field_, names.empty() ? "none" : names);
  }
  if (!text->is_string())
    fail("{}: the field '{}' should be a string, but it is a JSON {}", place, text_field_, text->type_name());
  const auto id = record.find("id");
  if (id != record.end() && id != text && id->is_string()) document.id = id->get<std::string>();
  if (id != record.end() && id->is_number_integer()) document.id = id->dump();
  document.text = std::move(text->get_ref<std::string&>());
}

}  // namespace sps
