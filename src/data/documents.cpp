#include "data/documents.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "data/document_source.h"
#include "data/json_documents.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

// The known files below a folder, sorted by the bytes of their relative paths.
std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error, dangling;
  fs::recursive_directory_iterator entry(folder, error);
  while (!error && entry != fs::recursive_directory_iterator()) {
    const fs::path& path = entry->path();
    if (path.filename().string().starts_with('.'))
      entry.disable_recursion_pending();
    else if (is_document_name(path) && entry->is_regular_file(dangling))
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

}  // namespace

DocumentReader::DocumentReader(const std::vector<std::string>& inputs, ReaderOptions options)
    : options_(std::move(options)) {
  if (inputs.empty()) usage_error("no input is given: name files, folders, patterns or - for standard input");
  for (const std::string& input : inputs) {
    std::error_code error;
    if (input == "-") {
      add_standard_input();
      continue;
    }
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
  if (found.empty())
    fail("the folder {} holds no .txt, .rst, .md, .jsonl, .ndjson, .json or .parquet file", input);
  for (const fs::path& file : found) add_file(path / file, file.string());
}

void DocumentReader::add_file(const fs::path& path, const std::string& id) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) fail("{} is neither a regular file nor a folder", path.string());
  const fs::path canonical = fs::canonical(path, error);
  if (!error && !seen_.insert(canonical.native()).second) return;
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    fail("cannot read {}: {}", path.string(), std::generic_category().message(errno));
  const int64_t modified = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  // "./-" so that a file of that name is not taken for standard input.
  files_.push_back({path == "-" ? fs::path("./-") : path, id, uint64_t(status.st_size), modified});
  total_bytes_ += files_.back().size;
}

void DocumentReader::add_standard_input() {
  if (!seen_.insert("-").second) return;
  struct stat status {};
  const bool sized = ::fstat(STDIN_FILENO, &status) == 0 && S_ISREG(status.st_mode);
  files_.push_back({"-", "stdin", sized ? uint64_t(status.st_size) : 0, 0});
  total_bytes_ += files_.back().size;
}

DocumentReader::~DocumentReader() = default;

void DocumentReader::open() {
  if (!source_) source_ = open_source(files_[file_], options_);
}

void DocumentReader::close() {
  finished_bytes_ += source_ && files_[file_].size == 0 ? source_->bytes_read() : files_[file_].size;
  source_.reset();
  ++file_;
  record_ = 0;
}

bool DocumentReader::next(Document& document) {
  for (RawDocument raw; next_raw(raw); ++empty_) {
    parse(raw, document);
    if (!document.text.empty()) return true;
  }
  return false;
}

bool DocumentReader::next_raw(RawDocument& raw) {
  for (; file_ < files_.size(); close()) {
    open();
    if (!source_->next(raw)) continue;
    ++record_;
    return true;
  }
  return false;
}

void DocumentReader::parse(RawDocument& raw, Document& document) const {
  document.id.swap(raw.id);
  if (raw.place.empty())
    document.text.swap(raw.bytes);
  else
    parse_json_document(raw.bytes, raw.place, options_.text_field, options_.id_field, document);
}

ReaderPosition DocumentReader::position() const {
  return {file_, record_};
}

void DocumentReader::seek(ReaderPosition to) {
  SPS_CHECK(to.file > file_ || (to.file == file_ && to.record >= record_));
  if (to.file > files_.size() || (to.file == files_.size() && to.record > 0))
    fail("cannot go to record {} of input {}: there are {} inputs", to.record, to.file, files_.size());
  while (file_ < to.file) close();
  if (to.record == record_) return;
  open();
  record_ += source_->skip(to.record - record_);
  if (record_ != to.record)
    fail("{} has {} records, but {} of them were read before: the file has changed",
         files_[file_].path.string(), record_, to.record);
}

uint64_t DocumentReader::bytes_read() const {
  return finished_bytes_ + (source_ ? source_->bytes_read() : 0);
}

}  // namespace sps
