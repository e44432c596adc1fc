#include "convert/tensor_files.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/json.h"

namespace sps {

namespace fs = std::filesystem;

namespace {

float float_of_half(uint16_t h) {
  const bool negative = (h & 0x8000) != 0;
  const int exponent = h >> 10 & 0x1F, fraction = h & 0x3FF;
  float value;
  if (exponent == 0x1F)
    value = fraction == 0 ? INFINITY : NAN;
  else if (exponent == 0)
    value = std::ldexp(float(fraction), -24);
  else
    value = std::ldexp(float(fraction + 1024), exponent - 25);
  return negative ? -value : value;
}

// Elements in files need not be aligned.
template <class Element, class Convert>
void convert_each(const StoredTensor& tensor, float* out, Convert&& convert) {
  const auto* bytes = static_cast<const char*>(tensor.data);
  for (int64_t i = 0; i < tensor.count(); ++i) {
    Element element;
    std::memcpy(&element, bytes + size_t(i) * sizeof element, sizeof element);
    out[i] = convert(element);
  }
}

}  // namespace

TensorFiles::TensorFiles(const fs::path& path) : name_(path.string()) {
  if (path.extension() == ".json") {
    add_shards(path);
    return;
  }
  paths_.push_back(path);
  const auto& file = files_.emplace(name_, path).first->second;
  for (const auto& [name, tensor] : file.tensors()) tensors_.emplace(name, &tensor);
}

void TensorFiles::add_shards(const fs::path& index) {
  paths_.push_back(index);
  const nlohmann::json file = parse_json(read_text(index), name_);
  if (!file.is_object() || !file.contains("weight_map") || !file["weight_map"].is_object())
    fail("{} has no weight_map: expected an index of safetensors files", name_);
  std::set<std::string> used;
  for (const auto& [tensor, shard] : file["weight_map"].items()) {
    const std::string shard_name = shard.is_string() ? shard.get<std::string>() : "";
    if (shard_name.empty() || fs::path(shard_name).filename() != shard_name)
      fail("{}: '{}' stands in {}, expected the name of a file beside the index", name_, tensor,
           dump_json(shard));
    const fs::path path = index.parent_path() / shard_name;
    std::error_code ignored;
    if (!files_.contains(shard_name)) {
      if (!fs::exists(path, ignored)) fail("{} names the file {}, which is not there", name_, path.string());
      files_.emplace(shard_name, path);
      paths_.push_back(path);
    }
    tensors_.emplace(tensor, &files_.at(shard_name).at(tensor));
  }
  if (tensors_.empty()) fail("{} names no tensors", name_);
  for (const auto& [shard_name, shard] : files_)
    for (const auto& [tensor, unused] : shard.tensors()) {
      const auto found = tensors_.find(tensor);
      if (found == tensors_.end() || found->second != &shard.at(tensor))
        fail("{} does not say that '{}' stands in {}", name_, tensor, shard_name);
    }
}

const StoredTensor& TensorFiles::at(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) fail("{} has no tensor '{}'", name_, name);
  return *found->second;
}

bool readable(StoredType type) {
  return type == StoredType::f32 || type == StoredType::f16 || type == StoredType::bf16;
}

void read_floats(const StoredTensor& tensor, float* out) {
  switch (tensor.dtype) {
    case StoredType::f32:
      std::memcpy(out, tensor.data, tensor.bytes);
      return;
    case StoredType::bf16:
      return convert_each<uint16_t>(tensor, out,
                                    [](uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); });
    case StoredType::f16:
      return convert_each<uint16_t>(tensor, out, float_of_half);
    default:
      SPS_CHECK(!"readable() has been asked");
  }
}

}  // namespace sps
