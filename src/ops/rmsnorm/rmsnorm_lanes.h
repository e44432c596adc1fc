// RMSNorm of one row, forward and backward, as the CPU kernels compute it: alone (rmsnorm_cpu.cpp) or on rows
// that a matrix product has just made (ops/linear_rmsnorm). Only the first of the two passes over a row
// reaches beyond the first-level cache.
#pragma once

#include <cmath>
#include <cstring>

#include "ops/vec.h"

namespace sps::ops {

// s = x + delta, or x if delta is null; y = s * rstd * gain. Returns rstd. s may be x.
template <class Act>
inline float rmsnorm_row(const float* x, const Act* delta, const float* gain, float eps, float* s, Act* y,
                         int64_t d) {
  float sum;
  if (delta) {
    sum = sum_lanes(d, [&](int64_t c, auto mask) {
      const Lanes v = load_lanes(x + c, mask) + load_lanes(delta + c, mask);
      store_lanes(s + c, v, mask);
      return v * v;
    });
  } else {
    sum = sum_lanes(d, [&](int64_t c, auto mask) {
      const Lanes v = load_lanes(x + c, mask);
      return v * v;
    });
    if (s != x) std::memcpy(s, x, size_t(d) * sizeof(float));
  }
  const float k = 1 / std::sqrt(sum / float(d) + eps);
  for_lanes(d, [&](int64_t c, auto mask) {
    store_lanes(y + c, load_lanes(s + c, mask) * k * load_lanes(gain + c, mask), mask);
  });
  return k;
}

// ds = k * dy * gain - m * s + dres, where k = rstd and m = k^2 * mean(u * xhat); dgain += the row's part.
// dres may be ds.
template <class Act, bool Residual, bool Copy>
inline void rmsnorm_gradient_row(const Act* dy, const float* s, const float* gain, float k, const float* dres,
                                 float* ds, Act* ds_act, float* dgain, int64_t d) {
  const float mean =
      k *
      sum_lanes(d,
                [&](int64_t c, auto mask) {
                  return load_lanes(dy + c, mask) * load_lanes(gain + c, mask) * load_lanes(s + c, mask);
                }) /
      float(d);
  const Lanes minus_m = Lanes{} - k * k * mean;
  for_lanes(d, [&](int64_t c, auto mask) {
    const Lanes g = load_lanes(dy + c, mask) * k, sc = load_lanes(s + c, mask);
    store_lanes(dgain + c, mul_add(g, sc, load_lanes(dgain + c, mask)), mask);
    Lanes v{};
    if constexpr (Residual) v = load_lanes(dres + c, mask);
    v = mul_add(g, load_lanes(gain + c, mask), mul_add(sc, minus_m, v));
    store_lanes(ds + c, v, mask);
    if constexpr (Copy) store_lanes(ds_act + c, v, mask);
  });
}

}  // namespace sps::ops
