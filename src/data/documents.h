// Documents: the texts of a corpus, one after the other, from files, folders, patterns and standard input.
//
//   *.jsonl *.ndjson     one JSON object a line; blank lines are skipped
//   *.json               the same, or one array of such objects if its first byte that is not blank is a [
//   *.parquet            one document a row, if this build has Parquet (parquet_documents.h)
//   any other file       one document: plain text, byte for byte, UTF-8 or not
//   -                    standard input: JSON if it begins with { or with [ and {, otherwise one plain text,
//                        unless ReaderOptions::format says which
//   a folder             its .txt .rst .md .jsonl .ndjson .json .parquet files at any depth, in the order of
//                        their paths' bytes; names that begin with a dot are not looked at
//   a pattern            with * ? [: the files and folders it matches, in that order
//
// Each but .parquet may be packed with gzip or zstd and then has a further .gz or .zst (byte_stream.h); what
// a file is packed with, and whether it is Parquet, is read from its first bytes, whatever its name.
//
// The text of a JSON object or a Parquet row is the string field ReaderOptions::text_field; json_documents.h
// says what is taken for text and what is refused. A null counts as an empty document. The document's id is
// the string or whole number in ReaderOptions::id_field, otherwise FILE:LINE, FILE:NUMBER for the elements of
// an array and the rows of a Parquet file, all counted from 1, and FILE for a plain text. FILE is the path as
// given or relative to the folder it was found in, "stdin" for standard input.
//
// A file that is reached more than once is read once. A byte order mark is not text. Documents without text
// are skipped and counted. Memory: one document and buffers of fixed size.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sps {

struct Document {
  std::string text, id;
};

// A document before its text is taken out of the JSON, which may be done by any thread.
struct RawDocument {
  std::string bytes;  // JSON, or the text itself where `place` is empty
  std::string id;
  std::string place;  // where the JSON stands, for errors: FILE:LINE
};

enum class InputFormat { automatic, text, json };

struct ReaderOptions {
  std::string text_field = "text";              // a.b: field b of the object in field a
  std::string id_field = "id";                  // likewise
  InputFormat format = InputFormat::automatic;  // of standard input; files are told by their names
  // Longest JSON object or plain text that is read; what is longer is an error, before it fills the memory.
  uint64_t max_document_bytes = uint64_t{4} << 30;
};

// A record: a plain text, a line of JSON that is not blank, an element of an array, or a row. `record` counts
// from 0 within input_files()[file]; the position after the last record of a file may be written either way.
struct ReaderPosition {
  size_t file = 0;
  uint64_t record = 0;
  bool operator==(const ReaderPosition&) const = default;
};

struct InputFile {
  std::filesystem::path path;  // "-" for standard input
  std::string id;
  uint64_t size = 0;     // bytes on disk; 0 for a pipe
  int64_t modified = 0;  // nanoseconds since 1970; 0 for standard input
  bool standard_input() const { return path == "-"; }
};

class DocumentSource;

class DocumentReader {
 public:
  // Finds the files; an input that gives none is an error.
  explicit DocumentReader(const std::vector<std::string>& inputs, ReaderOptions options = {});
  DocumentReader(const std::vector<std::string>& inputs, std::string text_field)
      : DocumentReader(inputs, ReaderOptions{.text_field = std::move(text_field)}) {}
  ~DocumentReader();

  // The next document with text, or false at the end. Errors name the file and, for JSON, the line.
  bool next(Document& document);
  // The same in two steps; parse() uses `raw` up, leaves the text empty where next() would skip and count,
  // and may run in parallel.
  bool next_raw(RawDocument& raw);
  void parse(RawDocument& raw, Document& document) const;

  // The record that next_raw() would read next.
  ReaderPosition position() const;
  // Goes forward to a position that position() gave for the same files. JSON is passed over without being
  // parsed and row groups of Parquet files without being read. Error if a file has fewer records.
  void seek(ReaderPosition position);

  const std::vector<InputFile>& input_files() const { return files_; }
  size_t files() const { return files_.size(); }
  uint64_t empty_documents() const { return empty_; }    // skipped by next() up to now
  uint64_t total_bytes() const { return total_bytes_; }  // of the files as they are on disk
  uint64_t bytes_read() const;                           // of total_bytes, up to now

 private:
  void add_input(const std::string& input);
  void add_file(const std::filesystem::path& path, const std::string& id);
  void add_standard_input();
  void open();   // files_[file_] unless it is open
  void close();  // and go to the next file

  ReaderOptions options_;
  std::vector<InputFile> files_;
  std::set<std::string> seen_;  // canonical paths
  size_t file_ = 0;
  uint64_t record_ = 0;  // next of files_[file_]
  std::unique_ptr<DocumentSource> source_;
  uint64_t empty_ = 0, total_bytes_ = 0, finished_bytes_ = 0;
};

}  // namespace sps
