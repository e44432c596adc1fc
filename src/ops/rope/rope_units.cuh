// What turning a head on a GPU is made of, for rope.cu and for kernels that turn heads on their way. A head
// is a row of units: kWidth rotated pairs each, then pairs of pieces of what is not rotated. A thread takes
// both numbers of every pair it turns, so that results may overwrite what they come from.
//
// What rounds is written with one instruction for each step, so that the compiler makes the same of it
// everywhere.
#pragma once

#include "ops/rope/rope.h"
#include "ops/rowwise.cuh"

namespace sps::ops::rope {

struct Shape {
  int64_t rows;
  int heads, head_dim, pairs;
  bool adjacent;
};

struct Angles {
  Rows<const float> cos, sin;
  const int32_t* positions;
  float sign;  // -1 turns back
};

// Where unit u of a head stands: two pieces of kWidth columns.
template <int kWidth>
struct Unit {
  int first, second, pair;
  bool rotated;

  __device__ Unit(const Shape& shape, int u) {
    const int turning = shape.pairs / kWidth;
    rotated = u < turning;
    pair = u * kWidth;
    if (!rotated) {
      first = 2 * shape.pairs + (u - turning) * 2 * kWidth;
      second = first + kWidth;
    } else if (shape.adjacent) {
      first = 2 * pair;
      second = first + kWidth;
    } else {
      first = pair;
      second = shape.pairs + pair;
    }
  }
};

template <int kWidth>
__host__ __device__ inline int units_of(const Shape& shape) {
  return shape.pairs / kWidth + (shape.head_dim - 2 * shape.pairs + 2 * kWidth - 1) / (2 * kWidth);
}

// Cosines and sines of a unit's pairs at one position.
template <int kWidth>
struct Turn {
  float cos[kWidth], sin[kWidth];
  bool rotated;

  __device__ Turn(const Angles& angles, int64_t row, const Unit<kWidth>& unit, bool live)
      : Turn(angles.cos, angles.sin, angles.sign, live && unit.rotated ? angles.positions[row] : 0, unit,
             live) {}
  __device__ Turn(const Rows<const float>& cosines, const Rows<const float>& sines, float sign,
                  int64_t position, const Unit<kWidth>& unit, bool live) {
    rotated = live && unit.rotated;
    load_if(rotated, cosines[position] + unit.pair, cos);
    load_if(rotated, sines[position] + unit.pair, sin);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sin[j] *= sign;
  }

  static __device__ void turn(float& a, float& b, float c, float s) {
    const float turned = __fmaf_rn(a, c, -__fmul_rn(b, s));
    b = __fmaf_rn(a, s, __fmul_rn(b, c));
    a = turned;
  }
  // kAcross: pair j is (v[0][j], v[1][j]); else pairs stand side by side in each piece.
  template <bool kAcross>
  __device__ void apply(float (&v)[2][kWidth]) const {
    if (!rotated) return;
    if constexpr (kAcross) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) turn(v[0][j], v[1][j], cos[j], sin[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        turn(v[2 * j / kWidth][2 * j % kWidth], v[2 * j / kWidth][2 * j % kWidth + 1], cos[j], sin[j]);
    }
  }
};

template <int kWidth, class T>
__device__ void load_unit(const T* head, const Unit<kWidth>& unit, int head_dim, bool live,
                          float (&v)[2][kWidth]) {
  load_if(live, head + unit.first, v[0]);
  load_if(live && unit.second < head_dim, head + unit.second, v[1]);
}
template <int kWidth, class T>
__device__ void store_unit(T* head, const Unit<kWidth>& unit, int head_dim, const float (&v)[2][kWidth]) {
  store(head + unit.first, v[0]);
  if (unit.second < head_dim) store(head + unit.second, v[1]);
}

// Sum over 2^log lanes that stand together.
__device__ inline float lanes_sum(float v, int log) {
  for (int i = 0; i < log; ++i) v += __shfl_xor_sync(0xffffffffU, v, 1 << i);
  return v;
}

// The norm's factor for a head whose numbers 2^log lanes hold; the same in all of them.
template <int kWidth>
__device__ float norm_factor(const float (&v)[2][kWidth], int log, int head_dim, float eps) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 2 * kWidth; ++j)
    sum = __fmaf_rn(v[j / kWidth][j % kWidth], v[j / kWidth][j % kWidth], sum);
  return __fdiv_rn(1.0F, sqrtf(__fadd_rn(__fdiv_rn(lanes_sum(sum, log), float(head_dim)), eps)));
}
template <int kWidth>
__device__ void scale_unit(float (&v)[2][kWidth], float factor, const float (&gain)[2][kWidth]) {
#pragma unroll
  for (int j = 0; j < 2 * kWidth; ++j)
    v[j / kWidth][j % kWidth] =
        __fmul_rn(v[j / kWidth][j % kWidth], __fmul_rn(factor, gain[j / kWidth][j % kWidth]));
}

}  // namespace sps::ops::rope
