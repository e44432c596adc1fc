#include "data/document_source.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/error.h"
#include "base/progress.h"
#include "data/byte_stream.h"
#include "data/parquet_documents.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr std::string_view kBlanks = " \t\r\n\v\f";
// From this length on a line of JSON must begin like one. It keeps a file of noise out of the memory.
constexpr size_t kLongLine = size_t{1} << 20;

void remove_byte_order_mark(std::string& text) {
  if (text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
}

size_t first_not_blank(std::string_view text) {
  return text.find_first_not_of(kBlanks);
}

enum class Kind { text, lines, json, parquet };  // json: lines or one array

// By the name alone; `packing` is set to .gz or .zst, which stand behind the format.
Kind kind_of(const fs::path& path, std::string* packing, bool* known) {
  static constexpr struct {
    std::string_view extension;
    Kind kind;
  } kinds[] = {{".txt", Kind::text},       {".rst", Kind::text},     {".md", Kind::text},
               {".jsonl", Kind::lines},    {".ndjson", Kind::lines}, {".json", Kind::json},
               {".parquet", Kind::parquet}};
  const auto lower = [](std::string extension) {
    for (char& c : extension)
      if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
    return extension;
  };
  fs::path name = path.filename();
  std::string extension = lower(name.extension().string());
  packing->clear();
  if (extension == ".gz" || extension == ".zst") {
    *packing = extension;
    extension = lower(name.stem().extension().string());
  }
  const auto* found = std::find_if(std::begin(kinds), std::end(kinds),
                                   [&](const auto& k) { return k.extension == extension; });
  *known = found != std::end(kinds) && !(found->kind == Kind::parquet && !packing->empty());
  return *known ? found->kind : Kind::text;
}

// What the sources of unpacked bytes share.
class StreamSource : public DocumentSource {
 public:
  StreamSource(const InputFile& file, const ReaderOptions& options, std::unique_ptr<ByteStream> stream)
      : file_(file), limit_(options.max_document_bytes), stream_(std::move(stream)) {}
  uint64_t bytes_read() const override { return stream_->bytes_read(); }
  bool next(RawDocument& raw) override {
    record_.swap(raw.bytes);
    const bool there = next_record();
    record_.swap(raw.bytes);
    if (there) label(raw);
    return there;
  }
  uint64_t skip(uint64_t records) override {
    uint64_t skipped = 0;
    while (skipped < records && next_record()) ++skipped;
    return skipped;
  }

 protected:
  virtual bool next_record() = 0;                  // sets record_
  virtual void label(RawDocument& raw) const = 0;  // sets id and place of the record before
  void number(RawDocument& raw, uint64_t n) const {
    raw.id = fmt::format("{}:{}", file_.id, n);
    raw.place = place();
  }

  // Appends to the record and takes from the stream, within the limit.
  void append(std::string_view bytes) {
    if (bytes.size() > limit_ - record_.size())
      fail("{} is longer than {}, which is the most that is read as one document", place(),
           human_bytes(double(limit_)));
    record_.append(bytes);
    stream_->take(bytes.size());
  }
  virtual std::string place() const { return stream_->name(); }

  InputFile file_;
  uint64_t limit_;
  std::unique_ptr<ByteStream> stream_;
  std::string record_;
};

class TextSource final : public StreamSource {
 public:
  using StreamSource::StreamSource;

 private:
  void label(RawDocument& raw) const override {
    raw.id = file_.id;
    raw.place.clear();
  }
  bool next_record() override {
    record_.clear();
    if (finished_) return false;
    finished_ = true;
    if (!stream_->packed()) record_.reserve(size_t(std::min(file_.size, limit_)));
    for (std::string_view piece; !(piece = stream_->peek()).empty();) append(piece);
    remove_byte_order_mark(record_);
    return true;
  }
  bool finished_ = false;
};

class LineSource final : public StreamSource {
 public:
  using StreamSource::StreamSource;

 private:
  void label(RawDocument& raw) const override { number(raw, line_); }
  std::string place() const override { return fmt::format("{}:{}", stream_->name(), line_); }

  // The next line that is not blank.
  bool next_record() override {
    do {
      if (!next_line()) return false;
      if (line_ == 1) remove_byte_order_mark(record_);
    } while (first_not_blank(record_) == std::string_view::npos);
    return true;
  }

  bool next_line() {
    record_.clear();
    std::string_view piece = stream_->peek();
    if (piece.empty()) return false;
    for (++line_; !piece.empty(); piece = stream_->peek()) {
      const size_t end = piece.find('\n');
      append(piece.substr(0, end));
      if (end != std::string_view::npos) {
        stream_->take(1);
        break;
      }
      if (record_.size() > kLongLine) check_begin();
    }
    return true;
  }

  void check_begin() const {
    const size_t first = record_.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0;
    const size_t begin = record_.find_first_not_of(kBlanks, first);
    if (begin == std::string::npos || record_[begin] != '{')
      fail("{} is longer than {} and does not begin with {{, but a JSON object a line is expected", place(),
           human_bytes(double(kLongLine)));
  }

  uint64_t line_ = 0;
};

class ArraySource final : public StreamSource {
 public:
  // The stream stands before the [.
  ArraySource(const InputFile& file, const ReaderOptions& options, std::unique_ptr<ByteStream> stream)
      : StreamSource(file, options, std::move(stream)) {
    if (stream_->peek().starts_with(kByteOrderMark)) stream_->take(kByteOrderMark.size());
    next_char();
    stream_->take(1);
  }

 private:
  void label(RawDocument& raw) const override { number(raw, element_); }
  std::string place() const override { return fmt::format("{}, element {}", stream_->name(), element_); }

  // The next byte that is not blank, left in the stream.
  char next_char() {
    for (std::string_view piece; !(piece = stream_->peek()).empty();) {
      const size_t first = first_not_blank(piece);
      stream_->take(std::min(first, piece.size()));
      if (first != std::string_view::npos) return piece[first];
    }
    return '\0';
  }

  [[noreturn]] void truncated() const {
    fail("{} is truncated: the JSON array is not closed after element {}", stream_->name(), element_);
  }

  bool next_record() override {
    record_.clear();
    if (finished_) return false;
    char c = next_char();
    if (c == ',' && element_ > 0) {
      stream_->take(1);
      c = next_char();
    } else if (c == ']') {
      stream_->take(1);
      finished_ = true;
      next_char();
      if (stream_->peek().empty()) return false;
      fail("{} is not valid JSON: something follows the array", stream_->name());
    } else if (element_ > 0 && !stream_->peek().empty()) {
      fail("{} is not valid JSON: a comma or ] is expected after element {}", stream_->name(), element_);
    }
    if (stream_->peek().empty()) truncated();
    ++element_;
    if (c != '{') fail("{}: a JSON object is expected, but it does not begin with {{", place());
    take_object();
    return true;
  }

  // Up to the bracket that closes what is open. Whether they fit together is for the parser to say.
  void take_object() {
    uint64_t depth = 0;
    bool in_string = false, escaped = false;
    for (std::string_view piece; !(piece = stream_->peek()).empty(); append(piece)) {
      for (size_t i = 0; i < piece.size(); ++i) {
        const char c = piece[i];
        if (in_string) {
          if (escaped)
            escaped = false;
          else if (c == '\\')
            escaped = true;
          else if (c == '"')
            in_string = false;
        } else if (c == '"') {
          in_string = true;
        } else if (c == '{' || c == '[') {
          ++depth;
        } else if ((c == '}' || c == ']') && --depth == 0) {
          return append(piece.substr(0, i + 1));
        }
      }
    }
    --element_;
    truncated();
  }

  uint64_t element_ = 0;  // read last
  bool finished_ = false;
};

class ParquetSource final : public DocumentSource {
 public:
  ParquetSource(const InputFile& file, const ReaderOptions& options)
      : file_(file), documents_(file.path, options.text_field, options.id_field) {}
  bool next(RawDocument& raw) override {
    if (!documents_.next(raw.bytes, raw.id)) return false;
    if (raw.id.empty()) raw.id = fmt::format("{}:{}", file_.id, documents_.row());
    raw.place.clear();
    return true;
  }
  uint64_t skip(uint64_t records) override { return documents_.skip(records); }
  // As if all rows were as long.
  uint64_t bytes_read() const override {
    const double rows = double(documents_.rows());
    return rows == 0 ? 0 : uint64_t(double(file_.size) * std::min(1.0, double(documents_.row()) / rows));
  }

 private:
  InputFile file_;
  ParquetDocuments documents_;
};

// What a stream without a name to go by is.
Kind guess(std::string_view head) {
  const size_t begin = first_not_blank(head);
  if (begin == std::string_view::npos) return Kind::text;
  if (head[begin] == '{') return Kind::lines;
  // Prose begins with a [ now and then, but an array of objects goes on with a {.
  const size_t next = head.find_first_not_of(kBlanks, begin + 1);
  return head[begin] == '[' && next != std::string_view::npos && head[next] == '{' ? Kind::json : Kind::text;
}

}  // namespace

bool is_document_name(const fs::path& path) {
  std::string packing;
  bool known = false;
  kind_of(path, &packing, &known);
  return known;
}

std::unique_ptr<DocumentSource> open_source(const InputFile& file, const ReaderOptions& options) {
  std::string packing;
  bool known = false;
  Kind kind = kind_of(file.path, &packing, &known);
  auto stream = std::make_unique<ByteStream>(file.path);
  std::string_view head = stream->peek();
  if (head.starts_with(kByteOrderMark)) head.remove_prefix(kByteOrderMark.size());
  if (!stream->packed() && (packed_format(head) == "Parquet" || kind == Kind::parquet)) {
    if (file.standard_input())
      fail("standard input is a Parquet file: give its path, as it is not read in order");
    if (!head.starts_with("PAR"))
      fail("{} is not a Parquet file: it does not begin like one", file.path.string());
    stream.reset();
    return std::make_unique<ParquetSource>(file, options);
  }
  if (file.standard_input())
    kind = options.format == InputFormat::text   ? Kind::text
           : options.format == InputFormat::json ? Kind::json
                                                 : guess(head);
  if (kind == Kind::parquet)
    fail("{} is packed, but Parquet files pack themselves: unpack it", file.path.string());
  if (kind == Kind::text && !packing.empty() && !stream->packed())
    fail("{} does not begin like a {} file: is it damaged, or unpacked already and named wrongly?",
         file.path.string(), packing);
  const size_t begin = first_not_blank(head);
  if (kind == Kind::json && begin != std::string_view::npos && head[begin] == '[')
    return std::make_unique<ArraySource>(file, options, std::move(stream));
  if (kind == Kind::text) return std::make_unique<TextSource>(file, options, std::move(stream));
  return std::make_unique<LineSource>(file, options, std::move(stream));
}

}  // namespace sps
