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
#include <utility>

#include "base/threads.h"
#include "ops/linear/transpose.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

constexpr int64_t kSide = 32;                  // rows and columns of a block of the sum: 2 x 2 tiles
constexpr int64_t kBlockSize = kSide * kSide;  // elements of a block, of the sum or of an operand
constexpr int64_t kTileSize = 512;             // bf16 elements of a tile
constexpr int64_t kSpan = 256;                 // rows laid out at a time
constexpr int64_t kTallBlocks = 12;            // most blocks of a piece along the rows of the sum
constexpr int64_t kPieceBlocks = 160;          // most blocks of a piece: 640 KiB
constexpr int64_t kRangeRows = 2048;           // fewest rows that pay for a separate sum
constexpr int64_t kPieces = 16;                // separate sums are made up to this number of pieces

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

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

// Rows to lay out as an operand: whole blocks of 32 x 32, or what is left of them with zeros around it.
struct Source {
  const bf16* data = nullptr;
  int64_t stride = 0, rows = 0, cols = 0;
  int64_t ahead = 0;  // elements from here to what is laid out one span later, asked for in passing

  int64_t steps() const { return ceil_div(rows, kSide); }
  bool whole() const { return rows % kSide == 0 && cols % kSide == 0; }
  // A copy with the zeros, in `space` [steps * 32, blocks of cols * 32].
  Source padded(bf16* space) const {
    const int64_t height = steps() * kSide, width = ceil_div(cols, kSide) * kSide;
    std::memset(static_cast<void*>(space), 0, size_t(height * width) * sizeof(bf16));
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(static_cast<void*>(space + r * width), data + r * stride, size_t(cols) * sizeof(bf16));
    return {space, width, height, width, 0};
  }
};

// Both kinds of layout are done in small portions between tile instructions, which leave the rest of the core
// idle. A panel of B: its first tiles, then its second ones.
class WidePanel {
 public:
  WidePanel() = default;
  WidePanel(const Source& s, bf16* to)
      : from_(s.data),
        stride_(s.stride),
        ahead_(s.ahead),
        pairs_(s.rows / 2),
        first_(to),
        second_(to + s.rows * 16) {}
  [[gnu::always_inline]] void some(int64_t pairs) {
    for (; pairs > 0 && pairs_ > 0; --pairs, --pairs_) {
      _mm_prefetch(from_ + ahead_, _MM_HINT_T1);
      _mm_prefetch(from_ + ahead_ + stride_, _MM_HINT_T1);
      lay_out_wide(from_, stride_, first_, second_);
      from_ += 2 * stride_;
      first_ += kSide;
      second_ += kSide;
    }
  }
  void rest() { some(pairs_); }

 private:
  const bf16* from_ = nullptr;
  int64_t stride_ = 0, ahead_ = 0, pairs_ = 0;
  bf16 *first_ = nullptr, *second_ = nullptr;
};

// All panels of A: blocks of two tiles each. A portion is 32 rows by 8 columns.
class TallPanels {
 public:
  TallPanels() = default;
  TallPanels(const Source& s, bf16* to)
      : s_(s), steps_(s.steps()), left_(s.cols / 8 * steps_), from_(s.data), to_(to) {}
  int64_t left() const { return left_; }
  [[gnu::always_inline]] void one() {
    const bf16* wanted = from_ - quarter_ * 8 + s_.ahead + quarter_ * 8 * s_.stride;
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i) _mm_prefetch(wanted + i * s_.stride, _MM_HINT_T1);
    lay_out_tall(from_, s_.stride, to_);
    to_ += 8 * kSide;
    from_ += 8;
    --left_;
    if (++quarter_ < 4) return;
    quarter_ = 0;
    from_ += kSide * s_.stride - kSide;
    if (++step_ < steps_) return;
    step_ = 0;
    from_ += kSide - s_.rows * s_.stride;
  }
  void rest() {
    while (left_ > 0) one();
  }

 private:
  Source s_;
  int64_t steps_ = 0, left_ = 0, quarter_ = 0, step_ = 0;
  const bf16* from_ = nullptr;
  bf16* to_ = nullptr;
};

// A block of the sum += a panel of A times a panel of B, both of `steps` blocks. It starts at 0 if `first`.
template <class EachStep>
[[gnu::always_inline]] inline void multiply(const bf16* a, const bf16* b, float* sum, int64_t steps,
                                            bool first, EachStep&& each_step) {
  asm volatile("" : : : "memory");  // the tile loads do not tell the compiler that they read memory
  constexpr int64_t kSumTile = 256;
  const bf16* b2 = b + steps * kTileSize;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sum, 64);
    _tile_loadd(1, sum + kSumTile, 64);
    _tile_loadd(2, sum + 2 * kSumTile, 64);
    _tile_loadd(3, sum + 3 * kSumTile, 64);
  }
  for (int64_t s = 0; s < steps; ++s, a += kBlockSize, b += kTileSize, b2 += kTileSize) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b2, 64);
    _tile_loadd(5, a + kTileSize, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    each_step();
  }
  _tile_stored(0, sum, 64);
  _tile_stored(1, sum + kSumTile, 64);
  _tile_stored(2, sum + 2 * kSumTile, 64);
  _tile_stored(3, sum + 3 * kSumTile, 64);
  asm volatile("" : : : "memory");
}

class WeightGradient {
 public:
  WeightGradient(Tensor dy, Tensor x, Tensor dw)
      : transposed_(dy.cols > x.cols), tall_(transposed_ ? x : dy), wide_(transposed_ ? dy : x), dw_(dw) {
    tall_blocks_ = ceil_div(tall_.cols, kSide);
    wide_blocks_ = ceil_div(wide_.cols, kSide);
    tall_cuts_ = ceil_div(tall_blocks_, kTallBlocks);
    tall_piece_ = ceil_div(tall_blocks_, tall_cuts_);
    wide_cuts_ = ceil_div(wide_blocks_, kPieceBlocks / tall_piece_);
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
        size_t((3 * tall_piece_ + 3) * kSpan * kSide) * sizeof(bf16) +
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
    // Two of each operand: one is multiplied while the next is laid out.
    auto* space = reinterpret_cast<bf16*>(own);
    const auto take = [&](int64_t elements) { return std::exchange(space, space + elements); };
    const int64_t tall_size = tall_piece_ * kSpan * kSide;
    bf16* const a[2] = {take(tall_size), take(tall_size)};
    bf16* const b[2] = {take(kSpan * kSide), take(kSpan * kSide)};
    bf16 *const a_padded = take(tall_size), *const b_padded = take(kSpan * kSide);
    auto* own_sum = reinterpret_cast<float*>(space);
    const auto sum = [&](int64_t t, int64_t w) {
      return ranges_ > 1 ? sum_block(range, tall_begin + t, wide_begin + w)
                         : own_sum + (t * wide_piece_ + w) * kBlockSize;
    };

    const int64_t begin = range * range_rows_, end = std::min(begin + range_rows_, tall_.rows);
    const auto source = [&](const Tensor& t, int64_t row, int64_t col, int64_t cols) -> Source {
      const int64_t rows = std::min(kSpan, end - row);
      return {t.row<bf16>(row) + col, t.stride, rows, cols, row + 2 * kSpan <= end ? kSpan * t.stride : 0};
    };
    const auto tall_panels = [&](int64_t row, bf16* to) {
      if (row >= end) return TallPanels();
      const Source s = source(tall_, row, tall_begin * kSide, tall_cols);
      return TallPanels(s.whole() ? s : s.padded(a_padded), to);
    };
    const auto wide_panel = [&](int64_t row, int64_t w, bf16* to) {
      if (row >= end) return WidePanel();
      const Source s = source(wide_, row, (wide_begin + w) * kSide, std::min(kSide, wide_cols - w * kSide));
      return WidePanel(s.whole() ? s : s.padded(b_padded), to);
    };

    const TileSession session;
    int a_now = 0, b_now = 0;
    tall_panels(begin, a[0]).rest();
    wide_panel(begin, 0, b[0]).rest();
    const int64_t pairs = ceil_div(kSide / 2, tall_count);
    for (int64_t row = begin; row < end; row += kSpan) {
      const int64_t steps = ceil_div(std::min(kSpan, end - row), kSide);
      TallPanels next_tall = tall_panels(row + kSpan, a[1 - a_now]);
      int64_t due = 0;
      for (int64_t w = 0; w < wide_count; ++w) {
        WidePanel next_wide = w + 1 < wide_count ? wide_panel(row, w + 1, b[1 - b_now])
                                                 : wide_panel(row + kSpan, 0, b[1 - b_now]);
        for (int64_t t = 0; t < tall_count; ++t)
          multiply(a[a_now] + t * steps * kBlockSize, b[b_now], sum(t, w), steps, row == begin, [&] {
            next_wide.some(pairs);
            // Four portions of A per step and block of A, spread over the blocks of B.
            for (due += 4; due >= wide_count; due -= wide_count)
              if (next_tall.left() > 0) next_tall.one();
          });
        next_wide.rest();
        b_now = 1 - b_now;
      }
      next_tall.rest();
      a_now = 1 - a_now;
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
      const float* from = sum + r / 16 * 512 + r % 16 * 16;
      const __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 256);
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
