// A chunk of keys and values on tensor cores, bf16: scores are k q^T, 16 keys to a tile and 8 queries beside
// each other, sums are v^T w^T, 16 columns of the values to a tile and the same 8 queries. So one query costs
// what eight do, and the weights pass from one product to the other within a warp.
//
// Of a lane, with g = lane / 4 and t = 2 (lane % 4): the numbers of a product are those of row g (0, 1) and
// row g + 8 (2, 3) in the columns t and t + 1, which are queries.
#pragma once

#include "ops/attention/attention_tensor_cores.cuh"
#include "ops/decode_attention/decode_attention_cuda.cuh"

namespace sps::ops::decode {

using attention::MatrixAddress;

constexpr int kKeyTiles = kChunk / 16;

// Operand b of the scores: to[k][0 .. 1] is columns 16 k .. 16 k + 15 of this lane's query, zeros where there
// is none. kGlobal: in global memory, written by an earlier kernel of the step; else in shared memory.
template <int D, bool kGlobal>
__device__ inline void load_query(const bf16* q, bool live, int head_dim, uint32_t (&to)[D / 16][2]) {
  const int column = 2 * (int(threadIdx.x) & 3);
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = 16 * k + 8 * half + column;
      to[k][half] = 0;
      if (!live || c >= head_dim) continue;
      const auto* pair = reinterpret_cast<const unsigned*>(q + c);
      to[k][half] = kGlobal ? __ldcg(pair) : *pair;
    }
}

// Scores of kTiles tiles of keys from row `first` on against kQueries tiles of queries, as dot products.
template <int D, int kTiles, int kQueries>
__device__ inline void dot_products(const MatrixAddress<D>& at_k, int first,
                                    const uint32_t (&q)[kQueries][D / 16][2],
                                    float (&s)[kTiles][kQueries][4]) {
  attention::clear(s);
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      uint32_t a[4];
      load_matrices(a, at_k.at(first + 16 * m, k));
#pragma unroll
      for (int n = 0; n < kQueries; ++n) multiply_add(s[m][n], a, q[n][k][0], q[n][k][1]);
    }
}

// From dot products to scores; -inf where the key, position first_key + row, is not seen. seen[n][e]: of this
// lane's query e of tile n.
template <int kTiles, int kQueries>
__device__ inline void mask_and_scale(float (&s)[kTiles][kQueries][4], float scale,
                                      const Interval (&seen)[kQueries][2], int first_key) {
  const int g = (int(threadIdx.x) & 31) / 4;
#pragma unroll
  for (int n = 0; n < kQueries; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int begin = seen[n][e].begin - first_key - g;
      const auto count = unsigned(max(seen[n][e].end - seen[n][e].begin, 0));
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[m][n][2 * half + e];
          x = unsigned(16 * m + 8 * half - begin) < count ? __fmul_rn(x, scale) : -INFINITY;
        }
    }
}

// The same where all keys are seen.
template <int kTiles, int kQueries>
__device__ inline void scale_scores(float (&s)[kTiles][kQueries][4], float scale) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int n = 0; n < kQueries; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][n][i] = __fmul_rn(s[m][n][i], scale);
}

// Largest score of each of this lane's queries over the warp's keys.
template <int kTiles, int kQueries>
__device__ inline void tops_of(const float (&s)[kTiles][kQueries][4], float (&top)[kQueries][2]) {
#pragma unroll
  for (int n = 0; n < kQueries; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float x = -INFINITY;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) x = fmaxf(x, fmaxf(s[m][n][e], s[m][n][e + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0U, x, step));
      top[n][e] = x;
    }
}

// Operand b of the sums over 16 keys: 2^(score - top), rounded to bf16.
__device__ inline void weights_of(const float (&s)[4], const float (&base)[2], uint32_t (&w)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    w[half] = transpose_matrix(pack_bf16(fast_exp2(__fsub_rn(s[2 * half], base[0])),
                                         fast_exp2(__fsub_rn(s[2 * half + 1], base[1]))));
}

// Sums over the chunk of weighted values, of 16 columns from 16 `block` on.
template <int D, int kQueries>
__device__ inline void weighted_values(const MatrixAddress<D>& at_v, int block,
                                       const uint32_t (&w)[kKeyTiles][kQueries][2],
                                       float (&sum)[kQueries][4]) {
#pragma unroll
  for (int n = 0; n < kQueries; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
#pragma unroll
  for (int k = 0; k < kKeyTiles; ++k) {
    uint32_t a[4];
    load_matrices_transposed(a, at_v.at(16 * k, block));
#pragma unroll
    for (int n = 0; n < kQueries; ++n) multiply_add(sum[n], a, w[k][n][0], w[k][n][1]);
  }
}
// The sums of the weights themselves: values that are all 1. Every row is the same.
template <int kQueries>
__device__ inline void sums_of_weights(const uint32_t (&w)[kKeyTiles][kQueries][2],
                                       float (&sum)[kQueries][4]) {
  constexpr uint32_t kOnes = 0x3F803F80U;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
  for (int n = 0; n < kQueries; ++n) {
    sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) multiply_add(sum[n], ones, w[k][n][0], w[k][n][1]);
  }
}

// Adds the values that are not finite, which have been taken out of the tile, for the queries that see them.
// where(key of the chunk) is the row of `values`, or kNowhere.
template <int kQueries, class Where>
__device__ inline void add_nonfinite(const RowSource<bf16>& values, Where&& where, int block, int first_key,
                                     const Interval (&seen)[kQueries][2], float (&sum)[kQueries][4]) {
  const int g = (int(threadIdx.x) & 31) / 4;
#pragma unroll 1
  for (int r = 0; r < kChunk; ++r) {
    const int at = where(r);
    if (at == kNowhere) continue;
    const bf16* v = values.row(at);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = 16 * block + 8 * half + g;
      bf16 number{};
      if (d < values.head_dim) number.bits = __ldcg(&v[d].bits);
      const float x = to_float(number);
      if (isfinite(x)) continue;
#pragma unroll
      for (int n = 0; n < kQueries; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (seen[n][e].has(first_key + r)) sum[n][2 * half + e] += x;
    }
  }
}

}  // namespace sps::ops::decode
