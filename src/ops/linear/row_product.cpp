// b is laid out once, in panels of 32 columns. A piece of work is a chunk of rows and a group of panels that
// stay in the second-level cache: 32 rows of a meet all panels of the group before the next 32 rows. A block
// of 32 x 32 sums lives in tile registers over all of k and is rounded once.
#include "ops/linear/row_product.h"

#ifdef SPS_AMX

#include <algorithm>
#include <cstring>

#include "base/threads.h"
#include "ops/linear/tiles.h"
#include "ops/linear/transpose.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

using namespace tiles;

constexpr int64_t kChunk = 256;           // rows of a piece of work
constexpr int64_t kGroupBytes = 3 << 18;  // of panels that are read again for each 32 rows
constexpr int64_t kPieces = 8;            // pieces of work wanted before chunks and groups are made larger

// to [32, 32] = from [rows, cols] with zeros around it.
void pad_block(const bf16* from, int64_t stride, int64_t rows, int64_t cols, bf16* to, int64_t to_stride) {
  for (int64_t r = 0; r < kSide; ++r) {
    auto* row = static_cast<void*>(to + r * to_stride);
    if (r >= rows || cols < kSide) std::memset(row, 0, kSide * sizeof(bf16));
    if (r < rows) std::memcpy(row, from + r * stride, size_t(cols) * sizeof(bf16));
  }
}

// Operand B of a dense block [k, n]: rows 2r and 2r+1 interleaved.
void lay_out(const bf16* block, bf16* to) {
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t r = 0; r < kSide; r += 2) {
    const __m512i a = _mm512_load_si512(block + r * kSide), b = _mm512_load_si512(block + (r + 1) * kSide);
    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    _mm512_store_si512(to + r * 16, _mm512_permutex2var_epi64(low, first, high));
    _mm512_store_si512(to + kTileSize + r * 16, _mm512_permutex2var_epi64(low, second, high));
  }
}
// Of a dense block [n, k]: a pair of neighbours in a row is a word, and the words are transposed.
void lay_out_transposed(const bf16* block, bf16* to) {
  const auto* words = reinterpret_cast<const uint32_t*>(block);
  auto* tiles = reinterpret_cast<uint32_t*>(to);
  transpose_block(words, kSide / 2, tiles, 16);
  transpose_block(words + 16 * kSide / 2, kSide / 2, tiles + kTileSize / 2, 16);
}

// to [rows, cols] (+)= sum.
template <class T>
void write_block(const float* sum, T* to, int64_t stride, int64_t rows, int64_t cols, bool accumulate) {
  for (int64_t r = 0; r < rows; ++r, to += stride) {
    const float* from = sum + r / 16 * 2 * kSumTile + r % 16 * 16;
    for_lanes(cols, [&](int64_t i, auto mask) {
      const Lanes v = load_lanes(from + i / 16 * kSumTile, mask);
      store_lanes(to + i, accumulate ? load_lanes(to + i, mask) + v : v, mask);
    });
  }
}

}  // namespace

void row_product_on_tiles(Tensor a, Tensor b, bool b_transposed, Tensor c, bool accumulate) {
  const int64_t m = a.rows, n = c.cols, k = a.cols;
  const int64_t panels = ceil_div(n, kSide), steps = ceil_div(k, kSide), panel_size = steps * kBlockSize;
  const size_t panels_bytes = size_t(panels * panel_size) * sizeof(bf16);
  const size_t own_bytes = size_t(panel_size) * sizeof(bf16);
  // The calling thread keeps the panels in front of its own working memory: 32 rows of a with zeros around
  // them.
  std::byte* shared = thread_scratch(ScratchSlot::gemm, panels_bytes + own_bytes);
  auto* b_panels = reinterpret_cast<bf16*>(shared);
  const int caller = thread_index();

  parallel_for(panels, [&](int64_t p) {
    alignas(64) uint16_t space[kBlockSize];
    auto* block = reinterpret_cast<bf16*>(space);
    const int64_t col = p * kSide, cols = std::min(kSide, n - col);
    for (int64_t s = 0; s < steps; ++s) {
      const int64_t row = s * kSide, rows = std::min(kSide, k - row);
      bf16* to = b_panels + p * panel_size + s * kBlockSize;
      if (b_transposed) {
        pad_block(b.row<bf16>(col) + row, b.stride, cols, rows, block, kSide);
        lay_out_transposed(block, to);
      } else {
        pad_block(b.row<bf16>(row) + col, b.stride, rows, cols, block, kSide);
        lay_out(block, to);
      }
    }
  });

  // Few chunks: smaller groups, so that all threads have work.
  int64_t chunk = kChunk;
  while (chunk > 64 && ceil_div(m, chunk) < kPieces) chunk /= 2;
  const int64_t chunks = ceil_div(m, chunk), wanted_groups = ceil_div(kPieces, chunks);
  const int64_t fitting = std::max<int64_t>(kGroupBytes / int64_t(size_t(panel_size) * sizeof(bf16)), 1);
  const int64_t group = std::min(fitting, ceil_div(panels, wanted_groups));
  parallel_for(chunks * ceil_div(panels, group), [&](int64_t i) {
    const int64_t begin = i % chunks * chunk, end = std::min(begin + chunk, m);
    const int64_t first = i / chunks * group, last = std::min(first + group, panels);
    auto* padded = reinterpret_cast<bf16*>(
        thread_index() == caller ? shared + panels_bytes : thread_scratch(ScratchSlot::gemm, own_bytes));
    alignas(64) float sum[kBlockSize];
    const TileSession session;
    for (int64_t row = begin; row < end; row += kSide) {
      const int64_t rows = std::min(kSide, end - row);
      RowsOfA from{a.row<bf16>(row), a.stride, 16 * a.stride, kSide};
      if (rows < kSide || k % kSide != 0) {
        const int64_t stride = steps * kSide;
        for (int64_t s = 0; s < steps; ++s)
          pad_block(from.data + s * kSide, a.stride, rows, std::min(kSide, k - s * kSide), padded + s * kSide,
                    stride);
        from = {padded, stride, 16 * stride, kSide};
      }
      for (int64_t p = first; p < last; ++p) {
        multiply(from, b_panels + p * panel_size, steps, sum, false, [] {});
        const int64_t col = p * kSide, cols = std::min(kSide, n - col);
        if (c.dtype == DType::bf16)
          write_block(sum, c.row<bf16>(row) + col, c.stride, rows, cols, accumulate);
        else
          write_block(sum, c.row<float>(row) + col, c.stride, rows, cols, accumulate);
      }
    }
  });
}

}  // namespace sps::ops

#endif  // SPS_AMX
