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

// Sixteen values of row r of a block of sums, rounded as if they had been stored in between.
__m256i rounded(const float* sum, int64_t r, int64_t half) {
  return narrow_bf16(load_lanes(sum_row(sum, r) + half * kSumTile, AllLanes{}));
}

struct Forward {
  static constexpr int64_t kPanels = 2;  // of gate, of up
  Tensor gate_up, h;

  int64_t panel(int64_t unit, int64_t j) const { return unit + j * (h.cols / kSide); }
  void row(const float* const* sums, int64_t row, int64_t unit, int64_t r) const {
    bf16* gate = gate_up.row<bf16>(row) + unit * kSide;
    bf16* to = h.row<bf16>(row) + unit * kSide;
    for (int64_t half = 0; half < 2; ++half, gate += 16, to += 16) {
      const __m256i g = rounded(sums[0], r, half), u = rounded(sums[1], r, half);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(gate), g);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(gate + h.cols), u);
      store_lanes(to, swiglu_lanes(widen_bf16(g), widen_bf16(u)), AllLanes{});
    }
  }
  void ahead(int64_t, int64_t) const {}
};

struct Backward {
  static constexpr int64_t kPanels = 1;
  Tensor gate_up, d_gate_up;

  static int64_t panel(int64_t unit, int64_t) { return unit; }
  void row(const float* const* sums, int64_t row, int64_t unit, int64_t r) const {
    const int64_t width = gate_up.cols / 2;
    const bf16* gate = gate_up.row<bf16>(row) + unit * kSide;
    bf16* to = d_gate_up.row<bf16>(row) + unit * kSide;
    for (int64_t half = 0; half < 2; ++half, gate += 16, to += 16) {
      const SwigluGradient d =
          swiglu_gradient_lanes(load_lanes(gate, AllLanes{}), load_lanes(gate + width, AllLanes{}),
                                widen_bf16(rounded(sums[0], r, half)));
      store_lanes(to, d.gate, AllLanes{});
      store_lanes(to + width, d.up, AllLanes{});
    }
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
  if (row_product_is_fast(x) && gate_up.dtype == DType::bf16 && h.cols % tiles::kSide == 0 && !h.empty()) {
    SPS_CHECK(w.dtype == x.dtype && h.dtype == gate_up.dtype && is_shape(w, gate_up.cols, x.cols));
    SPS_CHECK(is_shape(gate_up, x.rows, 2 * h.cols) && h.rows == x.rows);
    return tiles::row_product(x, w, true, w.rows, h.cols / tiles::kSide, Forward{gate_up, h});
  }
#endif
  linear_forward(ex, x, w, gate_up);
  swiglu_forward(ex, gate_up, h);
}

void swiglu_linear_backward(const Exec& ex, Tensor dy, Tensor w, Tensor gate_up, Tensor dh,
                            Tensor d_gate_up) {
#ifdef SPS_AMX
  if (row_product_is_fast(dy) && dh.dtype == DType::bf16 && dh.cols % tiles::kSide == 0 && !dh.empty()) {
    SPS_CHECK(w.dtype == dy.dtype && gate_up.dtype == dh.dtype && d_gate_up.dtype == dh.dtype);
    SPS_CHECK(is_shape(w, dy.cols, dh.cols) && is_shape(gate_up, dy.rows, 2 * dh.cols));
    SPS_CHECK(is_shape(d_gate_up, dy.rows, 2 * dh.cols) && dh.rows == dy.rows);
    return tiles::row_product(dy, w, false, dh.cols, dh.cols / tiles::kSide, Backward{gate_up, d_gate_up});
  }
#endif
  linear_backward_input(ex, dy, w, dh);
  swiglu_backward(ex, gate_up, dh, d_gate_up);
}

}  // namespace sps::ops
