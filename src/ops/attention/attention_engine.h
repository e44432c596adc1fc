// Engines: matrix products of small tiles, and the memory layouts they want. The attention algorithm is
// written once over an engine.
//
// Every product is C (+)= A B with C [m, n] in f32, A [m, k] and B [k, n] in the engine's element type.
// Operand A is row-major. Operand B is row-major in F32Engine; in AmxEngine rows 2r and 2r+1 are interleaved
// column by column, as the tile instructions read it. In both, element (k, n) of a B with row stride ldb
// starts at k * ldb + n * kPack for even k. m and n are multiples of kPad, k too; what pads must be zero.
#pragma once

#include <cstring>

#include "base/bf16.h"
#include "ops/amx.h"
#include "ops/attention/attention_vec.h"
#include "ops/vec.h"

namespace sps::ops::attention {

constexpr int64_t kTile = 64;              // queries and keys of a tile
constexpr int64_t kBlock = 32;             // within a tile, work is skipped and masked in blocks of this size
constexpr int kVectors = kBlock / kLanes;  // the queries of a block

inline int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

inline bool is_finite_bits(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7F800000U) != 0x7F800000U;
}
inline bool is_finite_bits(bf16 x) {
  return (x.bits & 0x7F80U) != 0x7F80U;
}

template <class T>
bool all_finite(const T* x, int64_t n) {
  int bad = 0;
#pragma omp simd reduction(| : bad)
  for (int64_t i = 0; i < n; ++i) bad |= int(!is_finite_bits(x[i]));
  return bad == 0;
}

// to = x, rounded to nearest even (vec.h's conversion does not vectorise in loops that store bf16).
inline void round_to(bf16* to, Vec x) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  const WordVec u = (WordVec)x;
  const WordVec word = x == x ? u + 0x7FFFU + ((u >> 16) & 1U) : u | 0x400000U;
  const Halves halves = __builtin_convertvector(word >> 16, Halves);
  __builtin_memcpy(reinterpret_cast<uint16_t*>(to), &halves, sizeof halves);
#endif
}
inline void round_to(float* to, Vec x) {
  store(to, x);
}

// f32 products in registers: 8 rows of A against up to 3 vectors of B.
struct F32Engine {
  using Elem = float;
  static constexpr int64_t kPad = 16, kPack = 1;
  static constexpr int kExpDegree = 5;
  static constexpr bool kOneLayout = true;  // A and B of the same matrix are the same memory
  static constexpr int64_t kRowsAhead =
      96;  // to fetch in the backward pass, per block of queries and tile of keys

  struct Session {};  // nothing to set up on a thread

  template <bool kAdd>
  static void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
                      int64_t ldb, float* c, int64_t ldc) {
    for (int64_t j = 0; j < n;) {
      const int64_t left = (n - j) / kLanes, vectors = left == 3 || left > 4 ? kMost : left >= 2 ? 2 : 1;
      for (int64_t i = 0; i < m; i += kRows) {
        const float* ai = a + i * lda;
        float* ci = c + i * ldc + j;
        if (vectors == 3)
          block<3, kAdd>(k, ai, lda, b + j, ldb, ci, ldc);
        else if (vectors == 2)
          block<2, kAdd>(k, ai, lda, b + j, ldb, ci, ldc);
        else
          block<1, kAdd>(k, ai, lda, b + j, ldb, ci, ldc);
      }
      j += vectors * kLanes;
    }
  }

  // dst [padded_rows, padded_cols] = src [rows, cols] with zeros around it: operand A. False if there is an
  // infinity or NaN in it.
  template <class T>
  static bool load_rows(float* dst, const T* src, int64_t stride, int64_t rows, int64_t padded_rows,
                        int64_t cols, int64_t padded_cols) {
    for (int64_t r = 0; r < rows; ++r, dst += padded_cols) {
      const T* from = src + r * stride;
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) dst[c] = to_f32(from[c]);
      std::fill(dst + cols, dst + padded_cols, 0.0F);
    }
    std::fill(dst, dst + (padded_rows - rows) * padded_cols, 0.0F);
    return all_finite(dst - rows * padded_cols, rows * padded_cols);
  }
  // Other layouts of a matrix x [rows, cols] that load_rows made: B of x; B of its transpose, with row stride
  // kTile; A of its transpose, with row stride ld, given B of x. They return where it lies, in `space` or in
  // x itself.
  static const float* as_b(float*, const float* x, int64_t, int64_t) {
    return x;
  }
  static const float* transposed_b(float* space, const float* x, int64_t rows, int64_t cols) {
    transpose(reinterpret_cast<const uint32_t*>(x), cols, reinterpret_cast<uint32_t*>(space), kTile, rows,
              cols);
    return space;
  }
  static const float* transposed_a(float* space, int64_t ld, const float* b, int64_t rows, int64_t cols) {
    transpose(reinterpret_cast<const uint32_t*>(b), cols, reinterpret_cast<uint32_t*>(space), ld, rows, cols);
    return space;
  }

  // kBlock columns from c on of row r as A, or of rows r and r+1 as B (r even), of a matrix with row stride
  // ld.
  static void put_a(float* x, int64_t ld, int64_t r, int64_t c, const Vec (&row)[kVectors]) {
    for (int v = 0; v < kVectors; ++v) store(x + r * ld + c + v * kLanes, row[v]);
  }
  static void put_b(float* x, int64_t ld, int64_t r, int64_t c, const Vec (&row0)[kVectors],
                    const Vec (&row1)[kVectors]) {
    put_a(x, ld, r, c, row0);
    put_a(x, ld, r + 1, c, row1);
  }
  static float a_at(const float* a, int64_t lda, int64_t m, int64_t k) {
    return a[m * lda + k];
  }
  static float b_at(const float* b, int64_t ldb, int64_t k, int64_t n) {
    return b[k * ldb + n];
  }

 private:
#ifdef __AVX512F__
  static constexpr int64_t kRows = 8, kMost = 3;  // 24 sums in 32 registers
#else
  static constexpr int64_t kRows = 4, kMost = 2;  // 8 sums in 16 registers
#endif

  template <int kVectors, bool kAdd>
  static inline void block(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                           int64_t ldc) {
    Vec sum[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = kAdd ? load(c + r * ldc + v * kLanes) : Vec{};
    for (int64_t kk = 0; kk < k; ++kk) {
      Vec row[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) row[v] = load(b + kk * ldb + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec x = broadcast(a[r * lda + kk]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] += x * row[v];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(c + r * ldc + v * kLanes, sum[r][v]);
  }
};

#ifdef SPS_AMX

// bf16 products on AMX tiles: 2 x 2 blocks of 16 x 16 sums over steps of 32.
struct AmxEngine {
  using Elem = bf16;
  static constexpr int64_t kPad = 32, kPack = 2;
  static constexpr int kExpDegree = 4;  // probabilities are rounded to 8 bits
  static constexpr bool kOneLayout = false;
  // Few: rows on their way take the buffers that tile loads from the second-level cache need.
  static constexpr int64_t kRowsAhead = 24;

  using Session = TileSession;

  template <bool kAdd>
  static void product(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t lda, const bf16* b, int64_t ldb,
                      float* c, int64_t ldc) {
    asm volatile("" : : : "memory");  // the tile loads below do not tell the compiler that they read memory
    const int64_t a_bytes = lda * 2, b_bytes = ldb * 4, c_bytes = ldc * 4;
    for (int64_t i = 0; i < m; i += 32) {
      for (int64_t j = 0; j < n; j += 32) {
        float* c0 = c + i * ldc + j;
        float* c1 = c0 + 16 * ldc;
        if constexpr (kAdd) {
          _tile_loadd(0, c0, c_bytes);
          _tile_loadd(1, c0 + 16, c_bytes);
          _tile_loadd(2, c1, c_bytes);
          _tile_loadd(3, c1 + 16, c_bytes);
        } else {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        }
        for (int64_t kk = 0; kk < k; kk += 32) {
          const bf16* ak = a + i * lda + kk;
          const bf16* bk = b + kk * ldb + j * 2;
          _tile_loadd(4, ak, a_bytes);
          _tile_loadd(6, bk, b_bytes);
          _tile_loadd(7, bk + 32, b_bytes);
          _tile_loadd(5, ak + 16 * lda, a_bytes);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c0, c_bytes);
        _tile_stored(1, c0 + 16, c_bytes);
        _tile_stored(2, c1, c_bytes);
        _tile_stored(3, c1 + 16, c_bytes);
      }
    }
    asm volatile("" : : : "memory");
  }

  static bool load_rows(bf16* dst, const bf16* src, int64_t stride, int64_t rows, int64_t padded_rows,
                        int64_t cols, int64_t padded_cols) {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    __mmask32 bad = 0;
    for (int64_t r = 0; r < rows; ++r, dst += padded_cols) {
      const bf16* from = src + r * stride;
      int64_t c = 0;
      for (; c < cols; c += 32) {
        const __mmask32 there = cols - c >= 32 ? ~0U : (1U << (cols - c)) - 1;
        const __m512i x = _mm512_maskz_loadu_epi16(there, from + c);
        bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
        _mm512_storeu_si512(dst + c, x);
      }
      for (; c < padded_cols; ++c) dst[c] = bf16();
    }
    std::fill(dst, dst + (padded_rows - rows) * padded_cols, bf16());
    return bad == 0;
  }
  static const bf16* as_b(bf16* space, const bf16* x, int64_t rows, int64_t cols) {
    for (int64_t r = 0; r < rows; r += 2)
      for (int64_t c = 0; c < cols; c += 32) {
        const __m512i x0 = _mm512_loadu_si512(x + r * cols + c),
                      x1 = _mm512_loadu_si512(x + (r + 1) * cols + c);
        bf16* to = space + r * cols + c * 2;
        const __m512i low = _mm512_unpacklo_epi16(x0, x1), high = _mm512_unpackhi_epi16(x0, x1);
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        _mm512_storeu_si512(to, _mm512_permutex2var_epi64(low, first, high));
        _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi64(low, second, high));
      }
    return space;
  }
  // A pair of neighbours in a row of x is a word; the words of the transpose are what B wants.
  static const bf16* transposed_b(bf16* space, const bf16* x, int64_t rows, int64_t cols) {
    transpose(reinterpret_cast<const uint32_t*>(x), cols / 2, reinterpret_cast<uint32_t*>(space), kTile, rows,
              cols / 2);
    return space;
  }
  // In B of x a word holds two rows of one column, which are neighbours in a row of the transpose.
  static const bf16* transposed_a(bf16* space, int64_t ld, const bf16* b, int64_t rows, int64_t cols) {
    transpose(reinterpret_cast<const uint32_t*>(b), cols, reinterpret_cast<uint32_t*>(space), ld / 2,
              rows / 2, cols);
    return space;
  }

  static void put_a(bf16* x, int64_t ld, int64_t r, int64_t c, const Vec (&row)[kVectors]) {
    static_assert(kVectors == 2);
    _mm512_storeu_si512(x + r * ld + c, (__m512i)_mm512_cvtne2ps_pbh(row[1], row[0]));
  }
  static void put_b(bf16* x, int64_t ld, int64_t r, int64_t c, const Vec (&row0)[kVectors],
                    const Vec (&row1)[kVectors]) {
    typedef uint16_t Halves __attribute__((vector_size(64)));
    for (int v = 0; v < kVectors; ++v) {
      const Halves both = (Halves)_mm512_cvtne2ps_pbh(row1[v], row0[v]);  // row0, then row1
      const Halves mixed =
          __builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24,
                                  9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      _mm512_storeu_si512(x + r * ld + (c + v * kLanes) * 2, (__m512i)mixed);
    }
  }
  static float a_at(const bf16* a, int64_t lda, int64_t m, int64_t k) { return a[m * lda + k]; }
  static float b_at(const bf16* b, int64_t ldb, int64_t k, int64_t n) {
    return b[k / 2 * 2 * ldb + n * 2 + k % 2];
  }
};

#endif  // SPS_AMX

// C += A B without the terms for which visible(m, k, n) is false, for tiles that hold infinities or NaN: in
// them a probability of zero is not enough to silence a masked pair. C, A and B as in Engine::product.
template <class Engine, class Visible>
void product_of_visible(int64_t m, int64_t n, int64_t k, const typename Engine::Elem* a, int64_t lda,
                        const typename Engine::Elem* b, int64_t ldb, float* c, int64_t ldc,
                        Visible&& visible) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t kk = 0; kk < k; ++kk)
        if (visible(i, kk, j)) c[i * ldc + j] += Engine::a_at(a, lda, i, kk) * Engine::b_at(b, ldb, kk, j);
}

}  // namespace sps::ops::attention
