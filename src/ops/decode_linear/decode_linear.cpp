#include "ops/decode_linear/decode_linear.h"

#include <algorithm>

#include "ops/decode_linear/decode_linear_cuda.h"
#include "ops/decode_linear/decode_linear_kernels.h"
#include "ops/linear/linear_kernels.h"
#include "ops/linear/tiles.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rows/rows.h"
#include "ops/rowwise.h"
#include "ops/swiglu/swiglu.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

bool is_matrix(const Tensor& t, int64_t rows, int64_t cols) {
  return is_shape(t, rows, cols) && (t.stride >= t.cols || t.rows <= 1);
}

void check(const Exec& ex, const DecodeRows& x, Tensor w, int64_t rows) {
  SPS_CHECK(is_act(w.dtype) || (w.dtype == DType::f64 && ex.device == Device::cpu));
  SPS_CHECK(w.stride >= w.cols || w.rows <= 1);
  const DType wide = w.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (x.gain) {
    SPS_CHECK(x.x.dtype == wide && x.x.cols == w.cols && is_matrix(x.n, rows, w.cols));
    SPS_CHECK(x.n.dtype == w.dtype && is_shape(x.gain, 1, w.cols) && x.gain.dtype == wide);
    SPS_CHECK(x.pick.empty() ? x.x.rows == rows : int64_t(x.pick.size()) == rows);
  } else {
    SPS_CHECK(x.x.dtype == w.dtype && is_matrix(x.x, rows, w.cols) && x.pick.empty());
  }
}

// A product alone, or added to y (on a GPU).
void product(const Exec& ex, Tensor x, Tensor w, Tensor y, Accumulate acc = Accumulate::no) {
  SPS_CHECK(y.dtype == x.dtype || (y.dtype == DType::f32 && is_act(x.dtype)));
  SPS_CHECK(is_matrix(y, x.rows, w.rows));
  if (y.empty()) return;
  SPS_CHECK(x.cols > 0);
  if constexpr (kCudaBuilt) {
    // What decode_linear_cuda does not take: with few rows slowly, but each row by itself.
    if (ex.device == Device::cuda && x.rows <= kFewDecodeRows)
      return any_product_cuda(ex, x, Transposed::no, w, Transposed::yes, y, acc);
  }
  if (ex.device == Device::cuda || x.dtype == DType::f64) return linear_forward(ex, x, w, y, acc);
  SPS_CHECK(acc == Accumulate::no);
#ifdef SPS_AMX
  if (x.dtype == DType::bf16 && tiles::usable()) return decode_linear_on_tiles(x, w, y);
#endif
  decode_linear_cpu(x, w, y);
}

// Everything in one, on a GPU; false where it must be done piece by piece.
bool fused([[maybe_unused]] const Exec& ex, [[maybe_unused]] const DecodeCall& call) {
  if constexpr (kCudaBuilt)
    return ex.device == Device::cuda && call.x.rows() <= kFewDecodeRows && decode_linear_cuda(ex, call);
  return false;
}

}  // namespace

Tensor decode_rows(const Exec& ex, const DecodeRows& x) {
  if (!x.gain) return x.x;
  rmsnorm_forward(ex, x.x, {}, x.gain, x.eps, x.pick.empty() ? x.x : x.s, x.n, x.rstd, x.pick);
  return x.n;
}

void decode_linear(const Exec& ex, const DecodeRows& x, Tensor w, Tensor y, Tensor rest) {
  const int64_t rows = y.rows;
  check(ex, x, w, rows);
  SPS_CHECK(is_matrix(y, rows, w.rows - rest.cols));
  if (rest.cols > 0) SPS_CHECK(is_matrix(rest, rows, rest.cols) && rest.dtype == y.dtype);
  if (rows == 0 || w.rows == 0 || fused(ex, {x, w, y, rest})) return;
  const Tensor n = decode_rows(ex, x);
  product(ex, n, w.rows_from(0, y.cols), y);
  if (rest.cols > 0) product(ex, n, w.rows_from(y.cols, rest.cols), rest);
}

void decode_linear_swiglu(const Exec& ex, const DecodeRows& x, Tensor w, Tensor gate_up, Tensor h) {
  check(ex, x, w, h.rows);
  SPS_CHECK(w.rows == 2 * h.cols && is_matrix(gate_up, h.rows, w.rows) && gate_up.dtype == w.dtype);
  SPS_CHECK(is_matrix(h, h.rows, h.cols) && h.dtype == w.dtype);
  if (h.empty() || fused(ex, {x, w, h, {}, DecodeEnd::swiglu})) return;
  product(ex, decode_rows(ex, x), w, gate_up);
  swiglu_forward(ex, gate_up, h);
}

void decode_linear_add(const Exec& ex, Tensor x, Tensor w, Tensor delta, Tensor s) {
  check(ex, x, w, s.rows);
  SPS_CHECK(is_matrix(s, x.rows, w.rows) && s.dtype == (w.dtype == DType::f64 ? DType::f64 : DType::f32));
  SPS_CHECK(is_matrix(delta, x.rows, w.rows) && delta.dtype == w.dtype);
  if (s.empty() || fused(ex, {x, w, s, {}, DecodeEnd::add})) return;
  if (ex.device == Device::cuda) return product(ex, x, w, s, Accumulate::yes);
  product(ex, x, w, delta);
  add_rows(ex, s, delta, s);
}

}  // namespace sps::ops
