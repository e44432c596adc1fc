// Sums of products of a warp: eight rows of weights (features) and up to kRows rows of x along a stretch of
// k. How the numbers of a sum are taken together depends on their places along k alone.
//
// A chunk is 128 bytes of each row. A lane, with g = lane / 4 and t = lane % 4, has of a chunk of weights
// bytes 16 t .. 16 t + 15 of each half of row g, and reads of rows of x the bytes at the same places: which
// of the lane's numbers meet in one instruction does not matter as long as both sides agree.
#pragma once

#include "ops/cuda.cuh"
#include "ops/ptx.cuh"

namespace sps::ops::decode_product {

constexpr int kChunkBytes = 128, kHalf = kChunkBytes / 2, kVectorBytes = 16;
constexpr int kFeatures = 8;  // of a warp
template <class T>
constexpr int kChunk = kChunkBytes / int(sizeof(T));

// Rows of x in shared memory, kChunkBytes and a half more apart in their banks: eight lanes that read two
// rows side by side meet no bank twice.
struct SharedRows {
  const unsigned char* data;
  int rows, row_bytes;
  __device__ uint4 at(int row, int byte) const {
    return *reinterpret_cast<const uint4*>(data + row * row_bytes + byte);
  }
};

template <class T, int kRows>
struct Sums;

template <int kRows>
struct Sums<bf16, kRows> {
  static_assert(kRows <= 8);  // of a left operand's sixteen; the others are zero
  float sum[2][4] = {};

  // `byte` is where this chunk begins in the rows of x. Rows that x does not have are the last one again.
  __device__ void add(const uint4 (&w)[2], const SharedRows& x, int byte, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = x.at(min(g, x.rows - 1), byte + half * kHalf + t * kVectorBytes);
      multiply_add(sum[0], {v.x, 0, v.y, 0}, w[half].x, w[half].y);
      multiply_add(sum[1], {v.z, 0, v.w, 0}, w[half].z, w[half].w);
    }
  }
  // to[row * row_step + feature]
  __device__ void put(float* to, int row_step, int rows, int lane) const {
    const int g = lane / 4, t = lane % 4;
    if (g < rows)
      *reinterpret_cast<float2*>(to + g * row_step + 2 * t) =
          make_float2(sum[0][0] + sum[1][0], sum[0][1] + sum[1][1]);
  }
};

template <int kRows>
struct Sums<float, kRows> {
  float sum[kRows] = {};

  __device__ void add(const uint4 (&w)[2], const SharedRows& x, int byte, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float a = __uint_as_float(w[half].x), b = __uint_as_float(w[half].y),
                  c = __uint_as_float(w[half].z), d = __uint_as_float(w[half].w);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= x.rows) break;
        const uint4 v = x.at(r, byte + half * kHalf + lane % 4 * kVectorBytes);
        sum[r] = fmaf(a, __uint_as_float(v.x), sum[r]);
        sum[r] = fmaf(b, __uint_as_float(v.y), sum[r]);
        sum[r] = fmaf(c, __uint_as_float(v.z), sum[r]);
        sum[r] = fmaf(d, __uint_as_float(v.w), sum[r]);
      }
    }
  }
  __device__ void put(float* to, int row_step, int rows, int lane) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float all = sum[r];
      all += __shfl_xor_sync(0xFFFFFFFFU, all, 1);
      all += __shfl_xor_sync(0xFFFFFFFFU, all, 2);
      if (r < rows && lane % 4 == r % 4) to[r * row_step + lane / 4] = all;
    }
  }
};

}  // namespace sps::ops::decode_product
