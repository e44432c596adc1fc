// Weights in 8 bits, for inference: half of bf16's bytes where the weights are the traffic. Symmetric, with
// one scale for each kInt8Group neighbours of a row (a row's last group may be short):
//
//   q = round(w / s) in [-127, 127],  s = bf16(largest |w| of the group / 127);  read as  w' = q s,
//
// rounded to the act dtype of the product that reads it (exact in f32 and f64). A group of zeros has the
// scale 0, one that holds a number that is not finite the scale NaN, so that it stays one.
//
//   quantize_int8     w [out, in] f32 (f64)  ->  q, s
//   dequantize_int8   q, s  ->  w' [out, in] f32, bf16 or f64
//   int8_linear       y = x w'^T: the same bits as decode_linear(x, w'), with its promise
//   decode_linear, decode_linear_swiglu, decode_linear_add
//                     as in decode_linear.h with w' for w, to the bit
//
// Shapes   values [out, in] and scales [out, groups_of(in)], both dense, in host memory; x [rows, in]; y
// [rows, out]. Types    x, y and the others as in decode_linear.h. Errors   CPU alone. Shapes are
// SPS_CHECKed.
#pragma once

#include "base/bf16.h"
#include "ops/decode_linear/decode_linear.h"

namespace sps::ops {

inline constexpr int64_t kInt8Group = 64;

struct Int8Matrix {
  int8_t* values = nullptr;
  bf16* scales = nullptr;
  int64_t rows = 0, cols = 0;

  static int64_t groups_of(int64_t cols) { return (cols + kInt8Group - 1) / kInt8Group; }
  static size_t value_bytes(int64_t rows, int64_t cols) { return size_t(rows * cols); }
  static size_t scale_bytes(int64_t rows, int64_t cols) {
    return size_t(rows * groups_of(cols)) * sizeof(bf16);
  }
  Int8Matrix rows_from(int64_t row, int64_t count) const {
    SPS_CHECK(row >= 0 && count >= 0 && row + count <= rows);
    return {values + row * cols, scales + row * groups_of(cols), count, cols};
  }
};

void quantize_int8(Tensor w, const Int8Matrix& to);
void dequantize_int8(const Int8Matrix& w, Tensor to);
void int8_linear(const Exec& ex, Tensor x, const Int8Matrix& w, Tensor y);

void decode_linear(const Exec& ex, const DecodeRows& x, const Int8Matrix& w, Tensor y, Tensor rest = {});
void decode_linear_swiglu(const Exec& ex, const DecodeRows& x, const Int8Matrix& w, Tensor gate_up, Tensor h);
void decode_linear_add(const Exec& ex, Tensor x, const Int8Matrix& w, Tensor delta, Tensor s);

}  // namespace sps::ops
