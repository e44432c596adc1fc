// What the CPU kernels share: rows in f32 whatever they are stored as, and an exp that vectorises.
// Loops over these vectorise under `#pragma omp simd` (add `reduction(+ : s)` for sums, which allows
// reordering).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/bf16.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__)
// GCC 12 takes the intrinsics' "undefined" operands for uninitialised variables.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace sps::ops {

inline float to_f32(float x) {
  return x;
}
inline float to_f32(bf16 x) {
  return float(x);
}
// In loops write from_f32<bf16>(x), not bf16(x): GCC 12 keeps the unnamed object in memory and does not
// vectorise.
template <class T>
inline T from_f32(float x) {
  return T(x);
}

// exp(r) for |r| <= ln2 / 2, relative error 1.1e-7: 1 + r + r^2 (c2 + c3 r + c4 r^2 + c5 r^3), minimax by
// Remez.
template <class V>
inline V exp_polynomial(V r) {
  V p = r * 0.00831250101F + 0.0418903306F;
  p = p * r + 0.166671157F;
  p = p * r + 0.499992311F;
  p = p * r + 1.0F;
  return p * r + 1.0F;
}

// exp(x), relative error below 3e-7, for x in [-87, 88]; 0 below and clamped (no infinity) above; NaN stays
// NaN. 2^k * exp(r) with k = round(x / ln 2) and r = x - k ln 2, ln 2 in two parts. Adding 1.5 * 2^23 rounds
// and leaves k in the lowest bits. std::max and std::min become single instructions in a vectorised loop,
// nested ?: do not.
inline float fast_exp(float x) {
  constexpr float kRounder = 12582912.0F;
  const float c = std::min(std::max(x, -87.0F), 88.0F);  // both return their first argument if it is NaN
  const float t = c * 1.44269504F + kRounder, k = t - kRounder;
  const float r = (c - k * 0.693359375F) + k * 2.12194440e-4F;
  const float y = exp_polynomial(r) * std::bit_cast<float>((std::bit_cast<uint32_t>(t) << 23) + (127U << 23));
  return x < -87.0F ? 0.0F : y;
}

inline float fast_sigmoid(float x) {
  return 1.0F / (1.0F + fast_exp(-x));
}

// Asks for the cache lines of p[0 .. n), to be read or (Write) written soon. The hardware foresees long
// streams but not several short ones side by side, as in rows of a few kilobytes: fetching the next row piece
// by piece while this one is computed more than doubles the speed of a kernel that has much to compute.
template <bool Write = false, class T>
inline void prefetch(const T* p, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(p + i, Write ? 1 : 0);
}

// Element-wise kernels that are written once and run on `Lanes`: sixteen floats with AVX-512 (whose own
// rounding to bf16, reciprocal and scaling instructions a plain loop cannot reach), one float otherwise (the
// loop then vectorises by itself). The body is called as body(i, mask) for the elements i .. i + kLanes - 1
// that the mask keeps:
//   for_lanes(n, [&](int64_t i, auto mask) { store_lanes(y + i, load_lanes(x + i, mask) * 2.0F, mask); });
// sum_lanes adds up what its term returns, which must be 0 for numbers that the mask replaced by 0. A
// `reduction` loop adds the lanes of its last vector one after the other, which costs more than the rest of a
// short row.
struct AllLanes {};

#if defined(__AVX512BW__) && defined(__AVX512VL__)

using Lanes = __m512;
inline constexpr int64_t kLanes = 16;

inline Lanes load_lanes(const float* p, AllLanes) {
  return _mm512_loadu_ps(p);
}
inline Lanes load_lanes(const float* p, __mmask16 m) {
  return _mm512_maskz_loadu_ps(m, p);
}
inline void store_lanes(float* p, Lanes v, AllLanes) {
  _mm512_storeu_ps(p, v);
}
inline void store_lanes(float* p, Lanes v, __mmask16 m) {
  _mm512_mask_storeu_ps(p, m, v);
}

inline Lanes widen_bf16(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
// Rounds as bf16(float) does, but with AVX512_BF16 numbers below the normal range (1.2e-38) become 0.
inline __m256i narrow_bf16(Lanes v) {
#ifdef __AVX512BF16__
  return std::bit_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16));
#endif
}
inline Lanes load_lanes(const bf16* p, AllLanes) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Lanes load_lanes(const bf16* p, __mmask16 m) {
  return widen_bf16(_mm256_maskz_loadu_epi16(m, p));
}
inline void store_lanes(bf16* p, Lanes v, AllLanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(v));
}
inline void store_lanes(bf16* p, Lanes v, __mmask16 m) {
  _mm256_mask_storeu_epi16(p, m, narrow_bf16(v));
}

// a * b + c, rounded once: where kernels must agree to the bit, written out instead of left to the compiler,
// which may fuse a sum of two products either way, or not at all, wherever it inlines it.
inline Lanes mul_add(Lanes a, Lanes b, Lanes c) {
  return _mm512_fmadd_ps(a, b, c);
}
// v itself, which no compiler fuses into the sum that takes it.
inline Lanes rounded(Lanes v) {
  asm("" : "+v"(v));
  return v;
}

// As fast_exp(float), with the clamp above as an argument.
inline Lanes fast_exp(Lanes x, float most = 88.0F) {
  const Lanes c = _mm512_min_ps(_mm512_set1_ps(most), x);  // min gives its second argument for NaN
  const Lanes k = _mm512_roundscale_ps(c * 1.44269504F, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Lanes r = (c - k * 0.693359375F) + k * 2.12194440e-4F;
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(c, _mm512_set1_ps(-87.0F), _CMP_NLT_UQ), exp_polynomial(r),
                                k);
}
// As fast_sigmoid(float), relative error below 3e-7 for x >= -87 and 1.6e-38 below: the reciprocal is the
// 14-bit estimate and one Newton step, five times as fast as a division.
inline Lanes fast_sigmoid(Lanes x) {
  const Lanes d = 1.0F + fast_exp(-x, 87.0F);
  const Lanes y = _mm512_rcp14_ps(d);
  return y + y * (1.0F - d * y);
}

template <class Body>
inline void for_lanes(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, AllLanes{});
  if (i < n) body(i, __mmask16((1U << (n - i)) - 1));
}

template <class Term>
inline float sum_lanes(int64_t n, Term&& term) {
  Lanes a = _mm512_setzero_ps(), b = a;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    a += rounded(term(i, AllLanes{}));
    b += rounded(term(i + kLanes, AllLanes{}));
  }
  for_lanes(n - i, [&](int64_t j, auto mask) { a += rounded(term(i + j, mask)); });
  a += b;
  // By shuffles: under GCC 12 the intrinsic for it warns of an uninitialised operand.
  const auto eight = __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

#else

using Lanes = float;
inline constexpr int64_t kLanes = 1;

template <class T>
inline Lanes load_lanes(const T* p, AllLanes) {
  return to_f32(*p);
}
template <class T>
inline void store_lanes(T* p, Lanes v, AllLanes) {
  *p = from_f32<T>(v);
}

inline Lanes mul_add(Lanes a, Lanes b, Lanes c) {
  return a * b + c;
}

template <class Body>
inline void for_lanes(int64_t n, Body&& body) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) body(i, AllLanes{});
}

// v itself, which no compiler fuses into the sum that takes it.
inline Lanes rounded(Lanes v) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(v);
#elif __has_builtin(__arithmetic_fence)
  return __arithmetic_fence(v);
#else
  return v;
#endif
}

// In sixteen sums, whatever the width of the vectors that the compiler chooses for the term: it chooses by
// the types in it, and the same numbers must give the same sum wherever they are added up.
template <class Term>
inline float sum_lanes(int64_t n, Term&& term) {
  constexpr int64_t kSums = 16;
  float sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
#pragma omp simd
    for (int64_t j = 0; j < kSums; ++j) sums[j] += rounded(term(i + j, AllLanes{}));
  }
  for (int64_t j = 0; i < n; ++i, ++j) sums[j] += rounded(term(i, AllLanes{}));
  for (int64_t half = kSums / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

#endif

}  // namespace sps::ops
