// c = a op(b) on AMX tiles for many rows, with work of the caller's on the blocks of c while they are in
// cache: the forward product of a layer, the gradient of its input, and what the next operation makes of
// either.
//
// b is laid out once, in panels of 32 columns. A piece of work is a chunk of rows and a group of units (the
// panels that the epilogue wants side by side) that stay in the second-level cache: 32 rows of a meet all
// units of the group before the next 32 rows. A block of 32 x 32 sums lives in tile registers over all of k.
// The core handles the block before, and asks memory for what comes next, while the tile unit multiplies:
// both the results and the next rows are many and far away.
#pragma once

#include "ops/amx.h"
#include "tensor/tensor.h"

#ifdef SPS_AMX

#include <algorithm>
#include <bit>

#include "base/threads.h"
#include "ops/linear/tiles.h"
#include "tensor/arena.h"

namespace sps::ops {

// Whether products of the rows of a are made here: bf16, enough rows, not too long a sum, and a machine with
// tiles.
bool row_product_is_fast(Tensor a);

// a [m, k] and b ([n, k] if b_transposed, else [k, n]) bf16; c [m, n] f32 or bf16; none empty. Only where
// row_product_is_fast(a). Uses ScratchSlot::gemm of every thread. Same bits whatever the number of threads,
// and for a row whatever the other rows.
void row_product_on_tiles(Tensor a, Tensor b, bool b_transposed, Tensor c, bool accumulate);

namespace tiles {

// b in panels of `steps` blocks, zeros around it, in parallel. to [panels * steps * kBlockSize].
void lay_out_panels(Tensor b, bool b_transposed, int64_t panels, int64_t steps, bf16* to);
// to [32, stride] = rows of a with zeros around them.
void pad_rows(const bf16* from, int64_t from_stride, int64_t rows, int64_t cols, bf16* to, int64_t stride);

// Where row r of a block of sums begins; its second half begins kSumTile later.
inline const float* sum_row(const float* sum, int64_t r) {
  return sum + r / 16 * 2 * kSumTile + r % 16 * 16;
}

// 32 values, rounded, as one store: half a cache line at a time, the second half would often find the line
// gone.
inline __m512i rounded(Lanes first, Lanes second) {
  return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}
inline __m512i rounded_row(const float* sum, int64_t r) {
  const float* from = sum_row(sum, r);
  return rounded(_mm512_load_ps(from), _mm512_load_ps(from + kSumTile));
}

// An Epilogue says what becomes of the sums:
//   kPanels                                     panels of a unit
//   int64_t panel(int64_t unit, int64_t j)      which they are
//   void row(const float* const* sums, int64_t row, int64_t unit, int64_t r)
//                                               takes row r of the unit's blocks, which is row `row` of c
//   void ahead(int64_t row, int64_t unit)       asks for what row() of this row and unit will touch
// It is copied for each piece of work. One that wants rows of c as a whole has besides:
//   void whole_row(int64_t row)                 called in order, once row() has taken all units of `row` and
//                                               before it takes the first of row + 64
//   int64_t granule()                           pieces of work begin at multiples of so many rows
//   size_t scratch_bytes()                      memory of a piece of work, a multiple of 64
//   void begin(int64_t row, std::byte* scratch) before anything else of a piece of work that begins at `row`
// and its ahead() asks for what whole_row() will touch in the unit's columns.
template <class Epilogue>
constexpr bool kTakesWholeRows = requires(Epilogue& e) {
  e.whole_row(int64_t{});
};

constexpr int64_t kGroupBytes = 3 << 18;  // of panels that are read again for each 32 rows

// Whether an epilogue may ask for whole rows: all panels stay in the second-level cache.
inline bool panels_stay_in_cache(int64_t n, int64_t k) {
  return ceil_div(n, kSide) * ceil_div(k, kSide) * kBlockSize * int64_t(sizeof(bf16)) <= kGroupBytes;
}

template <class Epilogue>
void row_product(Tensor a, Tensor b, bool b_transposed, int64_t n, int64_t units, const Epilogue& epilogue) {
  constexpr int64_t kChunk = 256;  // rows of a piece of work
  constexpr int64_t kPieces = 8;   // pieces of work wanted before chunks and groups are made larger
  constexpr int64_t kPanels = Epilogue::kPanels;
  constexpr bool kWholeRows = kTakesWholeRows<Epilogue>;

  const int64_t m = a.rows, k = a.cols;
  const int64_t panels = ceil_div(n, kSide), steps = ceil_div(k, kSide), panel_size = steps * kBlockSize;
  const size_t panels_bytes = size_t(panels * panel_size) * sizeof(bf16);
  const size_t padded_bytes = size_t(panel_size) * sizeof(bf16);
  size_t own_bytes = padded_bytes;
  if constexpr (kWholeRows) own_bytes += epilogue.scratch_bytes();
  // The calling thread keeps the panels in front of its own working memory: 32 rows of a with zeros around
  // them, then the epilogue's.
  std::byte* shared = thread_scratch(ScratchSlot::gemm, panels_bytes + own_bytes);
  auto* b_panels = reinterpret_cast<bf16*>(shared);
  const int caller = thread_index();
  lay_out_panels(b, b_transposed, panels, steps, b_panels);

  // Few chunks: smaller groups, so that all threads have work.
  int64_t chunk = kChunk;
  while (chunk > (kWholeRows ? kSide : 64) && ceil_div(m, chunk) < kPieces) chunk /= 2;
  if constexpr (kWholeRows) chunk = ceil_div(chunk, epilogue.granule()) * epilogue.granule();
  const int64_t chunks = ceil_div(m, chunk), wanted_groups = ceil_div(kPieces, chunks);
  const int64_t unit_bytes = kPanels * int64_t(padded_bytes);
  const int64_t group =
      kWholeRows ? units
                 : std::min(std::max<int64_t>(kGroupBytes / unit_bytes, 1), ceil_div(units, wanted_groups));

  parallel_for(chunks * ceil_div(units, group), [&](int64_t i) {
    const int64_t begin = i % chunks * chunk, end = std::min(begin + chunk, m);
    const int64_t first = i / chunks * group, last = std::min(first + group, units);
    std::byte* scratch =
        thread_index() == caller ? shared + panels_bytes : thread_scratch(ScratchSlot::gemm, own_bytes);
    auto* padded = reinterpret_cast<bf16*>(scratch);
    Epilogue own = epilogue;
    if constexpr (kWholeRows) own.begin(begin, scratch + padded_bytes);
    alignas(64) float space[2][kPanels][kBlockSize];
    const TileSession session;

    // The unit before: its sums, where it stands, and how many of its rows are done.
    const float* sums[kPanels] = {};
    int64_t done_row = 0, done_rows = 0, done_unit = 0, done = 0;
    const auto finish_rows = [&](int64_t count) {
      for (const int64_t stop = std::min(done + count, done_rows); done < stop; ++done)
        own.row(sums, done_row + done, done_unit, done);
    };
    // Rows before `taken` have met all units, those before `whole` have been handled as a whole.
    int64_t whole = begin, taken = begin;
    const auto finish_whole_rows = [&](int64_t count) {
      if constexpr (kWholeRows)
        for (const int64_t stop = std::min(whole + count, taken); whole < stop; ++whole) own.whole_row(whole);
    };
    // The unit before is done with.
    const auto finish_unit = [&] {
      finish_rows(kSide);
      if (!kWholeRows || done_unit + 1 < last) return;
      finish_whole_rows(kSide);
      taken = done_row + done_rows;
    };
    int parity = 0;
    for (int64_t row = begin; row < end; row += kSide) {
      const int64_t rows = std::min(kSide, end - row);
      RowsOfA from{a.row<bf16>(row), a.stride, 16 * a.stride, kSide};
      if (rows < kSide || k % kSide != 0) {
        const int64_t stride = steps * kSide;
        pad_rows(from.data, a.stride, rows, k, padded, stride);
        from = {padded, stride, 16 * stride, kSide};
      }
      RowPrefetch a_ahead(a.row<bf16>(0), a.stride, k, row + kSide, std::min(row + 2 * kSide, end));
      const int64_t calls = (last - first) * kPanels * steps;
      const int64_t lines = ceil_div(a_ahead.lines(), calls), rows_a_call = ceil_div(kSide, kPanels * steps);
      const int64_t whole_a_call = ceil_div(kSide, std::max<int64_t>(last - first - 1, 1) * kPanels * steps);
      for (int64_t unit = first; unit < last; ++unit, parity ^= 1) {
        // What the unit after this one writes, or what these rows as a whole will touch while the next 32 are
        // multiplied.
        const bool same_rows = kWholeRows || unit + 1 < last;
        const int64_t next_unit = kWholeRows ? unit : same_rows ? unit + 1 : first;
        int64_t next_row = same_rows ? row : row + kSide;
        const int64_t next_end = std::min(next_row + kSide, end);
        for (int64_t j = 0; j < kPanels; ++j)
          multiply(from, b_panels + own.panel(unit, j) * panel_size, steps, space[parity][j], false, [&] {
            finish_rows(rows_a_call);
            finish_whole_rows(whole_a_call);
            for (const int64_t stop = std::min(next_row + rows_a_call, next_end); next_row < stop; ++next_row)
              own.ahead(next_row, next_unit);
            a_ahead.some(lines);
          });
        finish_unit();
        for (int64_t j = 0; j < kPanels; ++j) sums[j] = space[parity][j];
        done_row = row, done_rows = rows, done_unit = unit, done = 0;
      }
    }
    finish_unit();
    finish_whole_rows(kSide);
  });
}

}  // namespace tiles
}  // namespace sps::ops

#endif
