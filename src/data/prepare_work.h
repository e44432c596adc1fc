// The work folder of a preparation, OUT/.prepare: what pass 1 has done, so that a later process can go on
// with it.
//
//   tokens         the documents' tokens in the order of reading
//   records        a DocumentRecord each
//   journal.json   for which inputs and options, how far; replaced in one step after the other two are on the
//   disk
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "base/files.h"
#include "base/json.h"
#include "data/documents.h"

namespace sps {

struct DocumentRecord {
  uint64_t split_key, text_key;  // hashes: what decides the side, and of the text
  uint64_t begin, bytes;         // of its tokens in the file of tokens
  uint64_t text_bytes;
};

// A document's packed tokens (pack_tokens), end to end.
using TokenParts = std::vector<std::vector<std::byte>>;

struct PrepareState {
  ReaderPosition position;  // behind the last document that is in the files
  uint64_t documents = 0, empty_documents = 0, token_bytes = 0;
  bool complete = false;  // pass 1 is done
};

class PrepareWork {
 public:
  // Takes over what a process with the same identity left in `out`, or starts anew. An error if another
  // process is at work there.
  PrepareWork(const std::filesystem::path& out, nlohmann::json identity);
  // Removes the folder unless there is something to go on from that has not been given up.
  ~PrepareWork();
  PrepareWork(const PrepareWork&) = delete;
  PrepareWork& operator=(const PrepareWork&) = delete;

  PrepareState state;  // add() keeps the counts, the caller the rest
  void add(const TokenParts& tokens, uint64_t split_key, uint64_t text_key, uint64_t text_bytes);
  // Brings everything to the disk and notes `state`.
  void save();
  // Writes what is buffered, before reading.
  void flush();
  bool saved() const { return saved_; }
  void give_up() { keep_ = false; }

  const WorkFile& tokens() const { return *tokens_; }
  const WorkFile& records() const { return *records_; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  // The state of journal.json if it is for `identity_` and the files are there.
  std::optional<PrepareState> load();
  void open_files(const PrepareState& at);

  std::filesystem::path folder_;
  nlohmann::json identity_;
  int lock_ = -1;  // the folder, locked
  bool saved_ = false, keep_ = true;
  std::unique_ptr<WorkFile> tokens_, records_;
  std::vector<std::byte> token_buffer_;
  std::vector<DocumentRecord> record_buffer_;
};

}  // namespace sps
