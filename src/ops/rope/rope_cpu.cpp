#include <cmath>

#include "ops/rope/rope_kernels.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops {

namespace {

// Adjacent pairs, taken apart on the way in and joined on the way out. Two bf16 in one word need no
// shuffling: the upper one is a float as it stands.
struct Pairs {
  Lanes a, b;
};

#if defined(__AVX512BW__) && defined(__AVX512VL__)  // as in vec.h

// The mask of the first 2k numbers from that of the first k pairs: 2^k - 1 times 2^k + 1.
inline uint32_t both(__mmask16 pairs) {
  return uint32_t{pairs} * (uint32_t{pairs} + 2);
}

inline Pairs apart(Lanes lower, Lanes upper) {
  return {__builtin_shufflevector(lower, upper, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          __builtin_shufflevector(lower, upper, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}
inline Lanes lower_half(Pairs v) {
  return __builtin_shufflevector(v.a, v.b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Lanes upper_half(Pairs v) {
  return __builtin_shufflevector(v.a, v.b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline Pairs load_pairs(const float* p, AllLanes all) {
  return apart(load_lanes(p, all), load_lanes(p + kLanes, all));
}
inline Pairs load_pairs(const float* p, __mmask16 m) {
  return apart(load_lanes(p, __mmask16(both(m))), load_lanes(p + kLanes, __mmask16(both(m) >> 16)));
}
inline void store_pairs(float* p, Pairs v, AllLanes all) {
  store_lanes(p, lower_half(v), all);
  store_lanes(p + kLanes, upper_half(v), all);
}
inline void store_pairs(float* p, Pairs v, __mmask16 m) {
  store_lanes(p, lower_half(v), __mmask16(both(m)));
  store_lanes(p + kLanes, upper_half(v), __mmask16(both(m) >> 16));
}

inline Pairs apart(__m512i words) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(int32_t(0xFFFF0000))))};
}
inline __m512i join(Pairs v) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(narrow_bf16(v.a)),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow_bf16(v.b)), 16));
}
inline Pairs load_pairs(const bf16* p, AllLanes) {
  return apart(_mm512_loadu_si512(p));
}
inline Pairs load_pairs(const bf16* p, __mmask16 m) {
  return apart(_mm512_maskz_loadu_epi32(m, p));
}
inline void store_pairs(bf16* p, Pairs v, AllLanes) {
  _mm512_storeu_si512(p, join(v));
}
inline void store_pairs(bf16* p, Pairs v, __mmask16 m) {
  _mm512_mask_storeu_epi32(p, m, join(v));
}

#else

inline Pairs load_pairs(const float* p, AllLanes) {
  return {p[0], p[1]};
}
inline Pairs load_pairs(const bf16* p, AllLanes) {
  uint32_t w;
  std::memcpy(&w, p, sizeof w);
  return {std::bit_cast<float>(w << 16), std::bit_cast<float>(w & 0xFFFF0000)};
}
inline void store_pairs(float* p, Pairs v, AllLanes) {
  p[0] = v.a, p[1] = v.b;
}
inline void store_pairs(bf16* p, Pairs v, AllLanes) {
  const uint32_t w = uint32_t{bf16(v.a).bits} | uint32_t{bf16(v.b).bits} << 16;
  std::memcpy(static_cast<void*>(p), &w, sizeof w);
}
static_assert(std::endian::native == std::endian::little);

#endif

// The rotation of one position: `sign` -1 turns back.
struct Rotation {
  const float *cos, *sin;
  int64_t pairs;
  float sign;
  bool adjacent;

  Rotation(const RopeTable& table, int64_t position, float sign_)
      : cos(table.cos.row<float>(position)),
        sin(table.sin.row<float>(position)),
        pairs(table.cos.cols),
        sign(sign_),
        adjacent(table.pairs == RopePairs::adjacent) {}

  // One head; out may be in if both have the same type.
  template <class In, class Out>
  void apply(const In* in, Out* out, int64_t head_dim) const {
    const float *co = cos, *si = sin;
    const float sg = sign;
    const int64_t n = pairs;
    const auto turn = [=](Lanes a, Lanes b, int64_t m, auto mask) -> Pairs {
      const Lanes c = load_lanes(co + m, mask), s = load_lanes(si + m, mask) * sg;
      return {a * c - b * s, a * s + b * c};
    };
    if (adjacent) {
      for_lanes(n, [=](int64_t m, auto mask) {
        const Pairs v = load_pairs(in + 2 * m, mask);
        store_pairs(out + 2 * m, turn(v.a, v.b, m, mask), mask);
      });
    } else {
      for_lanes(n, [=](int64_t m, auto mask) {
        const Pairs v = turn(load_lanes(in + m, mask), load_lanes(in + n + m, mask), m, mask);
        store_lanes(out + m, v.a, mask);
        store_lanes(out + n + m, v.b, mask);
      });
    }
    for_lanes(head_dim - 2 * n, [=](int64_t i, auto mask) {
      store_lanes(out + 2 * n + i, load_lanes(in + 2 * n + i, mask), mask);
    });
  }
};

// u = x * rstd * gain of one head; returns rstd.
template <class Act>
float normalise(const Act* x, const float* gain, float eps, int64_t head_dim, float* u) {
  const float sum = sum_lanes(head_dim, [&](int64_t c, auto mask) {
    const Lanes v = load_lanes(x + c, mask);
    return v * v;
  });
  const float k = 1 / std::sqrt(sum / float(head_dim) + eps);
  for_lanes(head_dim, [&](int64_t c, auto mask) {
    store_lanes(u + c, load_lanes(x + c, mask) * k * load_lanes(gain + c, mask), mask);
  });
  return k;
}

// From dn, the gradient of the normalised head, to dx; adds to dgain.
template <class Act>
void normalise_backward(const float* dn, const Act* x, const float* gain, float k, int64_t head_dim, Act* dx,
                        float* dgain) {
  const float sum = sum_lanes(head_dim, [&](int64_t c, auto mask) {
    return load_lanes(dn + c, mask) * load_lanes(gain + c, mask) * load_lanes(x + c, mask);
  });
  const float mean = k * sum / float(head_dim);
  for_lanes(head_dim, [&](int64_t c, auto mask) {
    const Lanes n = load_lanes(dn + c, mask), xhat = load_lanes(x + c, mask) * k;
    store_lanes(dgain + c, load_lanes(dgain + c, mask) + n * xhat, mask);
    store_lanes(dx + c, (n * load_lanes(gain + c, mask) - xhat * mean) * k, mask);
  });
}

// The rows are parts of longer ones, a stride that the hardware does not follow: fetch so many rows ahead.
constexpr int64_t kRowsAhead = 8;

// y row r = rotation of `row(r)`, heads side by side.
template <class In, class Out, class Row>
void rotate_rows(Row&& row, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                 float sign, Tensor y) {
  const int64_t hd = y.cols / heads;
  parallel_chunks(y.rows, chunk_rows(y.cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const Rotation rotation(table, positions[size_t(r)], sign);
      const In* in = row(r);
      Out* out = y.row<Out>(r);
      const int64_t later = std::min(r + kRowsAhead, y.rows - 1);
      prefetch(row(later), y.cols);
      if (static_cast<const void*>(row(later)) != y.row<Out>(later))
        prefetch<true>(y.row<Out>(later), y.cols);
      for (int64_t h = 0; h < heads; ++h) rotation.apply(in + h * hd, out + h * hd, hd);
    }
  });
}

template <class Act>
void forward(Tensor x, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
             const QkNorm& norm, Tensor rstd, Tensor y) {
  const int64_t hd = y.cols / heads;
  if (!norm.gain) {
    const auto row = [&](int64_t r) { return x.row<Act>(x.rows == 1 ? 0 : r); };
    return rotate_rows<Act, Act>(row, heads, table, positions, 1, y);
  }
  const float* gain = norm.gain.as<float>();
  if (x.rows == 1) {  // one norm serves all positions
    auto* u = reinterpret_cast<float*>(thread_scratch(ScratchSlot::kernel, size_t(x.cols) * sizeof(float)));
    for (int64_t h = 0; h < heads; ++h)
      rstd.as<float>()[h] = normalise(x.as<Act>() + h * hd, gain, norm.eps, hd, u + h * hd);
    return rotate_rows<float, Act>([&](int64_t) { return u; }, heads, table, positions, 1, y);
  }
  parallel_chunks(y.rows, chunk_rows(y.cols), [&](int64_t begin, int64_t end) {
    alignas(64) float u[kRopeMaxHeadDim];
    for (int64_t r = begin; r < end; ++r) {
      const Rotation rotation(table, positions[size_t(r)], 1);
      for (int64_t h = 0; h < heads; ++h) {
        rstd.row<float>(r)[h] = normalise(x.row<Act>(r) + h * hd, gain, norm.eps, hd, u);
        rotation.apply(u, y.row<Act>(r) + h * hd, hd);
      }
    }
  });
}

// All rows of dy belong to the one row of x.
template <class Act, class Grad>
void backward_one_row(Tensor dy, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                      const QkNorm& norm, Tensor x, Tensor rstd, Tensor dx, Tensor dgain) {
  const int64_t hd = dy.cols / heads;
  const float* dn = sum_over_rows(dy.rows, dy.cols, [&](int64_t begin, int64_t end, float* partial) {
    alignas(64) float back[kRopeMaxHeadDim];
    for (int64_t r = begin; r < end; ++r) {
      const Rotation rotation(table, positions[size_t(r)], -1);
      for (int64_t h = 0; h < heads; ++h) {
        rotation.apply(dy.row<Grad>(r) + h * hd, back, hd);
        float* sum = partial + h * hd;
#pragma omp simd
        for (int64_t c = 0; c < hd; ++c) sum[c] += back[c];
      }
    }
  });
  Act* to = dx.as<Act>();
  for (int64_t h = 0; h < heads; ++h) {
    if (norm.gain) {
      normalise_backward(dn + h * hd, x.as<Act>() + h * hd, norm.gain.as<float>(), rstd.as<float>()[h], hd,
                         to + h * hd, dgain.as<float>());
    } else {
      for (int64_t c = h * hd; c < (h + 1) * hd; ++c) to[c] = from_f32<Act>(dn[c]);
    }
  }
}

template <class Act, class Grad>
void backward(Tensor dy, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
              const QkNorm& norm, Tensor x, Tensor rstd, Tensor dx, Tensor dgain) {
  const int64_t hd = dy.cols / heads;
  if (dx.rows == 1) {
    return backward_one_row<Act, Grad>(dy, heads, table, positions, norm, x, rstd, dx, dgain);
  }
  if (!norm.gain) {
    const auto row = [&](int64_t r) { return dy.row<Grad>(r); };
    return rotate_rows<Grad, Act>(row, heads, table, positions, -1, dx);
  }
  const float* gain = norm.gain.as<float>();
  const float* sums = sum_over_rows(dy.rows, hd, [&](int64_t begin, int64_t end, float* partial) {
    alignas(64) float dn[kRopeMaxHeadDim];
    for (int64_t r = begin; r < end; ++r) {
      const Rotation rotation(table, positions[size_t(r)], -1);
      for (int64_t h = 0; h < heads; ++h) {
        rotation.apply(dy.row<Grad>(r) + h * hd, dn, hd);
        normalise_backward(dn, x.row<Act>(r) + h * hd, gain, rstd.row<float>(r)[h], hd,
                           dx.row<Act>(r) + h * hd, partial);
      }
    }
  });
  for (int64_t c = 0; c < hd; ++c) dgain.as<float>()[c] += sums[c];
}

}  // namespace

void rope_forward_cpu(Tensor x, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                      const QkNorm& norm, Tensor rstd, Tensor y) {
  with_type(y.dtype, [&](auto zero) { forward<decltype(zero)>(x, heads, table, positions, norm, rstd, y); });
}

void rope_backward_cpu(Tensor dy, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                       const QkNorm& norm, Tensor x, Tensor rstd, Tensor dx, Tensor dgain) {
  with_type(dx.dtype, [&](auto zero) {
    with_type(dy.dtype, [&](auto zero_dy) {
      backward<decltype(zero), decltype(zero_dy)>(dy, heads, table, positions, norm, x, rstd, dx, dgain);
    });
  });
}

}  // namespace sps::ops
