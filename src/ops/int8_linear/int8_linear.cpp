// Weights become the numbers that decode_linear multiplies a few rows at a time, in a core's own cache.
#include "ops/int8_linear/int8_linear.h"

#include <algorithm>
#include <cmath>

#include "base/threads.h"
#include "ops/int8_linear/int8_linear_kernels.h"
#include "ops/linear/tiles.h"
#include "ops/rows/rows.h"
#include "ops/rowwise.h"
#include "ops/swiglu/swiglu.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

constexpr int64_t kUnit = 32;     // rows of w at a time, where x has few
constexpr int64_t kBlock = 1024;  // where it has many, and is laid out for each product anew
constexpr int64_t kFew = 16, kPieces = 128;

template <class T>
void quantize_row(const T* w, int64_t n, int8_t* values, bf16* scales) {
  for (int64_t begin = 0; begin < n; begin += kInt8Group, ++scales) {
    const int64_t end = std::min(begin + kInt8Group, n);
    double largest = 0;
    bool finite = true;
    for (int64_t i = begin; i < end; ++i) {
      largest = std::max(largest, std::abs(double(w[i])));
      finite = finite && std::isfinite(w[i]);
    }
    const float scale = finite ? float(largest / 127) : NAN;
    *scales = bf16(scale);
    const double step = double(float(*scales));
    for (int64_t i = begin; i < end; ++i)
      values[i] =
          step > 0 ? int8_t(std::clamp(std::nearbyint(double(w[i]) / step), -127.0, 127.0)) : int8_t{0};
  }
}

template <class T>
void dequantize_row(const int8_t* values, const bf16* scales, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + kInt8Group <= n; i += kInt8Group) dequantize_group(values + i, float(*scales++), to + i);
  for (; i < n; ++i) to[i] = T(float(values[i]) * float(*scales));
}

template <class T>
void dequantize(const Int8Matrix& w, Tensor to) {
  const int64_t groups = Int8Matrix::groups_of(w.cols);
  for (int64_t r = 0; r < w.rows; ++r)
    dequantize_row(w.values + r * w.cols, w.scales + r * groups, w.cols, to.row<T>(r));
}

// On the calling thread.
void dequantize_alone(const Int8Matrix& w, Tensor to) {
  if (to.dtype == DType::f64) return dequantize<double>(w, to);
  with_type(to.dtype, [&](auto zero) { dequantize<decltype(zero)>(w, to); });
}

// Into the second-level cache, while other rows are multiplied.
void ask_for(const Int8Matrix& w) {
  for (int64_t i = 0; i < w.rows * w.cols; i += 64) __builtin_prefetch(w.values + i, 0, 2);
}

Tensor rows_in(std::byte* memory, DType dtype, int64_t rows, int64_t cols) {
  return {memory, rows, cols, cols, dtype, Device::cpu};
}

}  // namespace

void quantize_int8(Tensor w, const Int8Matrix& to) {
  SPS_CHECK(w.device == Device::cpu && is_shape(w, to.rows, to.cols));
  SPS_CHECK(w.dtype == DType::f32 || w.dtype == DType::f64);
  parallel_for(w.rows, [&](int64_t r) {
    const Int8Matrix row = to.rows_from(r, 1);
    if (w.dtype == DType::f64)
      quantize_row(w.row<double>(r), w.cols, row.values, row.scales);
    else
      quantize_row(w.row<float>(r), w.cols, row.values, row.scales);
  });
}

void dequantize_int8(const Int8Matrix& w, Tensor to) {
  SPS_CHECK(to.device == Device::cpu && is_shape(to, w.rows, w.cols));
  parallel_chunks(w.rows, kUnit, [&](int64_t begin, int64_t end) {
    dequantize_alone(w.rows_from(begin, end - begin), to.rows_from(begin, end - begin));
  });
}

void int8_linear(const Exec& ex, Tensor x, const Int8Matrix& w, Tensor y) {
  SPS_CHECK(ex.device == Device::cpu && x.cols == w.cols && is_shape(y, x.rows, w.rows));
  if (y.empty()) return;
  const size_t row_bytes = size_t(w.cols) * dtype_size(x.dtype);
  if (x.rows > kFew) {
    for (int64_t row = 0; row < w.rows; row += kBlock) {
      const int64_t rows = std::min(kBlock, w.rows - row);
      const Tensor block =
          rows_in(thread_scratch(ScratchSlot::kernel, size_t(rows) * row_bytes), x.dtype, rows, w.cols);
      dequantize_int8(w.rows_from(row, rows), block);
      decode_linear(ex, x, block, y.cols_from(row, rows));
    }
    return;
  }
#ifdef SPS_AMX
  if (x.dtype == DType::bf16 && tiles::usable()) return int8_linear_on_tiles(x, w, y);
#endif
  const int64_t units = (w.rows + kUnit - 1) / kUnit;
  // No number depends on the piece that it is made in, so threads may be counted.
  const int64_t pieces = std::clamp<int64_t>(4 * thread_count(), 8, kPieces);
  const int64_t group = (units + pieces - 1) / pieces;
  parallel_chunks(units, group, [&](int64_t begin, int64_t end) {
    std::byte* memory = thread_scratch(ScratchSlot::kernel, size_t(kUnit) * row_bytes);
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit * kUnit, rows = std::min(kUnit, w.rows - row);
      if (unit + 1 < end) ask_for(w.rows_from(row + rows, std::min(kUnit, w.rows - row - rows)));
      const Tensor block = rows_in(memory, x.dtype, rows, w.cols);
      dequantize_alone(w.rows_from(row, rows), block);
      decode_linear(ex, x, block, y.cols_from(row, rows));
    }
  });
}

void decode_linear(const Exec& ex, const DecodeRows& x, const Int8Matrix& w, Tensor y, Tensor rest) {
  SPS_CHECK(y.cols + rest.cols == w.rows);
  const Tensor rows = decode_rows(ex, x);
  int8_linear(ex, rows, w.rows_from(0, y.cols), y);
  if (rest.cols > 0) int8_linear(ex, rows, w.rows_from(y.cols, rest.cols), rest);
}

void decode_linear_swiglu(const Exec& ex, const DecodeRows& x, const Int8Matrix& w, Tensor gate_up,
                          Tensor h) {
  int8_linear(ex, decode_rows(ex, x), w, gate_up);
  swiglu_forward(ex, gate_up, h);
}

void decode_linear_add(const Exec& ex, Tensor x, const Int8Matrix& w, Tensor delta, Tensor s) {
  int8_linear(ex, x, w, delta);
  add_rows(ex, s, delta, s);
}

}  // namespace sps::ops
