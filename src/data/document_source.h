// What is inside one input file: its records in order. Which kind of source reads a file is decided by its
// first bytes and its name; documents.h lists the formats.
#pragma once

#include <cstdint>
#include <memory>

#include "data/documents.h"

namespace sps {

class DocumentSource {
 public:
  virtual ~DocumentSource() = default;
  virtual bool next(RawDocument& raw) = 0;      // false at the end
  virtual uint64_t skip(uint64_t records) = 0;  // passes over that many, returns how many there were
  virtual uint64_t bytes_read() const = 0;      // of the file as it is on disk
};

std::unique_ptr<DocumentSource> open_source(const InputFile& file, const ReaderOptions& options);

// Whether a folder's file of this name is read.
bool is_document_name(const std::filesystem::path& path);

}  // namespace sps
