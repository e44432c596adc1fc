// Texts from a column of a Parquet file, through Apache Arrow's C++ library. The build has it where CMake
// found one (cmake/arrow.cmake); otherwise opening a file is an error that says how to get it.
//
// The text column holds strings or bytes, however Arrow types them (string, large_string, string_view,
// binary, dictionary), with any encoding and compression the library reads; texts are kept byte for byte.
// Nulls are empty texts. A column within structs is named by its path, "meta.text"; columns within lists are
// refused. The id column holds strings or whole numbers; another type, or none, is no id.
//
// Nothing but these two columns is read, row group by row group, and in them a page at a time: memory is a
// page and a dictionary of each, not a row group.
//
// Errors name the file: one that is truncated, damaged or encrypted, a column that is not there (with the
// columns that are), or one of another type.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace sps {

class ParquetDocuments {
 public:
  ParquetDocuments(const std::filesystem::path& path, std::string_view text_column,
                   std::string_view id_column);
  ~ParquetDocuments();
  ParquetDocuments(const ParquetDocuments&) = delete;
  ParquetDocuments& operator=(const ParquetDocuments&) = delete;

  // The next row, or false at the end. `id` is empty where the row has none.
  bool next(std::string& text, std::string& id);
  uint64_t skip(uint64_t rows);  // returns how many there were
  uint64_t row() const;          // rows behind us
  uint64_t rows() const;         // of the file

  static bool supported();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sps
