// Bound by memory: a row is read once from memory (sum of squares, with the addition and the store of s), the
// second pass finds it in the first-level cache.
#include <cmath>

#include "ops/rmsnorm/rmsnorm_kernels.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops {

namespace {

float square_sum(const float* x, int64_t d) {
  return sum_lanes(d, [&](int64_t c, auto mask) {
    const Lanes v = load_lanes(x + c, mask);
    return v * v;
  });
}

// s = x + delta; s may be x.
template <class Act>
float add_square_sum(const float* x, const Act* delta, float* s, int64_t d) {
  return sum_lanes(d, [&](int64_t c, auto mask) {
    const Lanes v = load_lanes(x + c, mask) + load_lanes(delta + c, mask);
    store_lanes(s + c, v, mask);
    return v * v;
  });
}

template <class Act>
void scale(const float* s, float k, const float* gain, Act* y, int64_t d) {
  for_lanes(d, [&](int64_t c, auto mask) {
    store_lanes(y + c, load_lanes(s + c, mask) * k * load_lanes(gain + c, mask), mask);
  });
}

template <class Act>
float dot3(const Act* dy, const float* gain, const float* s, int64_t d) {
  return sum_lanes(d, [&](int64_t c, auto mask) {
    return load_lanes(dy + c, mask) * load_lanes(gain + c, mask) * load_lanes(s + c, mask);
  });
}

// One row of the backward: ds = k * dy * gain - m * s + dres, where m = k^2 * mean(u * xhat). dres may be ds.
template <class Act, bool Residual, bool Copy>
void backward_row(const Act* dy, const float* s, const float* gain, float k, float m, const float* dres,
                  float* ds, Act* ds_act, float* dgain, int64_t d) {
  for_lanes(d, [&](int64_t c, auto mask) {
    const Lanes g = load_lanes(dy + c, mask) * k, sc = load_lanes(s + c, mask);
    store_lanes(dgain + c, load_lanes(dgain + c, mask) + g * sc, mask);
    Lanes v = g * load_lanes(gain + c, mask) - sc * m;
    if constexpr (Residual) v += load_lanes(dres + c, mask);
    store_lanes(ds + c, v, mask);
    if constexpr (Copy) store_lanes(ds_act + c, v, mask);
  });
}

void zero_row(Tensor t, int64_t r) {
  std::memset(static_cast<std::byte*>(t.data) + size_t(r * t.stride) * dtype_size(t.dtype), 0,
              size_t(t.cols) * dtype_size(t.dtype));
}

void zero_unpicked(Tensor ds, Tensor ds_act, std::span<const int32_t> pick) {
  parallel_chunks(ds.rows, chunk_rows(ds.cols), [&](int64_t begin, int64_t end) {
    auto next = std::lower_bound(pick.begin(), pick.end(), begin);
    for (int64_t r = begin; r < end; ++r) {
      if (next != pick.end() && *next == r) {
        ++next;
        continue;
      }
      zero_row(ds, r);
      if (ds_act) zero_row(ds_act, r);
    }
  });
}

template <class Act, bool Residual, bool Copy>
void backward(Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds, Tensor ds_act,
              Tensor dgain, std::span<const int32_t> pick) {
  const int64_t d = s.cols;
  const float* g = gain.as<float>();
  const float* sums = sum_over_rows(dy.rows, d, [&](int64_t begin, int64_t end, float* partial) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t to = pick.empty() ? r : pick[size_t(r)];
      const Act* dyr = dy.row<Act>(r);
      const float* sr = s.row<float>(r);
      const float k = *rstd.row<float>(r);
      const float mean = k * dot3(dyr, g, sr, d) / float(d);
      backward_row<Act, Residual, Copy>(dyr, sr, g, k, k * k * mean, Residual ? dres.row<float>(r) : nullptr,
                                        ds.row<float>(to), Copy ? ds_act.row<Act>(to) : nullptr, partial, d);
    }
  });
  float* dg = dgain.as<float>();
  for (int64_t c = 0; c < d; ++c) dg[c] += sums[c];
}

}  // namespace

void rmsnorm_forward_cpu(Tensor x, Tensor delta, Tensor gain, float eps, Tensor s, Tensor y, Tensor rstd,
                         std::span<const int32_t> pick) {
  const int64_t d = s.cols;
  const float* g = gain.as<float>();
  with_type(y.dtype, [&](auto zero) {
    using Act = decltype(zero);
    parallel_chunks(s.rows, chunk_rows(d), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t from = pick.empty() ? r : pick[size_t(r)];
        const float* xr = x.row<float>(x.rows == 1 ? 0 : from);
        float* sr = s.row<float>(r);
        float sum;
        if (delta) {
          sum = add_square_sum(xr, delta.row<Act>(from), sr, d);
        } else {
          sum = square_sum(xr, d);
          if (sr != xr) std::memcpy(sr, xr, size_t(d) * sizeof(float));
        }
        const float k = 1 / std::sqrt(sum / float(d) + eps);
        *rstd.row<float>(r) = k;
        scale(sr, k, g, y.row<Act>(r), d);
      }
    });
  });
}

void rmsnorm_backward_cpu(Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds,
                          Tensor ds_act, Tensor dgain, std::span<const int32_t> pick) {
  if (ds.rows != dy.rows) zero_unpicked(ds, ds_act, pick);
  with_type(dy.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const auto run = dres ? (ds_act ? backward<Act, true, true> : backward<Act, true, false>)
                          : (ds_act ? backward<Act, false, true> : backward<Act, false, false>);
    run(dy, s, gain, rstd, dres, ds, ds_act, dgain, pick);
  });
}

}  // namespace sps::ops
