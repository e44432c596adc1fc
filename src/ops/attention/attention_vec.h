// Vectors of floats for the attention kernels, in the compiler's vector extension so that one source serves
// every instruction set, and the two primitives worth more than that: exp2 and the 16 x 16 transpose.
#pragma once

#include <cstdint>

#include "ops/vec.h"  // before the intrinsics, whose warnings it turns off

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace sps::ops::attention {

#ifdef __AVX512F__
constexpr int kLanes = 16;
constexpr __mmask16 kAll = 0xFFFF;  // the unmasked forms warn of an uninitialised operand under GCC 12
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));

inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline IntVec load(const int32_t* p) {
  IntVec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) {
  __builtin_memcpy(p, &v, sizeof v);
}
inline Vec broadcast(float x) {
  return x - Vec{};
}
inline Vec greater(Vec a, Vec b) {
#ifdef __AVX512F__
  return _mm512_maskz_max_ps(kAll, a, b);
#else
  return a > b ? a : b;
#endif
}
// The greatest lane, in every lane.
inline Vec greatest(Vec v) {
#ifdef __AVX512F__
  v = greater(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = greater(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = greater(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return greater(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#else
  v = greater(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = greater(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return greater(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#endif
}

// 2^x to 8e-8 (degree 5) or 3e-6 (degree 4); 2^0 is exactly 1, far negative x and -inf give exactly 0, NaN
// stays NaN. x = k + r with k an integer and 0 <= r <= 1; a minimax polynomial for 2^r, by Remez.
template <int kDegree>
inline Vec exp2(Vec x) {
  static_assert(kDegree == 4 || kDegree == 5);
  static constexpr float kTerms[2][6] = {
      {1.0F, 0.693044845F, 0.241280205F, 0.0522424743F, 0.0134266843F},
      {1.0F, 0.693151312F, 0.24016445F, 0.0557999131F, 0.00901703029F, 0.00186713008F}};
  constexpr const float* kTerm = kTerms[kDegree - 4];
#ifdef __AVX512F__
  constexpr int kDown = 0x09;  // round down, silently; scalef rounds its exponent down too
  const Vec r = _mm512_maskz_reduce_ps(kAll, x, kDown);
#else
  const Vec kept = x, lowest = broadcast(-126.0F), highest = broadcast(127.0F);
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec shifted = (x - 0.5F) + kShift, r = x - (shifted - kShift);
  const WordVec exponent = ((WordVec)shifted - (WordVec)broadcast(kShift) + 127U) << 23;
#endif
  Vec p = broadcast(kTerm[kDegree]);
#pragma GCC unroll 8
  for (int t = kDegree - 1; t >= 0; --t) p = p * r + broadcast(kTerm[t]);
#ifdef __AVX512F__
  return _mm512_maskz_scalef_ps(kAll, p, x);
#else
  return kept < lowest ? Vec{} : p * (Vec)exponent;
#endif
}

// log2(x) for normal x > 0, to about 1e-7 or an ulp: the exponent and mantissa as they stand are within 0.09
// of it, and two of Halley's steps towards 2^y = x bring that to 1e-5 and to nothing.
inline Vec log2(Vec x) {
  constexpr float kTwiceLog2e = 2.88539008F;
  Vec y = __builtin_convertvector((IntVec)x, Vec) * 0x1p-23F - 127.0F;
  for (int step = 0; step < 2; ++step) {
    const Vec z = x * exp2<5>(-y);
    y += kTwiceLog2e * (z - 1.0F) / (z + 1.0F);
  }
  return y;
}

// dst[c][r] = src[r][c] for 32-bit words; rows and cols multiples of 16; strides in words.
inline void transpose(const uint32_t* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride,
                      int64_t rows, int64_t cols) {
#ifdef __AVX512F__
  typedef uint32_t Words __attribute__((vector_size(64)));
  const auto swap = [](Words& a, Words& b, Words to_a, Words to_b) {
    const auto of_both = [&](Words at) {
      return Words(_mm512_permutex2var_epi32(__m512i(a), __m512i(at), __m512i(b)));
    };
    const Words first = of_both(to_a);
    b = of_both(to_b);
    a = first;
  };
  for (int64_t r0 = 0; r0 < rows; r0 += 16) {
    for (int64_t c0 = 0; c0 < cols; c0 += 16) {
      Words w[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) __builtin_memcpy(&w[r], src + (r0 + r) * src_stride + c0, 64);
        // Exchange the off-diagonal halves of blocks of 16, 8, 4 and 2.
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r)
        swap(w[r], w[r + 8], Words{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
             Words{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r)
        swap(w[r / 4 * 8 + r % 4], w[r / 4 * 8 + r % 4 + 4],
             Words{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
             Words{4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r)
        swap(w[r / 2 * 4 + r % 2], w[r / 2 * 4 + r % 2 + 2],
             Words{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
             Words{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r)
        swap(w[r * 2], w[r * 2 + 1], Words{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
             Words{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
#pragma GCC unroll 16
      for (int c = 0; c < 16; ++c) __builtin_memcpy(dst + (c0 + c) * dst_stride + r0, &w[c], 64);
    }
  }
#else
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = 0; r < rows; ++r) dst[c * dst_stride + r] = src[r * src_stride + c];
#endif
}

}  // namespace sps::ops::attention
