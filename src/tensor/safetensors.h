// safetensors: named tensors in one file.
//
//   8 bytes    length H of the header, little-endian
//   H bytes    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, spaces
//   at the end the rest   the data, row-major and little-endian; offsets count from here
//
// The reader believes nothing: lengths, offsets, shapes and names are checked before anything is returned,
// the ranges must cover the data exactly once, and errors are one sentence that names the file. The writer
// sorts the header by name, aligns the data to 8 bytes and lays wider element types first, so that every
// tensor is aligned to its element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "tensor/tensor.h"

namespace sps {

enum class StoredType : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e5m2,
  f8_e4m3,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean
};

size_t stored_size(StoredType type);            // bytes of one element
std::string_view stored_name(StoredType type);  // as in files: "F32", "BOOL", ...
std::optional<StoredType> stored_from_name(std::string_view name);
StoredType stored_type(DType dtype);
std::string shape_text(const std::vector<int64_t>& shape);  // for errors: "[2, 3]"

// A tensor as it stands in a file, or as it is to be written: dense, row-major.
struct StoredTensor {
  StoredType dtype = StoredType::f32;
  std::vector<int64_t> shape;  // empty: a scalar
  const void* data = nullptr;  // aligned as the file aligns it: copy, do not dereference
  uint64_t bytes = 0;

  int64_t count() const { return int64_t(bytes / stored_size(dtype)); }
};

// A tensor of the program under the name and shape it has in files. The shape's product is tensor.count();
// the tensor may be strided and may lie on a GPU.
struct NamedTensor {
  std::string name;
  std::vector<int64_t> shape;
  Tensor tensor;
};

using Metadata = std::map<std::string, std::string>;

// What was written, for records that recognise the file again (hash: base/hash.h).
struct WrittenFile {
  uint64_t bytes = 0;
  uint64_t hash = 0;
};

// The file is complete or not there. Refuses an empty list, empty or repeated names and "__metadata__"
// (SPS_CHECK: they are our own), and a header above 100 MB (Error), which readers would not accept.
WrittenFile write_safetensors(const std::filesystem::path& path,
                              const std::map<std::string, StoredTensor>& tensors,
                              const Metadata& metadata = {});
WrittenFile write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                              const Metadata& metadata = {});

class SafeTensors {
 public:
  explicit SafeTensors(const std::filesystem::path& path);
  // The same for bytes that stand in memory and stay there; `name` takes the file's place in errors.
  SafeTensors(std::span<const std::byte> bytes, std::string name);

  const std::string& name() const { return name_; }
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  const StoredTensor& at(const std::string& tensor) const;  // Error if there is none
  const Metadata& metadata() const { return metadata_; }

 private:
  void parse(std::span<const std::byte> bytes);

  std::string name_;
  MappedFile file_;
  std::map<std::string, StoredTensor> tensors_;
  Metadata metadata_;
};

// Fills the tensors from the file. Both sides must have the same names, shapes and dtypes, but for bf16, which
// takes f32 rounded to nearest even; otherwise Error, and no tensor has been touched.
void read_into(const SafeTensors& file, std::span<const NamedTensor> tensors);

}  // namespace sps
