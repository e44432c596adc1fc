// The narrower of dy and x is operand A of the tile products (`tall`: its columns, transposed, are the rows
// of the sum), the wider one operand B (`wide`), because A costs three times as much to lay out. So the sum
// is dw or dw^T; it lives in f32 blocks of 32 x 32, four tiles each, small enough together for the
// second-level cache, and is written to dw at the end.
//
// A piece of work is a block of the sum and a range of rows. It takes kSpan rows at a time: lays both
// operands out for the tiles, then runs over its sum with them, asking meanwhile for the next rows from
// memory. Ranges of rows make separate sums, added in order; how many there are depends on the shape only.
#include "ops/linear/weight_gradient.h"

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

constexpr int64_t kSpan = 256;         // rows laid out at a time
constexpr int64_t kTallBlocks = 12;    // most blocks of a piece along the rows of the sum
constexpr int64_t kPieceBlocks = 160;  // most blocks of a piece: 640 KiB
constexpr int64_t kWideBlocks = 40;    // and along its columns
constexpr int64_t kRangeRows = 2048;   // fewest rows that pay for a separate sum
constexpr int64_t kPieces = 16;        // separate sums are made up to this number of pieces

__m512i unpack_words(__m512i a, __m512i b, bool high) {
  return high ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b);
}

// Operand B of 32 columns and 2 rows, which are interleaved. Unpacking within 128-bit lanes is the cheapest;
// it leaves columns 8i..8i+3 in the first tile and 8i+4..8i+7 in the second, which write_block() undoes.
[[gnu::always_inline]] inline void lay_out_wide(const bf16* from, int64_t stride, bf16* first, bf16* second) {
  const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + stride);
  _mm512_store_si512(first, unpack_words(a, b, false));
  _mm512_store_si512(second, unpack_words(a, b, true));
}

// Operand A of 32 rows by 8 columns: the transpose. Lane l of a vector starts with row 8l + i, eight columns,
// so that the rest is an 8 x 8 transposition within lanes.
[[gnu::always_inline]] inline void lay_out_tall(const bf16* from, int64_t stride, bf16* to) {
  __m512i v[8], w[8];
#pragma GCC unroll 8
  for (int64_t i = 0; i < 8; ++i) {
    const auto at = [&](int64_t lane) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + (8 * lane + i) * stride));
    };
    v[i] = _mm512_zextsi128_si512(at(0));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x00F0, at(1));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0x0F00, at(2));
    v[i] = _mm512_mask_broadcast_i32x4(v[i], 0xF000, at(3));
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < 8; i += 2) {
    w[i] = unpack_words(v[i], v[i + 1], false);     // columns 0..3 of two rows
    w[i + 1] = unpack_words(v[i], v[i + 1], true);  // columns 4..7
  }
#pragma GCC unroll 2
  for (int64_t half = 0; half < 2; ++half) {
    const __m512i first = _mm512_unpacklo_epi32(w[half], w[2 + half]);      // columns 0, 1 of rows 0..3
    const __m512i second = _mm512_unpackhi_epi32(w[half], w[2 + half]);     // columns 2, 3
    const __m512i third = _mm512_unpacklo_epi32(w[4 + half], w[6 + half]);  // columns 0, 1 of rows 4..7
    const __m512i fourth = _mm512_unpackhi_epi32(w[4 + half], w[6 + half]);
    bf16* row = to + 4 * half * kSide;
    _mm512_store_si512(row, _mm512_unpacklo_epi64(first, third));
    _mm512_store_si512(row + kSide, _mm512_unpackhi_epi64(first, third));
    _mm512_store_si512(row + 2 * kSide, _mm512_unpacklo_epi64(second, fourth));
    _mm512_store_si512(row + 3 * kSide, _mm512_unpackhi_epi64(second, fourth));
  }
}

inline void lay_out_wide_block(const bf16* from, int64_t stride, bf16* to) {
#pragma GCC unroll 4
  for (int64_t r = 0; r < kSide; r += 2)
    lay_out_wide(from + r * stride, stride, to + r * 16, to + kTileSize + r * 16);
}
inline void lay_out_tall_block(const bf16* from, int64_t stride, bf16* to) {
  for (int64_t c = 0; c < kSide; c += 8) lay_out_tall(from + c, stride, to + c * kSide);
}

// Lays out rows x cols elements as panels of 32 columns, each of ceil(rows / 32) blocks; zeros fill up.
template <class LayOut>
void lay_out(const bf16* from, int64_t stride, int64_t rows, int64_t cols, bf16* to, LayOut block) {
  const int64_t steps = ceil_div(rows, kSide);
  for (int64_t r = 0; r < rows; r += kSide)
    for (int64_t c = 0; c < cols; c += kSide) {
      bf16* at = to + (c / kSide * steps + r / kSide) * kBlockSize;
      const bf16* source = from + r * stride + c;
      const int64_t h = std::min(kSide, rows - r), w = std::min(kSide, cols - c);
      if (h == kSide && w == kSide) {
        block(source, stride, at);
        continue;
      }
      alignas(64) uint16_t padded[kBlockSize] = {};
      for (int64_t i = 0; i < h; ++i)
        std::memcpy(padded + i * kSide, source + i * stride, size_t(w) * sizeof(uint16_t));
      block(reinterpret_cast<const bf16*>(padded), kSide, at);
    }
}

class WeightGradient {
 public:
  WeightGradient(Tensor dy, Tensor x, Tensor dw)
      : transposed_(dy.cols > x.cols), tall_(transposed_ ? x : dy), wide_(transposed_ ? dy : x), dw_(dw) {
    tall_blocks_ = ceil_div(tall_.cols, kSide);
    wide_blocks_ = ceil_div(wide_.cols, kSide);
    tall_cuts_ = ceil_div(tall_blocks_, kTallBlocks);
    tall_piece_ = ceil_div(tall_blocks_, tall_cuts_);
    wide_cuts_ = ceil_div(wide_blocks_, std::min(kWideBlocks, kPieceBlocks / tall_piece_));
    wide_piece_ = ceil_div(wide_blocks_, wide_cuts_);
    const int64_t cuts = tall_cuts_ * wide_cuts_, rows = tall_.rows;
    ranges_ = std::clamp<int64_t>(kPieces / cuts, 1, std::max<int64_t>(rows / kRangeRows, 1));
    range_rows_ = ceil_div(ceil_div(rows, ranges_), kSpan) * kSpan;
    ranges_ = ceil_div(rows, range_rows_);
  }

  void run() {
    const int64_t sums = ranges_ > 1 ? ranges_ * tall_blocks_ * wide_blocks_ : 0;
    const size_t sums_bytes = size_t(sums * kBlockSize) * sizeof(float);
    const size_t own_bytes =
        size_t((tall_piece_ + wide_piece_) * kSpan * kSide) * sizeof(bf16) +
        (ranges_ > 1 ? 0 : size_t(tall_piece_ * wide_piece_ * kBlockSize) * sizeof(float));
    // The calling thread keeps the sums that are added up later in front of its own working memory.
    std::byte* shared = thread_scratch(ScratchSlot::gemm, sums_bytes + own_bytes);
    sums_ = reinterpret_cast<float*>(shared);
    const int caller = thread_index();
    parallel_for(tall_cuts_ * wide_cuts_ * ranges_, [&](int64_t i) {
      std::byte* own =
          thread_index() == caller ? shared + sums_bytes : thread_scratch(ScratchSlot::gemm, own_bytes);
      piece(i / ranges_, i % ranges_, own);
    });
    if (ranges_ == 1) return;
    parallel_for(tall_blocks_, [&](int64_t t) {
      for (int64_t w = 0; w < wide_blocks_; ++w) {
        float* total = sum_block(0, t, w);
        for (int64_t range = 1; range < ranges_; ++range) {
          const float* more = sum_block(range, t, w);
          for (int64_t i = 0; i < kBlockSize; i += 16)
            _mm512_store_ps(total + i, _mm512_load_ps(total + i) + _mm512_load_ps(more + i));
        }
        write_block(total, t, w);
      }
    });
  }

 private:
  float* sum_block(int64_t range, int64_t tall, int64_t wide) const {
    return sums_ + ((range * tall_blocks_ + tall) * wide_blocks_ + wide) * kBlockSize;
  }

  void piece(int64_t cut, int64_t range, std::byte* own) const {
    const int64_t tall_begin = cut % tall_cuts_ * tall_piece_, wide_begin = cut / tall_cuts_ * wide_piece_;
    const int64_t tall_count = std::min(tall_piece_, tall_blocks_ - tall_begin);
    const int64_t wide_count = std::min(wide_piece_, wide_blocks_ - wide_begin);
    if (tall_count <= 0 || wide_count <= 0) return;
    const int64_t tall_cols = std::min(tall_count * kSide, tall_.cols - tall_begin * kSide);
    const int64_t wide_cols = std::min(wide_count * kSide, wide_.cols - wide_begin * kSide);
    const bf16* tall = tall_.row<bf16>(0) + tall_begin * kSide;
    const bf16* wide = wide_.row<bf16>(0) + wide_begin * kSide;
    auto* a = reinterpret_cast<bf16*>(own);
    bf16* b = a + tall_piece_ * kSpan * kSide;
    auto* own_sum = reinterpret_cast<float*>(b + wide_piece_ * kSpan * kSide);
    const auto sum = [&](int64_t t, int64_t w) {
      return ranges_ > 1 ? sum_block(range, tall_begin + t, wide_begin + w)
                         : own_sum + (t * wide_piece_ + w) * kBlockSize;
    };

    const TileSession session;
    const int64_t begin = range * range_rows_, end = std::min(begin + range_rows_, tall_.rows);
    for (int64_t row = begin; row < end; row += kSpan) {
      const int64_t next = std::min(row + kSpan, end), steps = ceil_div(next - row, kSide);
      lay_out(tall + row * tall_.stride, tall_.stride, next - row, tall_cols, a, lay_out_tall_block);
      lay_out(wide + row * wide_.stride, wide_.stride, next - row, wide_cols, b, lay_out_wide_block);
      RowPrefetch tall_ahead(tall, tall_.stride, tall_cols, next, std::min(next + kSpan, end));
      RowPrefetch wide_ahead(wide, wide_.stride, wide_cols, next, std::min(next + kSpan, end));
      const int64_t all_steps = tall_count * wide_count * steps;
      const int64_t tall_lines = ceil_div(tall_ahead.lines(), all_steps);
      const int64_t wide_lines = ceil_div(wide_ahead.lines(), all_steps);
      for (int64_t w = 0; w < wide_count; ++w)
        for (int64_t t = 0; t < tall_count; ++t)
          multiply({a + t * steps * kBlockSize, kSide, kTileSize, kBlockSize}, b + w * steps * kBlockSize,
                   steps, sum(t, w), row != begin, [&] {
                     tall_ahead.some(tall_lines);
                     wide_ahead.some(wide_lines);
                   });
    }
    if (ranges_ > 1) return;
    for (int64_t t = 0; t < tall_count; ++t)
      for (int64_t w = 0; w < wide_count; ++w) write_block(sum(t, w), tall_begin + t, wide_begin + w);
  }

  // dw += a block of the sum.
  void write_block(const float* sum, int64_t tall, int64_t wide) const {
    alignas(64) float rows[kBlockSize], turned[kBlockSize];
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t r = 0; r < kSide; ++r) {
      const float* from = sum + r / 16 * 2 * kSumTile + r % 16 * 16;
      const __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + kSumTile);
      _mm512_store_ps(rows + r * kSide, _mm512_permutex2var_ps(a, first, b));
      _mm512_store_ps(rows + r * kSide + 16, _mm512_permutex2var_ps(a, second, b));
    }
    const float* block = rows;
    if (transposed_) {
      transpose(rows, kSide, turned, kSide, kSide, kSide);
      block = turned;
    }
    const int64_t row = (transposed_ ? wide : tall) * kSide, col = (transposed_ ? tall : wide) * kSide;
    const int64_t height = std::min(kSide, dw_.rows - row), width = std::min(kSide, dw_.cols - col);
    for (int64_t r = 0; r < height; ++r) {
      float* to = dw_.row<float>(row + r) + col;
      for_lanes(width, [&](int64_t i, auto mask) {
        store_lanes(to + i, load_lanes(to + i, mask) + load_lanes(block + r * kSide + i, mask), mask);
      });
    }
  }

  bool transposed_;  // the sum is dw^T
  Tensor tall_, wide_, dw_;
  int64_t tall_blocks_, wide_blocks_;                        // of the whole sum
  int64_t tall_cuts_, wide_cuts_, tall_piece_, wide_piece_;  // pieces along it; blocks of a piece along it
  int64_t ranges_, range_rows_;
  float* sums_ = nullptr;  // [ranges, tall_blocks, wide_blocks] blocks, if there is more than one range
};

}  // namespace

void weight_gradient_on_tiles(Tensor dy, Tensor x, Tensor dw) {
  WeightGradient(dy, x, dw).run();
}

}  // namespace sps::ops

#endif  // SPS_AMX
