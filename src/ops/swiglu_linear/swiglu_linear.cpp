#include "ops/swiglu_linear/swiglu_linear.h"

#include "ops/linear/linear.h"
#include "ops/linear/row_product.h"
#include "ops/rowwise.h"
#include "ops/swiglu/swiglu.h"
#include "ops/swiglu/swiglu_lanes.h"

namespace sps::ops {

#ifdef SPS_AMX

namespace {

using namespace tiles;

Lanes first_half(__m512i row) {
  return widen_bf16(_mm512_castsi512_si256(row));
}
Lanes second_half(__m512i row) {
  return widen_bf16(_mm512_extracti64x4_epi64(row, 1));
}

struct Forward {
  static constexpr int64_t kPanels = 2;  // of gate, of up
  Tensor gate_up, h;

  int64_t panel(int64_t unit, int64_t j) const { return unit + j * (h.cols / kSide); }
  void row(const float* const* sums, int64_t row, int64_t unit, int64_t r) const {
    bf16* gate = gate_up.row<bf16>(row) + unit * kSide;
    const __m512i g = rounded_row(sums[0], r), u = rounded_row(sums[1], r);
    _mm512_storeu_si512(gate, g);
    _mm512_storeu_si512(gate + h.cols, u);
    _mm512_storeu_si512(
        h.row<bf16>(row) + unit * kSide,
        rounded(swiglu_lanes(first_half(g), first_half(u)), swiglu_lanes(second_half(g), second_half(u))));
  }
  void ahead(int64_t, int64_t) const {}
};

struct Backward {
  static constexpr int64_t kPanels = 1;
  Tensor gate_up, d_gate_up, h;

  static int64_t panel(int64_t unit, int64_t) { return unit; }
  void row(const float* const* sums, int64_t row, int64_t unit, int64_t r) const {
    const int64_t width = gate_up.cols / 2;
    const bf16* gate = gate_up.row<bf16>(row) + unit * kSide;
    bf16* to = d_gate_up.row<bf16>(row) + unit * kSide;
    const __m512i g = _mm512_loadu_si512(gate), u = _mm512_loadu_si512(gate + width);
    const __m512i d = rounded_row(sums[0], r);  // dh as it would have been stored
    const SwigluGradient first = swiglu_gradient_lanes(first_half(g), first_half(u), first_half(d));
    const SwigluGradient second = swiglu_gradient_lanes(second_half(g), second_half(u), second_half(d));
    _mm512_storeu_si512(to, rounded(first.gate, second.gate));
    _mm512_storeu_si512(to + width, rounded(first.up, second.up));
    if (h)
      _mm512_storeu_si512(
          h.row<bf16>(row) + unit * kSide,
          rounded(swiglu_lanes(first_half(g), first_half(u)), swiglu_lanes(second_half(g), second_half(u))));
  }
  void ahead(int64_t row, int64_t unit) const {
    const bf16* gate = gate_up.row<bf16>(row) + unit * kSide;
    prefetch<true>(gate, kSide);
    prefetch<true>(gate + gate_up.cols / 2, kSide);
  }
};

}  // namespace

#endif

void swiglu_linear_forward(const Exec& ex, Tensor x, Tensor w, Tensor gate_up, Tensor h) {
#ifdef SPS_AMX
  if (ex.device == Device::cpu && row_product_is_fast(x) && gate_up.dtype == DType::bf16 &&
      h.cols % tiles::kSide == 0 && !h.empty()) {
    SPS_CHECK(w.dtype == x.dtype && h.dtype == gate_up.dtype && is_shape(w, gate_up.cols, x.cols));
    SPS_CHECK(is_shape(gate_up, x.rows, 2 * h.cols) && h.rows == x.rows);
    return tiles::row_product(x, w, true, w.rows, h.cols / tiles::kSide, Forward{gate_up, h});
  }
#endif
  linear_forward(ex, x, w, gate_up);
  swiglu_forward(ex, gate_up, h);
}

void swiglu_linear_backward(const Exec& ex, Tensor dy, Tensor w, Tensor gate_up, Tensor dh, Tensor d_gate_up,
                            Tensor h) {
#ifdef SPS_AMX
  if (ex.device == Device::cpu && row_product_is_fast(dy) && dh.dtype == DType::bf16 &&
      dh.cols % tiles::kSide == 0 && !dh.empty()) {
    SPS_CHECK(w.dtype == dy.dtype && gate_up.dtype == dh.dtype && d_gate_up.dtype == dh.dtype);
    SPS_CHECK(is_shape(w, dy.cols, dh.cols) && is_shape(gate_up, dy.rows, 2 * dh.cols));
    SPS_CHECK(is_shape(d_gate_up, dy.rows, 2 * dh.cols) && dh.rows == dy.rows);
    SPS_CHECK(h.empty() || (h.dtype == dh.dtype && is_shape(h, dh.rows, dh.cols)));
    return tiles::row_product(dy, w, false, dh.cols, dh.cols / tiles::kSide, Backward{gate_up, d_gate_up, h});
  }
#endif
  linear_backward_input(ex, dy, w, dh);
  swiglu_backward(ex, gate_up, dh, d_gate_up, h);
}

}  // namespace sps::ops
