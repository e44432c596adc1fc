// y^T = w x^T on AMX tiles: the weights are the left operand, whose tiles are loaded from where they lie; x
// is laid out once as the right one. A number of y is one sum over all of k in the tile unit's own order, in
// whatever column it stands, and zeros around the operands add nothing.
#include "ops/decode_linear/decode_linear_kernels.h"

#ifdef SPS_AMX

#include <algorithm>

#include "base/threads.h"
#include "ops/decode_linear/few_rows.h"
#include "ops/linear/row_product.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

using namespace tiles;

constexpr int64_t kChunk = 256;  // rows of x that are laid out at once: they stay in the second-level cache
constexpr int64_t kAhead = 32;   // cache lines of the next weights asked for at each step

// Up to kChunk rows; up to kFew if `Few`.
template <bool Few>
void chunk_of_rows(Tensor x, Tensor w, Tensor y) {
  const int64_t k = x.cols, steps = ceil_div(k, kSide), whole = k / kSide;
  const int64_t panels = ceil_div(x.rows, kSide), units = ceil_div(w.rows, kSide);
  const int64_t panel_step = Few ? kSide * x.rows : kBlockSize, panel_size = steps * panel_step;
  const size_t panels_bytes = size_t(ceil_div(panels * panel_size, kSide) * kSide) * sizeof(bf16);
  const size_t own_bytes = size_t(steps * kBlockSize) * sizeof(bf16);
  // The calling thread keeps x in front of its own working memory: 32 rows of w with zeros around them.
  std::byte* shared = thread_scratch(ScratchSlot::gemm, panels_bytes + own_bytes);
  auto* x_panels = reinterpret_cast<bf16*>(shared);
  const int caller = thread_index();
  if constexpr (Few)
    lay_out_few(x, steps, x_panels);
  else
    lay_out_panels(x, true, panels, steps, x_panels);

  const int64_t group = ceil_div(units, pieces_for(panels));
  parallel_for(ceil_div(units, group), [&](int64_t piece) {
    auto* padded = reinterpret_cast<bf16*>(
        thread_index() == caller ? shared + panels_bytes : thread_scratch(ScratchSlot::gemm, own_bytes));
    alignas(64) float sums[kBlockSize] = {};
    const auto session = [&] {
      if constexpr (Few)
        return FewRowsSession(x.rows);
      else
        return TileSession();
    }();
    const int64_t first = piece * group, last = std::min(units, first + group);
    const auto rows_of = [&](int64_t unit) {
      const int64_t end = std::min(last * kSide, w.rows), row = std::min(unit * kSide, end);
      return RowPrefetch(w.as<bf16>(), w.stride, k, row, std::min(row + kSide, end));
    };
    RowPrefetch beginning = rows_of(first);
    beginning.some(beginning.lines());
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t col = unit * kSide, cols = std::min(kSide, w.rows - col);
      const bf16* from = w.row<bf16>(col);
      int64_t stride = w.stride, direct = whole;
      if (cols < kSide) {
        pad_rows(from, stride, cols, k, padded, steps * kSide);
        from = padded, stride = steps * kSide, direct = steps;
      } else if (whole < steps) {
        pad_rows(from + whole * kSide, stride, kSide, k - whole * kSide, padded, kSide);
      }
      RowPrefetch ahead = rows_of(unit + 1);
      for (int64_t p = 0; p < panels; ++p) {
        const bf16* panel = x_panels + p * panel_size;
        const bf16* behind = panel + direct * panel_step;  // what the padded rows are multiplied with
        tile_barrier();
        if constexpr (Few) {
          start_few();
          for (int64_t s = 0; s < direct; ++s) {
            step_few(from + s * kSide, stride, 16 * stride, panel + s * panel_step, x.rows);
            ahead.some(kAhead);
          }
          if (direct < steps) step_few(padded, kSide, 16 * kSide, behind, x.rows);
          finish_few(sums);
          tile_barrier();
        } else {
          if (direct > 0)
            multiply({from, stride, 16 * stride, kSide}, panel, direct, sums, false,
                     [&] { ahead.some(kAhead); });
          if (direct < steps)
            multiply({padded, kSide, 16 * kSide, kSide}, behind, 1, sums, direct > 0, [] {});
        }
        if (y.dtype == DType::bf16)
          store<bf16>(sums, y, p * kSide, col);
        else
          store<float>(sums, y, p * kSide, col);
      }
    }
  });
}

}  // namespace

void decode_linear_on_tiles(Tensor x, Tensor w, Tensor y) {
  if (x.rows <= kFew) return chunk_of_rows<true>(x, w, y);
  for (int64_t row = 0; row < x.rows; row += kChunk) {
    const int64_t rows = std::min(kChunk, x.rows - row);
    chunk_of_rows<false>(x.rows_from(row, rows), w, y.rows_from(row, rows));
  }
}

}  // namespace sps::ops

#endif
