// What the CPU kernels made of dot products share: vectors of floats in the compiler's vector extension, and
// the sums of as many vectors as one has lanes, all at once. Every dot product is added up in the same order,
// wherever it stands among the others.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "base/bf16.h"
#include "ops/vec.h"

namespace sps::ops {

#ifdef __AVX512F__
inline constexpr int kFloats = 16;
#else
inline constexpr int kFloats = 8;
#endif
typedef float Floats __attribute__((vector_size(4 * kFloats)));

[[gnu::always_inline]] inline Floats load_floats(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
[[gnu::always_inline]] inline Floats load_floats(const bf16* p) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return load_lanes(p, AllLanes{});  // GCC 12 widens a vector of its own in two halves
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kFloats)));
  typedef uint32_t Words __attribute__((vector_size(4 * kFloats)));
  Halves half;
  std::memcpy(&half, p, sizeof half);
  return reinterpret_cast<Floats>(__builtin_convertvector(half, Words) << 16);
#endif
}
// The first n numbers at p, zeros behind them.
template <class T>
[[gnu::always_inline]] inline Floats load_floats(const T* p, int64_t n) {
  T padded[kFloats] = {};
  std::memcpy(static_cast<void*>(padded), p, size_t(n) * sizeof(T));
  return load_floats(padded);
}
[[gnu::always_inline]] inline void store_floats(float* p, Floats v) {
  std::memcpy(p, &v, sizeof v);
}

namespace dot_lanes {
// Lane l: where bit `Half` of l is clear, the two lanes of a that differ in that bit; else those of b.
template <int Half, size_t... L>
[[gnu::always_inline]] inline Floats fold(Floats a, Floats b, std::index_sequence<L...>) {
  return __builtin_shufflevector(a, b, (L & Half ? kFloats + L : L)...) +
         __builtin_shufflevector(a, b, (L & Half ? kFloats + L - Half : L + Half)...);
}
template <int Half>
[[gnu::always_inline]] inline void fold_all(Floats* v) {
#pragma GCC unroll 16
  for (int i = 0; i < Half; ++i) v[i] = fold<Half>(v[i], v[i + Half], std::make_index_sequence<kFloats>());
  if constexpr (Half > 1) fold_all<Half / 2>(v);
}
}  // namespace dot_lanes

// Lane l is the sum of the lanes of v[l], l < kFloats. v is used up.
[[gnu::always_inline]] inline Floats sums_of_vectors(Floats* v) {
  dot_lanes::fold_all<kFloats / 2>(v);
  return v[0];
}

}  // namespace sps::ops
