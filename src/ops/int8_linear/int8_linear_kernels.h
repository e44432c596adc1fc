// The code behind int8_linear.h.
#pragma once

#include <bit>

#include "ops/amx.h"
#include "ops/int8_linear/int8_linear.h"
#include "ops/vec.h"

namespace sps::ops {

// to [kInt8Group] = values * scale, rounded to T.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
template <class T>
inline void dequantize_group(const int8_t* values, float scale, T* to) {
  for (int64_t i = 0; i < kInt8Group; i += kLanes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i));
    store_lanes(to + i, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)) * scale, AllLanes{});
  }
}
#else
template <class T>
inline void dequantize_group(const int8_t* values, float scale, T* to) {
  for (int64_t i = 0; i < kInt8Group; ++i) to[i] = from_f32<T>(float(values[i]) * scale);
}
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// Whole lines: a line that is written in two halves has often left the store buffer in between.
inline void dequantize_group(const int8_t* values, float scale, bf16* to) {
  const auto read = [&](int64_t i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)) * scale;
  };
  for (int64_t i = 0; i < kInt8Group; i += 2 * kLanes)
    _mm512_storeu_si512(to + i, std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(read(i + kLanes), read(i))));
}
#endif
inline void dequantize_group(const int8_t* values, float scale, double* to) {
  for (int64_t i = 0; i < kInt8Group; ++i) to[i] = double(values[i]) * double(scale);
}

#ifdef SPS_AMX
// bf16 on tiles, x of at most tiles::kFew rows. Uses ScratchSlot::gemm of the calling thread.
void int8_linear_on_tiles(Tensor x, const Int8Matrix& w, Tensor y);
#endif

}  // namespace sps::ops
