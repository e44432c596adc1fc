#include "ops/linear/row_product.h"

#ifdef SPS_AMX

#include <cstring>

#include "ops/linear/gemm.h"
#include "ops/linear/transpose.h"

namespace sps::ops {

namespace tiles {

bool usable() {
  return cpu_multiplies_bf16() && amx_permitted();
}

namespace {

// to [32, 32] = from [rows, cols] with zeros around it.
void pad_block(const bf16* from, int64_t stride, int64_t rows, int64_t cols, bf16* to, int64_t to_stride) {
  for (int64_t r = 0; r < kSide; ++r) {
    auto* row = static_cast<void*>(to + r * to_stride);
    if (r >= rows || cols < kSide) std::memset(row, 0, kSide * sizeof(bf16));
    if (r < rows) std::memcpy(row, from + r * stride, size_t(cols) * sizeof(bf16));
  }
}

// Operand B of a block [k, n]: rows 2r and 2r+1 interleaved.
void lay_out(const bf16* block, int64_t stride, bf16* to) {
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t r = 0; r < kSide; r += 2) {
    const __m512i a = _mm512_loadu_si512(block + r * stride);
    const __m512i b = _mm512_loadu_si512(block + (r + 1) * stride);
    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    _mm512_store_si512(to + r * 16, _mm512_permutex2var_epi64(low, first, high));
    _mm512_store_si512(to + kTileSize + r * 16, _mm512_permutex2var_epi64(low, second, high));
  }
}
// Of a block [n, k] of even stride: a pair of neighbours in a row is a word, and the words are transposed.
void lay_out_transposed(const bf16* block, int64_t stride, bf16* to) {
  const auto* words = reinterpret_cast<const uint32_t*>(block);
  auto* tiles = reinterpret_cast<uint32_t*>(to);
  transpose_block(words, stride / 2, tiles, 16);
  transpose_block(words + 16 * stride / 2, stride / 2, tiles + kTileSize / 2, 16);
}

// c (+)= the sums.
template <class T>
struct Store {
  static constexpr int64_t kPanels = 1;
  Tensor c;
  bool accumulate;

  static int64_t panel(int64_t unit, int64_t) { return unit; }
  void row(const float* const* sums, int64_t row, int64_t unit, int64_t r) const {
    T* to = c.row<T>(row) + unit * kSide;
    const int64_t cols = std::min(kSide, c.cols - unit * kSide);
    if constexpr (sizeof(T) == 2)
      if (cols == kSide && !accumulate) return _mm512_storeu_si512(to, rounded_row(sums[0], r));
    const float* from = sum_row(sums[0], r);
    for_lanes(cols, [&](int64_t i, auto mask) {
      const Lanes v = load_lanes(from + i / 16 * kSumTile, mask);
      store_lanes(to + i, accumulate ? load_lanes(to + i, mask) + v : v, mask);
    });
  }
  void ahead(int64_t row, int64_t unit) const { prefetch<true>(c.row<T>(row) + unit * kSide, kSide); }
};

}  // namespace

void lay_out_panels(Tensor b, bool b_transposed, int64_t panels, int64_t steps, bf16* to) {
  const int64_t n = b_transposed ? b.rows : b.cols, k = b_transposed ? b.cols : b.rows;
  parallel_for(panels, [&](int64_t p) {
    alignas(64) uint16_t space[kBlockSize];
    auto* padded = reinterpret_cast<bf16*>(space);
    const int64_t col = p * kSide, cols = std::min(kSide, n - col);
    for (int64_t s = 0; s < steps; ++s) {
      const int64_t row = s * kSide, rows = std::min(kSide, k - row);
      const bf16* block = b_transposed ? b.row<bf16>(col) + row : b.row<bf16>(row) + col;
      int64_t stride = b.stride;
      if (rows < kSide || cols < kSide || (b_transposed && stride % 2 != 0)) {
        pad_block(block, stride, b_transposed ? cols : rows, b_transposed ? rows : cols, padded, kSide);
        block = padded, stride = kSide;
      }
      bf16* at = to + (p * steps + s) * kBlockSize;
      b_transposed ? lay_out_transposed(block, stride, at) : lay_out(block, stride, at);
    }
  });
}

void pad_rows(const bf16* from, int64_t from_stride, int64_t rows, int64_t cols, bf16* to, int64_t stride) {
  for (int64_t c = 0; c < stride; c += kSide)
    pad_block(from + c, from_stride, rows, std::min(kSide, cols - c), to + c, stride);
}

}  // namespace tiles

bool row_product_is_fast(Tensor a) {
  constexpr int64_t kFewestRows = 32;  // for fewer, laying out b does not pay
  constexpr int64_t kMostK = 4096;     // k is not cut
  return a.dtype == DType::bf16 && a.rows >= kFewestRows && a.cols > 0 && a.cols <= kMostK && tiles::usable();
}

void row_product_on_tiles(Tensor a, Tensor b, bool b_transposed, Tensor c, bool accumulate) {
  const int64_t units = tiles::ceil_div(c.cols, tiles::kSide);
  if (c.dtype == DType::bf16)
    tiles::row_product(a, b, b_transposed, c.cols, units, tiles::Store<bf16>{c, accumulate});
  else
    tiles::row_product(a, b, b_transposed, c.cols, units, tiles::Store<float>{c, accumulate});
}

}  // namespace sps::ops

#endif  // SPS_AMX
