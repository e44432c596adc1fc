// Documents: the texts of a corpus, one after the other, from files, folders and patterns.
//
//   *.jsonl          one JSON object a line; its text is a string field ("text" unless told otherwise); blank
//   lines
//                    are skipped. The document's id is its "id" field, or FILE:LINE without one.
//   any other file   one document: plain text. Its id is the path as given, or relative to the folder it was
//   found in. a folder         its .txt, .rst, .md and .jsonl files at any depth, in the order of their
//   paths' bytes; names
//                    that begin with a dot are not looked at
//   a pattern        with * ? [: the files and folders it matches, in that order
//
// A file that is reached more than once is read once. A byte order mark is not text. Documents without text
// are skipped and counted. Memory: one document.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace sps {

struct Document {
  std::string text, id;
};

// A document before its text is taken out of the JSON, which is the slow part and may be done by any thread.
struct RawDocument {
  std::string bytes, id;
  std::string place;  // FILE:LINE of a JSON line, empty for a plain text
};

class DocumentReader {
 public:
  // Finds the files; an input that gives none is an error.
  explicit DocumentReader(const std::vector<std::string>& inputs, std::string text_field = "text");

  // The next document with text, or false at the end. Errors name the file and, for .jsonl, the line.
  bool next(Document& document);
  // The same in two steps; parse() uses `raw` up, leaves the text empty where next() would skip and count,
  // and may run in parallel.
  bool next_raw(RawDocument& raw);
  void parse(RawDocument& raw, Document& document) const;

  size_t files() const { return files_.size(); }
  uint64_t empty_documents() const { return empty_; }  // skipped by next() up to now
  uint64_t total_bytes() const { return total_bytes_; }
  uint64_t bytes_read() const { return bytes_read_; }  // of total_bytes, up to now

 private:
  struct File {
    std::filesystem::path path;
    std::string id;
    bool json_lines;
  };
  void add_input(const std::string& input);
  void add_file(const std::filesystem::path& path, const std::string& id);
  bool next_line(RawDocument& raw);  // false at the end of the open file

  std::vector<File> files_;
  std::set<std::string> seen_;  // canonical paths
  std::string text_field_;
  size_t current_ = 0;    // file
  std::ifstream stream_;  // of files_[current_] while its lines are read
  uint64_t line_ = 0;
  uint64_t empty_ = 0, total_bytes_ = 0, bytes_read_ = 0;
};

}  // namespace sps
