// One block of keys for the queries of a tile, on the CPU: scores, the softmax over what has been seen so
// far, and the weighted values. In vectors for any type; in bf16 on AMX tiles where there are any. Either way
// a query's bits depend on it and on the keys of the block that it sees alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/attention/attention_engine.h"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/dot_lanes.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops::decode_blocks {

constexpr int64_t kBlock = 64;  // keys

// Over the keys that a query has seen so far.
struct Softmax {
  float top, sum;
};

// out[n][j] = q[n] . k[j] for a <= j < b; q is padded with zeros, out has room for kFloats more.
template <class T, int N>
inline void scores(const float* q, int64_t q_stride, int64_t hd, const T* const* k, int64_t a, int64_t b,
                   float* out, int64_t out_stride) {
  const int64_t whole = hd / kFloats * kFloats;
  Floats sums[N][kFloats];
  for (int64_t from = a; from < b; from += kFloats) {
    const int64_t count = std::min<int64_t>(kFloats, b - from);
    for (int64_t j = 0; j < kFloats; ++j) {
      Floats sum[N] = {};
      if (j < count) {
        const T* key = k[from + j];
        for (int64_t d = 0; d < whole; d += kFloats) {
          const Floats v = load_floats(key + d);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sum[n] += v * load_floats(q + n * q_stride + d);
        }
        if (whole < hd) {
          const Floats v = load_floats(key + whole, hd - whole);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sum[n] += v * load_floats(q + n * q_stride + whole);
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n][j] = sum[n];
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_floats(out + n * out_stride + from, sums_of_vectors(sums[n]));
  }
}

// o[n] += sum over a <= j < b of p[n][j] v[j], Chunks vectors of columns at a time.
template <class T, int N, int Chunks>
[[gnu::always_inline]] inline void add_columns(const float* p, int64_t p_stride, const T* const* v, int64_t a,
                                               int64_t b, int64_t d, int64_t cols, float* o,
                                               int64_t o_stride) {
  Floats sum[N][Chunks];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c) sum[n][c] = load_floats(o + n * o_stride + d + c * kFloats);
  for (int64_t j = a; j < b; ++j) {
    Floats value[Chunks];
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c)
      value[c] = cols < kFloats ? load_floats(v[j] + d, cols) : load_floats(v[j] + d + c * kFloats);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int c = 0; c < Chunks; ++c) sum[n][c] += value[c] * p[n * p_stride + j];
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c) store_floats(o + n * o_stride + d + c * kFloats, sum[n][c]);
}
template <class T, int N>
inline void add_values(const float* p, int64_t p_stride, const T* const* v, int64_t a, int64_t b, int64_t hd,
                       float* o, int64_t o_stride) {
  int64_t d = 0;
  for (; d + 4 * kFloats <= hd; d += 4 * kFloats)
    add_columns<T, N, 4>(p, p_stride, v, a, b, d, kFloats, o, o_stride);
  for (; d < hd; d += kFloats)
    add_columns<T, N, 1>(p, p_stride, v, a, b, d, std::min<int64_t>(kFloats, hd - d), o, o_stride);
}

// Not inlined, nor are the weights: no compiler fuses a product here into a sum elsewhere.
[[gnu::noinline]] inline void scale_row(float* o, int64_t n, float factor) {
  if (factor == 1.0F) return;
  for (int64_t d = 0; d < n; ++d) o[d] *= factor;
}

inline float sum_of_lanes(Floats v) {
  for (int half = kFloats / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) v[l] += v[l + half];
  return v[0];
}
inline float largest_lane(Floats v) {
  for (int half = kFloats / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) v[l] = std::max(v[l], v[l + half]);
  return v[0];
}

// The scores p [kBlock] of keys [at.begin, at.end), which is not empty, become weights against the new top,
// those of other keys 0. Returns by what the sums so far are to be multiplied. NaN is no top, and stays NaN.
[[gnu::noinline]] inline float weights_of_block(float* p, KeyInterval at, Softmax& state) {
  Floats tops = state.top - Floats{};
  for (int64_t j = 0; j < kBlock; ++j)
    if (j < at.begin || j >= at.end) p[j] = -INFINITY;
  for (int64_t j = 0; j < kBlock; j += kFloats) {
    const Floats v = load_floats(p + j);
    tops = v > tops ? v : tops;
  }
  const float top = largest_lane(tops);
  // Where every score is -inf there is nothing to subtract; a NaN comes out as one either way.
  const float base = top == -INFINITY ? 0.0F : top;
  for_lanes(kBlock, [&](int64_t j, auto mask) {
    store_lanes(p + j, fast_exp(load_lanes(p + j, mask) - base), mask);
  });
  Floats sum = load_floats(p);
  for (int64_t j = kFloats; j < kBlock; j += kFloats) sum += load_floats(p + j);
  const float old = state.top == -INFINITY ? 0.0F : fast_exp(state.top - base);
  state = {top, std::fma(state.sum, old, sum_of_lanes(sum))};
  return old;
}

#ifdef SPS_AMX

// Queries are taken 32 at a time, heads are padded to `width`, a multiple of 32 numbers.
class Tiles {
 public:
  using Engine = attention::AmxEngine;
  static constexpr int64_t kQueries = 32;

  static size_t bytes(int64_t width) {
    return size_t((3 * kBlock * width + kQueries * kBlock) * 2 + 2 * kBlock * kQueries * 4);
  }
  // memory: bytes(width), whole lines of 64 bytes.
  Tiles(std::byte* memory, int64_t head_dim, int64_t width) : head_dim_(head_dim), width_(width) {
    k_ = reinterpret_cast<bf16*>(memory);
    v_ = k_ + kBlock * width, v_b_ = v_ + kBlock * width, p_ = v_b_ + kBlock * width;
    scores_ = reinterpret_cast<float*>(p_ + kQueries * kBlock), by_query_ = scores_ + kBlock * kQueries;
  }

  // Numbers that `count` queries take in the layout that the scores want.
  static int64_t query_numbers(int64_t count, int64_t width) {
    return (count + kQueries - 1) / kQueries * attention::kTile * width;
  }
  // Of 32 queries or what is left of them; from(i): query i's numbers.
  template <class From>
  void load_queries(int64_t count, bf16* to, From&& from) {
    for (int64_t i = 0; i < count; ++i) load_row(k_ + i * width_, from(i));
    std::fill(k_ + count * width_, k_ + kQueries * width_, bf16());
    Engine::transposed_b(to, k_, kQueries, width_);
  }

  // Keys and values of rows [begin, end) of the block; there are no others.
  void load_keys(int64_t begin, int64_t end, const bf16* const* k, const bf16* const* v) {
    finite_ = true;
    for (bf16* rows : {k_, v_}) {
      std::fill(rows, rows + begin * width_, bf16());
      std::fill(rows + end * width_, rows + kBlock * width_, bf16());
    }
    for (int64_t j = begin; j < end; ++j) {
      load_row(k_ + j * width_, k[j]);
      finite_ &= load_row(v_ + j * width_, v[j]);
    }
    Engine::as_b(v_b_, v_, kBlock, width_);
  }

  // Up to 32 queries, of which query i sees the keys inside(i) of the block: states[i] and o [32, width] go
  // on.
  template <class Inside>
  void attend(int64_t count, const bf16* q, float scale, Inside&& inside, Softmax* states, float* o) {
    Engine::product<false>(kBlock, kQueries, width_, k_, width_, q, attention::kTile, scores_, kQueries);
    if (count > kFewQueries)
      attention::transpose(reinterpret_cast<const uint32_t*>(scores_), kQueries,
                           reinterpret_cast<uint32_t*>(by_query_), kBlock, kBlock, kQueries);
    else
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < kBlock; ++j) by_query_[i * kBlock + j] = scores_[j * kQueries + i];
    std::fill(p_ + count * kBlock, p_ + kQueries * kBlock, bf16());
    for (int64_t i = 0; i < count; ++i) {
      const KeyInterval at = inside(i);
      bf16* const weights = p_ + i * kBlock;
      if (at.begin >= at.end) {
        std::fill(weights, weights + kBlock, bf16());
        continue;
      }
      float* const s = by_query_ + i * kBlock;
      for (int64_t j = 0; j < kBlock; ++j) s[j] *= scale;
      scale_row(o + i * width_, width_, weights_of_block(s, at, states[i]));
      for_lanes(kBlock,
                [&](int64_t j, auto mask) { store_lanes(weights + j, load_lanes(s + j, mask), mask); });
    }
    if (finite_)
      Engine::product<true>(kQueries, width_, kBlock, p_, kBlock, v_b_, width_, o, width_);
    else
      for (int64_t i = 0; i < count; ++i) add_seen_values(i, inside(i), o + i * width_);
  }

 private:
  static constexpr int64_t kFewQueries = 4;

  bool load_row(bf16* to, const bf16* from) const {
    return Engine::load_rows(to, from, 0, 1, 1, head_dim_, width_);
  }

  // A weight of zero does not silence a value that is no number: the same product of one query's weights,
  // with zeros for the values that it does not see. Rare, so the memory for it is asked for here.
  void add_seen_values(int64_t i, KeyInterval at, float* o) const {
    if (at.begin >= at.end) return;
    std::vector<bf16> v(size_t(kBlock * width_)), v_b(v.size()), p(size_t(kQueries * kBlock));
    std::vector<float> sum(size_t(kQueries * width_));
    std::copy(v_ + at.begin * width_, v_ + at.end * width_, v.begin() + at.begin * width_);
    std::copy_n(p_ + i * kBlock, kBlock, p.begin());
    std::copy_n(o, width_, sum.begin());
    Engine::as_b(v_b.data(), v.data(), kBlock, width_);
    Engine::product<true>(kQueries, width_, kBlock, p.data(), kBlock, v_b.data(), width_, sum.data(), width_);
    std::copy_n(sum.begin(), width_, o);
  }

  const int64_t head_dim_, width_;
  // Rows of the block's keys and values [64, width], the values as an operand, weights [32, 64].
  bf16 *k_, *v_, *v_b_, *p_;
  float *scores_, *by_query_;  // [64, 32] and [32, 64]
  bool finite_ = true;
};

#endif  // SPS_AMX

}  // namespace sps::ops::decode_blocks
