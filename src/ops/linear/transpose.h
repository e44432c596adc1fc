// Transposition of matrices of 2- and 4-byte elements in vector registers: square blocks are read row by row,
// lanes are exchanged between rows in log2 steps, and the block is written row by row. Edges go element by
// element.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace sps::ops {

#ifdef __AVX512F__
inline constexpr int kWords = 16;
#else
inline constexpr int kWords = 8;
#endif
using Words = uint32_t __attribute__((vector_size(kWords * 4)));

// Exchanges the lanes with bit S set of row i with the lanes without it of row i + distance.
template <int S, size_t... J>
[[gnu::always_inline]] inline void exchange_lanes(Words& a, Words& b, std::index_sequence<J...>) {
  const Words low = __builtin_shufflevector(a, b, (J & S ? kWords + J - S : J)...);
  b = __builtin_shufflevector(a, b, (J & S ? kWords + J : J + S)...);
  a = low;
}
template <int S, int Distance, int Rows>
[[gnu::always_inline]] inline void exchange_step(Words* v) {
#pragma GCC unroll 32
  for (int i = 0; i < Rows; ++i)
    if ((i & Distance) == 0) exchange_lanes<S>(v[i], v[i + Distance], std::make_index_sequence<kWords>());
}

template <class T>
inline constexpr int kTransposeBlock = kWords* int(4 / sizeof(T));

// dst[c][r] = src[r][c] for a square block of kTransposeBlock<T>.
template <class T>
inline void transpose_block(const T* src, int64_t src_stride, T* dst, int64_t dst_stride) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 2);
  constexpr int n = kTransposeBlock<T>, pair = 4 / sizeof(T);  // elements in a 32-bit lane
  Words v[n];
#pragma GCC unroll 32
  for (int i = 0; i < n; ++i) std::memcpy(&v[i], src + i * src_stride, sizeof(Words));
  if constexpr (kWords == 16) exchange_step<8, 8 * pair, n>(v);
  exchange_step<4, 4 * pair, n>(v);
  exchange_step<2, 2 * pair, n>(v);
  exchange_step<1, 1 * pair, n>(v);
  if constexpr (pair == 2) {
#pragma GCC unroll 32
    for (int i = 0; i < n; i += 2) {
      const Words a = v[i], b = v[i + 1];
      v[i] = (a & 0xFFFFU) | (b << 16);
      v[i + 1] = (a >> 16) | (b & 0xFFFF0000U);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < n; ++i) std::memcpy(static_cast<void*>(dst + i * dst_stride), &v[i], sizeof(Words));
}

// dst[c][r] = src[r][c] for r < rows, c < cols.
template <class T>
void transpose(const T* src, int64_t src_stride, T* dst, int64_t dst_stride, int64_t rows, int64_t cols) {
  constexpr int n = kTransposeBlock<T>;
  for (int64_t r = 0; r < rows; r += n)
    for (int64_t c = 0; c < cols; c += n) {
      const T* from = src + r * src_stride + c;
      T* to = dst + c * dst_stride + r;
      if (r + n <= rows && c + n <= cols) {
        transpose_block(from, src_stride, to, dst_stride);
      } else {
        for (int64_t j = 0; j < n && c + j < cols; ++j)
          for (int64_t i = 0; i < n && r + i < rows; ++i) to[j * dst_stride + i] = from[i * src_stride + j];
      }
    }
}

}  // namespace sps::ops
