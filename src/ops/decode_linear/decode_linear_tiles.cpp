// y^T = w x^T on AMX tiles: the weights are the left operand, whose tiles are loaded from where they lie; x
// is laid out once as the right one. A number of y is one sum over all of k in the tile unit's own order, in
// whatever column it stands, and zeros around the operands add nothing.
#include "ops/decode_linear/decode_linear_kernels.h"

#ifdef SPS_AMX

#include <algorithm>
#include <cstring>

#include "base/threads.h"
#include "ops/linear/row_product.h"
#include "ops/linear/transpose.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

using namespace tiles;

constexpr int64_t kChunk = 256;   // rows of x that are laid out at once: they stay in the second-level cache
constexpr int64_t kAhead = 32;    // cache lines of the next weights asked for at each step
constexpr int64_t kPieces = 128;  // most pieces of work

// A piece asks for the weights behind those that it multiplies, but knows nothing of the next piece, which
// may be another thread's. A beginning without foresight costs as much as several hundred lines, so where
// each weight is used once there are few pieces. No number depends on the piece that it is made in: here
// threads may be counted.
int64_t pieces_for(int64_t panels) {
  return panels > 1 ? kPieces : std::clamp<int64_t>(4 * thread_count(), 8, kPieces);
}

// With up to 16 rows of x, one tile is as wide as there are rows, and x lies in it as [k / 2][rows] pairs:
// next to nothing to lay out, where 32 columns of mostly zeros would be made by one thread and fetched by
// all.
constexpr int64_t kFew = 16;

class FewRowsSession {
 public:
  explicit FewRowsSession(int64_t rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (const int tile : {0, 2, 4, 5, 6}) {
      config.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? 64 : 4 * rows);
      config.rows[tile] = 16;
    }
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~FewRowsSession() { _tile_release(); }
  FewRowsSession(const FewRowsSession&) = delete;
  FewRowsSession& operator=(const FewRowsSession&) = delete;
};

// to [steps * 16, rows] pairs of neighbours along k, zeros behind the last.
void lay_out_few(Tensor x, int64_t steps, bf16* to) {
  const int64_t pairs = x.cols / 2;
  for (int64_t r = 0; r < x.rows; ++r) {
    const bf16* from = x.row<bf16>(r);
    for (int64_t i = 0; i < pairs; ++i)
      std::memcpy(to + 2 * (i * x.rows + r), from + 2 * i, 2 * sizeof(bf16));
    for (int64_t i = 2 * pairs; i < steps * kSide; ++i)
      to[2 * (i / 2 * x.rows + r) + i % 2] = i < x.cols ? from[i] : bf16(0.0F);
  }
}

// As multiply, with a panel of lay_out_few: the first and third tile of sums alone, in rows of 16.
template <class EachStep>
[[gnu::always_inline]] inline void multiply_few(RowsOfA a, const bf16* panel, int64_t rows, int64_t steps,
                                                float* sum, bool add, EachStep&& each_step) {
  asm volatile("" : : : "memory");  // the tile loads do not tell the compiler that they read memory
  if (add) {
    _tile_loadd(0, sum, 64);
    _tile_loadd(2, sum + 2 * kSumTile, 64);
  } else {
    _tile_zero(0);
    _tile_zero(2);
  }
  for (int64_t s = 0; s < steps; ++s, a.data += a.step, panel += kSide * rows) {
    _tile_loadd(4, a.data, a.stride * 2);
    _tile_loadd(6, panel, 4 * rows);
    _tile_loadd(5, a.data + a.second, a.stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    each_step();
  }
  _tile_stored(0, sum, 64);
  _tile_stored(2, sum + 2 * kSumTile, 64);
  asm volatile("" : : : "memory");
}

template <class Y>
void store(const float* sums, Tensor y, int64_t row, int64_t col) {
  alignas(64) float turned[kSumTile];
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t cols = std::min<int64_t>(16, y.cols - col - 16 * i);
    for (int64_t j = 0; j < 2; ++j) {
      const int64_t from = row + 16 * j, rows = std::min<int64_t>(16, y.rows - from);
      if (rows <= 0 || cols <= 0) continue;
      transpose_block(sums + (2 * i + j) * kSumTile, 16, turned, 16);
      for (int64_t r = 0; r < rows; ++r)
        store_lanes(y.row<Y>(from + r) + col + 16 * i, load_lanes(turned + 16 * r, AllLanes{}),
                    __mmask16((1U << cols) - 1));
    }
  }
}

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
        const auto product = [&](RowsOfA a, const bf16* b, int64_t count, bool add) {
          const auto each_step = [&] { ahead.some(kAhead); };
          if (count == 0) return;
          if constexpr (Few)
            multiply_few(a, b, x.rows, count, sums, add, each_step);
          else
            multiply(a, b, count, sums, add, each_step);
        };
        product({from, stride, 16 * stride, kSide}, panel, direct, false);
        product({padded, kSide, 16 * kSide, kSide}, panel + direct * panel_step, steps - direct, direct > 0);
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
