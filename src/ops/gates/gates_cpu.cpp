// Each row is read from memory once: the second pass over it, behind the dot product, finds it in the
// first-level cache.
#include "ops/gates/gates_kernels.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops {

namespace {

template <class X, class Y>
float dot(const X* x, const Y* y, int64_t n) {
  return sum_lanes(n,
                   [&](int64_t c, auto mask) { return load_lanes(x + c, mask) * load_lanes(y + c, mask); });
}

// dm . (a - p)
template <class Act>
float dot_difference(const Act* dm, const Act* a, const Act* p, int64_t n) {
  return sum_lanes(n, [&](int64_t c, auto mask) {
    return load_lanes(dm + c, mask) * (load_lanes(a + c, mask) - load_lanes(p + c, mask));
  });
}

// m = g a + (1 - g) p
template <class Act>
void mix(float g, const Act* a, const Act* p, Act* m, int64_t n) {
  for_lanes(n, [&](int64_t c, auto mask) {
    store_lanes(m + c, g * load_lanes(a + c, mask) + (1.0F - g) * load_lanes(p + c, mask), mask);
  });
}

// What pool's backward does to each stream: dx = k dm + t w + t_out w_out, dw += t x, dw_out += t_out x. The
// last gate may be absent.
template <bool Out, class Act>
void pool_stream(float k, const Act* dm, float t, const float* w, float t_out, const float* w_out,
                 const Act* x, Act* dx, float* dw, float* dw_out, int64_t n) {
  for_lanes(n, [&](int64_t c, auto mask) {
    const Lanes xc = load_lanes(x + c, mask);
    Lanes own = k * load_lanes(dm + c, mask) + t * load_lanes(w + c, mask);
    store_lanes(dw + c, load_lanes(dw + c, mask) + t * xc, mask);
    if constexpr (Out) {
      own = own + t_out * load_lanes(w_out + c, mask);
      store_lanes(dw_out + c, load_lanes(dw_out + c, mask) + t_out * xc, mask);
    }
    store_lanes(dx + c, own, mask);
  });
}

// y = k x
template <class Act>
void scale(float k, const Act* x, Act* y, int64_t n) {
  for_lanes(n, [&](int64_t c, auto mask) { store_lanes(y + c, k * load_lanes(x + c, mask), mask); });
}

// z = k x + l y
template <class Act>
void combine(float k, const Act* x, float l, const Act* y, Act* z, int64_t n) {
  for_lanes(n, [&](int64_t c, auto mask) {
    store_lanes(z + c, k * load_lanes(x + c, mask) + l * load_lanes(y + c, mask), mask);
  });
}

void add(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) y[c] += x[c];
}

}  // namespace

void pool_forward_cpu(Tensor a, Tensor p, const GateWeights& w, const GateRows& gates, Tensor m) {
  const int64_t d = a.cols;
  const float *w_in = w.in.as<float>(), *w_p = w.p.as<float>(), *w_a = w.a ? w.a.as<float>() : nullptr;
  with_type(a.dtype, [&](auto zero) {
    using Act = decltype(zero);
    parallel_chunks(a.rows, chunk_rows(d), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const Act *ar = a.row<Act>(r), *pr = p.row<Act>(r);
        const float g = fast_sigmoid(dot(ar, w_in, d) + dot(pr, w_in + d, d));
        *gates.in.row<float>(r) = g;
        *gates.p.row<float>(r) = fast_sigmoid(dot(pr, w_p, d));
        if (w_a) *gates.a.row<float>(r) = fast_sigmoid(dot(ar, w_a, d));
        mix(g, ar, pr, m.row<Act>(r), d);
      }
    });
  });
}

void pool_backward_cpu(Tensor dm, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates,
                       const GateRows& t, Tensor da, Tensor dp, const GateWeights& dw) {
  const int64_t d = a.cols;
  const bool both = !t.a.empty();
  const float *w_in = w.in.as<float>(), *w_p = w.p.as<float>(), *w_a = both ? w.a.as<float>() : nullptr;
  with_type(a.dtype, [&](auto zero) {
    using Act = decltype(zero);
    // The partial holds dw_in, dw_p, then dw_a.
    const int64_t parts = both ? 4 : 3;
    const float* sums = sum_over_rows(a.rows, parts * d, [&](int64_t begin, int64_t end, float* partial) {
      for (int64_t r = begin; r < end; ++r) {
        const Act *ar = a.row<Act>(r), *pr = p.row<Act>(r), *dmr = dm.row<Act>(r);
        const float g = *gates.in.row<float>(r);
        const float t_in = dot_difference(dmr, ar, pr, d) * g * (1.0F - g);
        if (both)
          pool_stream<true>(g, dmr, t_in, w_in, *t.a.row<float>(r), w_a, ar, da.row<Act>(r), partial,
                            partial + 3 * d, d);
        else
          pool_stream<false>(g, dmr, t_in, w_in, 0, nullptr, ar, da.row<Act>(r), partial, nullptr, d);
        pool_stream<true>(1.0F - g, dmr, t_in, w_in + d, *t.p.row<float>(r), w_p, pr, dp.row<Act>(r),
                          partial + d, partial + 2 * d, d);
      }
    });
    add(sums, dw.in.as<float>(), 2 * d);
    add(sums + 2 * d, dw.p.as<float>(), d);
    if (both) add(sums + 3 * d, dw.a.as<float>(), d);
  });
}

void scatter_forward_cpu(Tensor f, const GateRows& gates, Tensor out_a, Tensor out_p) {
  with_type(f.dtype, [&](auto zero) {
    using Act = decltype(zero);
    parallel_chunks(f.rows, chunk_rows(f.cols), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        scale(*gates.p.row<float>(r), f.row<Act>(r), out_p.row<Act>(r), f.cols);
        if (out_a) scale(*gates.a.row<float>(r), f.row<Act>(r), out_a.row<Act>(r), f.cols);
      }
    });
  });
}

void scatter_backward_cpu(Tensor d_out_a, Tensor d_out_p, Tensor f, const GateRows& gates, Tensor df,
                          const GateRows& t) {
  const int64_t d = f.cols;
  with_type(f.dtype, [&](auto zero) {
    using Act = decltype(zero);
    parallel_chunks(f.rows, chunk_rows(d), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const Act *fr = f.row<Act>(r), *d_p = d_out_p.row<Act>(r);
        const float s_p = *gates.p.row<float>(r);
        *t.p.row<float>(r) = dot(d_p, fr, d) * s_p * (1.0F - s_p);
        if (!d_out_a) {
          scale(s_p, d_p, df.row<Act>(r), d);
          continue;
        }
        const Act* d_a = d_out_a.row<Act>(r);
        const float s_a = *gates.a.row<float>(r);
        *t.a.row<float>(r) = dot(d_a, fr, d) * s_a * (1.0F - s_a);
        combine(s_a, d_a, s_p, d_p, df.row<Act>(r), d);
      }
    });
  });
}

}  // namespace sps::ops
