// The tensors of a published model: one safetensors file, or shards that an index names.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tensor/safetensors.h"

namespace sps {

class TensorFiles {
 public:
  // `path`: a .safetensors file, or an index "....safetensors.index.json" whose weight_map says which tensor
  // stands in which file beside it. Error if the index and the files disagree.
  explicit TensorFiles(const std::filesystem::path& path);

  const std::map<std::string, const StoredTensor*>& tensors() const { return tensors_; }
  bool has(const std::string& name) const { return tensors_.contains(name); }
  const StoredTensor& at(const std::string& name) const;  // Error if there is none
  const std::string& name() const { return name_; }       // for errors
  const std::vector<std::filesystem::path>& paths() const { return paths_; }

 private:
  void add_shards(const std::filesystem::path& index);

  std::string name_;
  std::vector<std::filesystem::path> paths_;
  std::map<std::string, SafeTensors> files_;  // by name; tensors_ points into it
  std::map<std::string, const StoredTensor*> tensors_;
};

// Whether read_floats() knows the element type: F32, F16 and BF16.
bool readable(StoredType type);
// The values as f32, exactly.
void read_floats(const StoredTensor& tensor, float* out);

}  // namespace sps
