// One pass over memory each. The exponential and its reciprocal take as long as the memory does, so that
// fetching the next row while this one is computed pays; see vec.h.
#include "ops/rowwise.h"
#include "ops/swiglu/swiglu_kernels.h"
#include "ops/swiglu/swiglu_lanes.h"

namespace sps::ops {

namespace {

template <class Act>
void forward_piece(const Act* gate, const Act* up, Act* h, int64_t n) {
  for_lanes(n, [&](int64_t c, auto mask) {
    store_lanes(h + c, swiglu_lanes(load_lanes(gate + c, mask), load_lanes(up + c, mask)), mask);
  });
}

template <class Act>
void backward_piece(const Act* gate, const Act* up, const Act* dh, Act* dgate, Act* dup, Act* h, int64_t n) {
  for_lanes(n, [&](int64_t c, auto mask) {
    const auto g = load_lanes(gate + c, mask), u = load_lanes(up + c, mask);
    const SwigluGradient d = swiglu_gradient_lanes(g, u, load_lanes(dh + c, mask));
    if (h != nullptr) store_lanes(h + c, swiglu_lanes(g, u), mask);
    store_lanes(dgate + c, d.gate, mask);
    store_lanes(dup + c, d.up, mask);
  });
}

// Elements of each array that are fetched at a time: whole cache lines, few enough for the fill buffers.
constexpr int64_t kPiece = 128;

// Calls row(r, next) for all rows, next being the row that will follow (r itself at the end).
template <class Row>
void for_rows(int64_t rows, int64_t width, Row&& row) {
  parallel_chunks(rows, chunk_rows(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) row(r, std::min(r + 1, rows - 1));
  });
}

// Calls piece(c, n) for the pieces of a row.
template <class Piece>
void for_pieces(int64_t width, Piece&& piece) {
  for (int64_t c = 0; c < width; c += kPiece) piece(c, std::min(kPiece, width - c));
}

}  // namespace

void swiglu_forward_cpu(Tensor gate_up, Tensor h) {
  const int64_t width = h.cols;
  with_type(h.dtype, [&](auto zero) {
    using Act = decltype(zero);
    for_rows(h.rows, width, [&](int64_t r, int64_t next) {
      const Act *gate = gate_up.row<Act>(r), *next_gate = gate_up.row<Act>(next);
      Act *hr = h.row<Act>(r), *next_h = h.row<Act>(next);
      for_pieces(width, [&](int64_t c, int64_t n) {
        prefetch(next_gate + c, n);
        prefetch(next_gate + width + c, n);
        prefetch<true>(next_h + c, n);
        forward_piece(gate + c, gate + width + c, hr + c, n);
      });
    });
  });
}

void swiglu_backward_cpu(Tensor gate_up, Tensor dh, Tensor d_gate_up, Tensor h) {
  const int64_t width = dh.cols;
  with_type(dh.dtype, [&](auto zero) {
    using Act = decltype(zero);
    for_rows(dh.rows, width, [&](int64_t r, int64_t next) {
      const Act *gate = gate_up.row<Act>(r), *next_gate = gate_up.row<Act>(next);
      const Act *dhr = dh.row<Act>(r), *next_dh = dh.row<Act>(next);
      Act *dgate = d_gate_up.row<Act>(r), *next_dgate = d_gate_up.row<Act>(next);
      Act* hr = h.empty() ? nullptr : h.row<Act>(r);
      for_pieces(width, [&](int64_t c, int64_t n) {
        prefetch(next_gate + c, n);
        prefetch(next_gate + width + c, n);
        prefetch(next_dh + c, n);
        prefetch<true>(next_dgate + c, n);
        prefetch<true>(next_dgate + width + c, n);
        backward_piece(gate + c, gate + width + c, dhr + c, dgate + c, dgate + width + c,
                       hr == nullptr ? nullptr : hr + c, n);
      });
    });
  });
}

}  // namespace sps::ops
