// Tensor: a typed view of a matrix. Everything the models touch is rows of features, so a tensor is `rows` x `cols`
// with a row stride; heads, streams and sequences are named by the operations that read them. A tensor owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/bf16.h"
#include "base/check.h"

namespace sps {

enum class DType : uint8_t { f64, f32, bf16, i32 };
enum class Device : uint8_t { cpu, cuda };

size_t dtype_size(DType dtype);            // bytes of one element
std::string_view dtype_name(DType dtype);  // "f64", "f32", "bf16", "i32"
DType dtype_from_name(std::string_view name);  // usage error for anything but those names

template <class T>
inline constexpr DType dtype_of = DType::f32;
template <>
inline constexpr DType dtype_of<double> = DType::f64;
template <>
inline constexpr DType dtype_of<bf16> = DType::bf16;
template <>
inline constexpr DType dtype_of<int32_t> = DType::i32;

struct Tensor {
  void* data = nullptr;
  int64_t rows = 0, cols = 0;
  int64_t stride = 0;  // elements from one row to the next, >= cols (0 for a row that is read again and again)
  DType dtype = DType::f32;
  Device device = Device::cpu;

  bool empty() const { return rows == 0 || cols == 0; }
  explicit operator bool() const { return !empty(); }
  int64_t count() const { return rows * cols; }
  bool dense() const { return stride == cols || rows <= 1; }

  template <class T>
  T* as() const {
    SPS_CHECK(dtype == dtype_of<T>);
    return static_cast<T*>(data);
  }
  // First element of row r.
  template <class T>
  T* row(int64_t r) const {
    return as<T>() + r * stride;
  }

  Tensor rows_from(int64_t begin, int64_t n) const {
    SPS_CHECK(begin >= 0 && n >= 0 && begin + n <= rows);
    Tensor t = *this;
    t.data = at(begin * stride);
    t.rows = n;
    return t;
  }
  Tensor cols_from(int64_t begin, int64_t n) const {
    SPS_CHECK(begin >= 0 && n >= 0 && begin + n <= cols);
    Tensor t = *this;
    t.data = at(begin);
    t.cols = n;
    return t;
  }
  // The same dense memory read as r x c.
  Tensor reshaped(int64_t r, int64_t c) const {
    SPS_CHECK(dense() && r * c == count());
    Tensor t = *this;
    t.rows = r, t.cols = c, t.stride = c;
    return t;
  }
  // This one-row tensor read as n equal rows.
  Tensor repeated(int64_t n) const {
    SPS_CHECK(rows == 1);
    Tensor t = *this;
    t.rows = n, t.stride = 0;
    return t;
  }

 private:
  void* at(int64_t element) const {
    return data == nullptr ? nullptr : static_cast<std::byte*>(data) + element * int64_t(dtype_size(dtype));
  }
};

template <class T>
Tensor view(T* data, int64_t rows, int64_t cols) {
  return {const_cast<std::remove_const_t<T>*>(data), rows, cols, cols, dtype_of<std::remove_const_t<T>>, Device::cpu};
}

}  // namespace sps
