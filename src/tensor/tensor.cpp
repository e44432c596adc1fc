#include "tensor/tensor.h"
#include "base/error.h"

namespace sps {

size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::f64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16: return 2;
  }
  return 0;
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::i32: return "i32";
  }
  return "?";
}

DType dtype_from_name(std::string_view name) {
  for (const DType d : {DType::f64, DType::f32, DType::bf16, DType::i32})
    if (name == dtype_name(d)) return d;
  usage_error("unknown dtype '{}': expected f32 or bf16 (f64 is the slow reference)", name);
}

}  // namespace sps
