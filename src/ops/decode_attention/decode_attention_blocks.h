// One block of keys for the queries of a tile, on the CPU: scores, the softmax over what has been seen so
// far, and the weighted values. In vectors for any type; in bf16 on AMX tiles where there are any. Either way
// a query's bits depend on it and on the keys of the block that it sees alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/attention/attention_engine.h"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/dot_lanes.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops::decode_blocks {

constexpr int64_t kBlock = 64;  // keys

// Over the keys that a query has seen so far.
struct Softmax {
  float top, sum;
};

// out[n][j] = q[n] . k[j] for a <= j < b; q is padded with zeros, out has room for kFloats more.
template <class T, int N>
inline void scores(const float* q, int64_t q_stride, int64_t hd, const T* const* k, int64_t a, int64_t b,
                   float* out, int64_t out_stride) {
  const int64_t whole = hd / kFloats * kFloats;
  Floats sums[N][kFloats];
  for (int64_t from = a; from < b; from += kFloats) {
    const int64_t count = std::min<int64_t>(kFloats, b - from);
    for (int64_t j = 0; j < kFloats; ++j) {
      Floats sum[N] = {};
      if (j < count) {
        const T* key = k[from + j];
        for (int64_t d = 0; d < whole; d += kFloats) {
          const Floats v = load_floats(key + d);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sum[n] += v * load_floats(q + n * q_stride + d);
        }
        if (whole < hd) {
          const Floats v = load_floats(key + whole, hd - whole);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sum[n] += v * load_floats(q + n * q_stride + whole);
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n][j] = sum[n];
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_floats(out + n * out_stride + from, sums_of_vectors(sums[n]));
  }
}

// o[n] += sum over a <= j < b of p[n][j] v[j], Chunks vectors of columns at a time.
template <class T, int N, int Chunks>
[[gnu::always_inline]] inline void add_columns(const float* p, int64_t p_stride, const T* const* v, int64_t a,
                                               int64_t b, int64_t d, int64_t cols, float* o,
                                               int64_t o_stride) {
  Floats sum[N][Chunks];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c) sum[n][c] = load_floats(o + n * o_stride + d + c * kFloats);
  for (int64_t j = a; j < b; ++j) {
    Floats value[Chunks];
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c)
      value[c] = cols < kFloats ? load_floats(v[j] + d, cols) : load_floats(v[j] + d + c * kFloats);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int c = 0; c < Chunks; ++c) sum[n][c] += value[c] * p[n * p_stride + j];
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c) store_floats(o + n * o_stride + d + c * kFloats, sum[n][c]);
}
template <class T, int N>
inline void add_values(const float* p, int64_t p_stride, const T* const* v, int64_t a, int64_t b, int64_t hd,
                       float* o, int64_t o_stride) {
  int64_t d = 0;
  for (; d + 4 * kFloats <= hd; d += 4 * kFloats)
    add_columns<T, N, 4>(p, p_stride, v, a, b, d, kFloats, o, o_stride);
  for (; d < hd; d += kFloats)
    add_columns<T, N, 1>(p, p_stride, v, a, b, d, std::min<int64_t>(kFloats, hd - d), o, o_stride);
}

// Not inlined, nor are the weights: no compiler fuses a product here into a sum elsewhere.
[[gnu::noinline]] inline void scale_row(float* o, int64_t n, float factor) {
  if (factor == 1.0F) return;
  for (int64_t d = 0; d < n; ++d) o[d] *= factor;
}

inline float sum_of_lanes(Floats v) {
  for (int half = kFloats / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) v[l] += v[l + half];
  return v[0];
}
inline float largest_lane(Floats v) {
  for (int half = kFloats / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) v[l] = std::max(v[l], v[l + half]);
  return v[0];
}

// The scores p [kBlock] of keys [at.begin, at.end), which is not empty, become weights against the new top,
// those of other keys 0. Returns by what the sums so far are to be multiplied. NaN is no top, and stays NaN.
[[gnu::noinline]] inline float weights_of_block(float* p, KeyInterval at, Softmax& state) {
  Floats tops = state.top - Floats{};
  for (int64_t j = 0; j < kBlock; ++j)
    if (j < at.begin || j >= at.end) p[j] = -INFINITY;
  for (int64_t j = 0; j < kBlock; j += kFloats) {
    const Floats v = load_floats(p + j);
    tops = v > tops ? v : tops;
  }
  const float top = largest_lane(tops);
  // Where every score is -inf there is nothing to subtract; a NaN comes out as one either way.
  const float base = top == -INFINITY ? 0.0F : top;
  for_lanes(kBlock, [&](int64_t j, auto mask) {
    store_lanes(p + j, fast_exp(load_lanes(p + j, mask) - base), mask);
  });
  Floats sum = load_floats(p);
  for (int64_t j = kFloats; j < kBlock; j += kFloats) sum += load_floats(p + j);
  const float old = state.top == -INFINITY ? 0.0F : fast_exp(state.top - base);
  state = {top, std::fma(state.sum, old, sum_of_lanes(sum))};
  return old;
}

#ifdef SPS_AMX

// Queries are taken 32 at a time, or a few of them, on narrow tiles. Heads are padded to `width`, a multiple
// of 32 numbers; what is summed up has its columns in another order (in_order).
class Tiles {
 public:
  using Engine = attention::AmxEngine;
  static constexpr int64_t kQueries = 32;

  static size_t bytes(int64_t width) {
    return size_t((2 * kBlock * width + kQueries * kBlock) * 2 + 2 * kBlock * kQueries * 4);
  }
  // memory: bytes(width), whole lines of 64 bytes. queries: of the whole piece of work.
  Tiles(std::byte* memory, int64_t head_dim, int64_t width, int64_t queries)
      : head_dim_(head_dim), width_(width), few_(queries <= kFew ? queries : 0) {
    rows_ = reinterpret_cast<bf16*>(memory);
    v_ = rows_ + kBlock * width, p_ = v_ + kBlock * width;
    scores_ = reinterpret_cast<float*>(p_ + kQueries * kBlock), by_query_ = scores_ + kBlock * kQueries;
  }

  // Numbers that queries take in the layout that the scores want.
  static int64_t query_numbers(int64_t queries, int64_t width) {
    return (queries + kQueries - 1) / kQueries * attention::kTile * width;
  }
  // Of 32 queries or what is left of them; from(i): query i's numbers.
  template <class From>
  void load_queries(int64_t count, bf16* to, From&& from) {
    for (int64_t i = 0; i < count; ++i) load_row(rows_ + i * width_, from(i));
    if (few_ > 0) {  // pairs of numbers side by side
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < width_; c += 2)
          std::memcpy(to + c * count + 2 * i, rows_ + i * width_ + c, 2 * sizeof(bf16));
      return;
    }
    std::fill(rows_ + count * width_, rows_ + kQueries * width_, bf16());
    Engine::transposed_b(to, rows_, kQueries, width_);
  }

  // What the tile registers hold while blocks are attended to.
  TileShapes shapes() const {
    TileShapes s;
    if (few_ > 0)
      for (const int tile : {0, 1, 2}) s.row_bytes[tile] = uint16_t(4 * few_);
    if (few_ > 0)
      for (const int tile : {5, 6, 7}) s.rows[tile] = uint8_t(few_);
    return s;
  }

  // Keys and values of rows [begin, end) of the block; there are no others.
  void load_keys(int64_t begin, int64_t end, const bf16* const* k, const bf16* const* v) {
    begin_ = begin, end_ = end, values_ = v;
    bool regular = begin == 0 && end == kBlock && head_dim_ == width_;
    if (regular) k_ = k[0], k_stride_ = k[1] - k[0];
    for (int64_t j = 2; regular && j < kBlock; ++j) regular = k[j] == k_ + j * k_stride_;
    if (!regular) {
      std::fill(rows_, rows_ + begin * width_, bf16());
      for (int64_t j = begin; j < end; ++j) load_row(rows_ + j * width_, k[j]);
      std::fill(rows_ + end * width_, rows_ + kBlock * width_, bf16());
      k_ = rows_, k_stride_ = width_;
    }
    finite_ = load_values(v_, begin, end);
  }

  // Up to 32 queries, of which query i sees the keys inside(i) of the block: states[i] and o [32, width] go
  // on.
  template <class Inside>
  void attend(int64_t count, const bf16* q, float scale, Inside&& inside, Softmax* states, float* o) {
    scores(count, q);
    for (int64_t i = 0; i < count; ++i) {
      const KeyInterval at = inside(i);
      bf16* const weights = p_ + i * kBlock;
      if (at.begin >= at.end) {
        std::fill(weights, weights + kBlock, bf16());
        continue;
      }
      float* const s = by_query_ + i * kBlock;
      for (int64_t j = 0; j < kBlock; ++j) s[j] *= scale;
      scale_row(o + i * width_, width_, weights_of_block(s, at, states[i]));
      for_lanes(kBlock,
                [&](int64_t j, auto mask) { store_lanes(weights + j, load_lanes(s + j, mask), mask); });
    }
    if (!finite_) {
      for (int64_t i = 0; i < count; ++i) add_seen_values(i, inside(i), o + i * width_);
    } else if (few_ > 0) {
      add_few_values(p_, v_, o);
    } else {
      std::fill(p_ + count * kBlock, p_ + kQueries * kBlock, bf16());
      Engine::product<true>(kQueries, width_, kBlock, p_, kBlock, v_, width_, o, width_);
    }
  }

  // to [width] = a row of sums, with its columns in their own order.
  static void in_order(const float* from, int64_t width, float* to) {
    for (int64_t c = 0; c < width; c += 4)
      std::memcpy(to + c, from + c / 32 * 32 + c / 4 % 2 * 16 + c % 32 / 8 * 4, 4 * sizeof(float));
  }

 private:
  static constexpr int64_t kFew = 4;  // one position of a text

  bool load_row(bf16* to, const bf16* from) const {
    return Engine::load_rows(to, from, 0, 1, 1, head_dim_, width_);
  }

  // The values as an operand, of which neighbouring rows are interleaved: 8 numbers of both at a time, so
  // that of 32 columns first those come whose number has 4 clear, then the others. False if there is an
  // infinity or NaN among them.
  bool load_values(bf16* to, int64_t begin, int64_t end) const {
    const __m512i size = _mm512_set1_epi16(0x7FFF);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t c = 0; c < width_; c += 32) {
      const __mmask32 there = head_dim_ - c >= 32 ? ~0U : (1U << (head_dim_ - c)) - 1;
      const auto row = [&](int64_t j) {
        if (j < begin || j >= end) return _mm512_setzero_si512();
        const __m512i x = _mm512_maskz_loadu_epi16(there, values_[j] + c);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(x, size));
        return x;
      };
      for (int64_t j = 0; j < kBlock; j += 2) {
        const __m512i first = row(j), second = row(j + 1);
        _mm512_storeu_si512(to + j * width_ + c * 2, _mm512_unpacklo_epi16(first, second));
        _mm512_storeu_si512(to + j * width_ + c * 2 + 32, _mm512_unpackhi_epi16(first, second));
      }
    }
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7F80)) == 0;
  }

  // by_query_ = q k^T.
  void scores(int64_t count, const bf16* q) {
    if (few_ == 0) {
      Engine::product<false>(kBlock, kQueries, width_, k_, k_stride_, q, attention::kTile, scores_, kQueries);
      attention::transpose(reinterpret_cast<const uint32_t*>(scores_), kQueries,
                           reinterpret_cast<uint32_t*>(by_query_), kBlock, kBlock, kQueries);
      return;
    }
    float* const to = few_ == 1 ? by_query_ : scores_;
    few_scores(q, to);
    if (few_ == 1) return;
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < kBlock; ++j) by_query_[i * kBlock + j] = to[j * few_ + i];
  }

  // What Engine::product makes of its operands, on narrow tiles; every sum has the same terms in the same
  // order. to [64, few_].
  void few_scores(const bf16* q, float* to) const {
    asm volatile("" : : : "memory");
    for (int64_t j = 0; j < kBlock; j += 32) {
      const bf16* const k = k_ + j * k_stride_;
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t c = 0; c < width_; c += 32) {
        _tile_loadd(2, q + c * few_, 4 * few_);
        _tile_loadd(3, k + c, 2 * k_stride_);
        _tile_dpbf16ps(0, 3, 2);
        _tile_loadd(4, k + 16 * k_stride_ + c, 2 * k_stride_);
        _tile_dpbf16ps(1, 4, 2);
      }
      _tile_stored(0, to + j * few_, 4 * few_);
      _tile_stored(1, to + (j + 16) * few_, 4 * few_);
    }
    asm volatile("" : : : "memory");
  }
  // o += p v; as many rows of p and o as the registers hold.
  void add_few_values(const bf16* p, const bf16* v, float* o) const {
    asm volatile("" : : : "memory");
    const int64_t bytes = width_ * 4;
    for (int64_t c = 0; c < width_; c += 32) {
      _tile_loadd(5, o + c, bytes);
      _tile_loadd(6, o + c + 16, bytes);
      for (int64_t j = 0; j < kBlock; j += 32) {
        const bf16* const rows = v + j * width_ + c * 2;
        _tile_loadd(7, p + j, kBlock * 2);
        _tile_loadd(3, rows, bytes);
        _tile_dpbf16ps(5, 7, 3);
        _tile_loadd(4, rows + 32, bytes);
        _tile_dpbf16ps(6, 7, 4);
      }
      _tile_stored(5, o + c, bytes);
      _tile_stored(6, o + c + 16, bytes);
    }
    asm volatile("" : : : "memory");
  }

  // A weight of zero does not silence a value that is no number: the same product of one query's weights,
  // with zeros for the values that it does not see. Rare, so the memory for it is asked for here.
  void add_seen_values(int64_t i, KeyInterval at, float* o) const {
    if (at.begin >= at.end) return;
    constexpr int64_t kRows = 16;  // of a register, at most
    std::vector<bf16> v(size_t(kBlock * width_)), p(size_t(kRows * kBlock));
    std::vector<float> sum(size_t(kRows * width_));
    load_values(v.data(), std::max(at.begin, begin_), std::min(at.end, end_));
    std::copy_n(p_ + i * kBlock, kBlock, p.begin());
    std::copy_n(o, width_, sum.begin());
    add_few_values(p.data(), v.data(), sum.data());
    std::copy_n(sum.begin(), width_, o);
  }

  const int64_t head_dim_, width_, few_;  // queries of narrow tiles; 0: tiles are whole
  // Rows on their way [64, width], values as an operand, weights [32, 64].
  bf16 *rows_, *v_, *p_;
  float *scores_, *by_query_;  // [64, 32] and [32, 64]
  // The block's keys, and whether there are numbers alone among its values.
  const bf16* k_ = nullptr;
  int64_t k_stride_ = 0;
  const bf16* const* values_ = nullptr;
  int64_t begin_ = 0, end_ = 0;
  bool finite_ = true;
};

#endif  // SPS_AMX

}  // namespace sps::ops::decode_blocks
