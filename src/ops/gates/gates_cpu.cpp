// Each row is read from memory once: the second pass over it, behind the dot product, finds it in the
// first-level cache.
#include <algorithm>

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

// dx += k dm + t w and dw += t x: what pool's backward does to each stream
template <class Act>
void pool_stream(float k, const Act* dm, float t, const float* w, const Act* x, Act* dx, float* dw,
                 int64_t n) {
  for_lanes(n, [&](int64_t c, auto mask) {
    const Lanes own = k * load_lanes(dm + c, mask) + t * load_lanes(w + c, mask);
    store_lanes(dx + c, load_lanes(dx + c, mask) + own, mask);
    store_lanes(dw + c, load_lanes(dw + c, mask) + t * load_lanes(x + c, mask), mask);
  });
}

// dx = t w and dw += t x
template <class Act>
void scatter_stream(float t, const float* w, const Act* x, Act* dx, float* dw, int64_t n) {
  for_lanes(n, [&](int64_t c, auto mask) {
    store_lanes(dx + c, t * load_lanes(w + c, mask), mask);
    store_lanes(dw + c, load_lanes(dw + c, mask) + t * load_lanes(x + c, mask), mask);
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

void pool_forward_cpu(Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor m) {
  const int64_t d = a.cols;
  const float* w = w_in.as<float>();
  with_type(a.dtype, [&](auto zero) {
    using Act = decltype(zero);
    parallel_chunks(a.rows, chunk_rows(d), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const Act *ar = a.row<Act>(r), *pr = p.row<Act>(r);
        const float gate = fast_sigmoid(dot(ar, w, d) + dot(pr, w + d, d));
        *g.row<float>(r) = gate;
        mix(gate, ar, pr, m.row<Act>(r), d);
      }
    });
  });
}

void pool_backward_cpu(Tensor dm, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor da, Tensor dp,
                       Tensor dw_in) {
  const int64_t d = a.cols;
  const float* w = w_in.as<float>();
  with_type(a.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const float* sums = sum_over_rows(a.rows, 2 * d, [&](int64_t begin, int64_t end, float* partial) {
      for (int64_t r = begin; r < end; ++r) {
        const Act *ar = a.row<Act>(r), *pr = p.row<Act>(r), *dmr = dm.row<Act>(r);
        const float gate = *g.row<float>(r);
        const float t = dot_difference(dmr, ar, pr, d) * gate * (1.0F - gate);
        pool_stream(gate, dmr, t, w, ar, da.row<Act>(r), partial, d);
        pool_stream(1.0F - gate, dmr, t, w + d, pr, dp.row<Act>(r), partial + d, d);
      }
    });
    add(sums, dw_in.as<float>(), 2 * d);
  });
}

void scatter_forward_cpu(Tensor x, Tensor f, Tensor w, Tensor s, Tensor out) {
  const int64_t d = f.cols;
  with_type(f.dtype, [&](auto zero) {
    using Act = decltype(zero);
    parallel_chunks(f.rows, chunk_rows(d), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float gate = fast_sigmoid(dot(x.row<Act>(r), w.as<float>(), d));
        *s.row<float>(r) = gate;
        scale(gate, f.row<Act>(r), out.row<Act>(r), d);
      }
    });
  });
}

void scatter_backward_cpu(Tensor d_out_a, Tensor d_out_p, Tensor a, Tensor p, Tensor f, Tensor w_a,
                          Tensor w_p, Tensor s_a, Tensor s_p, Tensor df, Tensor da, Tensor dp, Tensor dw_a,
                          Tensor dw_p) {
  const int64_t d = f.cols;
  const bool both = !d_out_a.empty();
  with_type(f.dtype, [&](auto zero) {
    using Act = decltype(zero);
    // The partial holds dw_p, then dw_a.
    const float* sums =
        sum_over_rows(f.rows, both ? 2 * d : d, [&](int64_t begin, int64_t end, float* partial) {
          for (int64_t r = begin; r < end; ++r) {
            const Act *fr = f.row<Act>(r), *d_p = d_out_p.row<Act>(r);
            const float gate_p = *s_p.row<float>(r);
            const float t_p = dot(d_p, fr, d) * gate_p * (1.0F - gate_p);
            if (both) {
              const Act* d_a = d_out_a.row<Act>(r);
              const float gate_a = *s_a.row<float>(r);
              const float t_a = dot(d_a, fr, d) * gate_a * (1.0F - gate_a);
              combine(gate_a, d_a, gate_p, d_p, df.row<Act>(r), d);
              scatter_stream(t_a, w_a.as<float>(), a.row<Act>(r), da.row<Act>(r), partial + d, d);
            } else {
              scale(gate_p, d_p, df.row<Act>(r), d);
              std::fill_n(da.row<Act>(r), d, Act{});
            }
            scatter_stream(t_p, w_p.as<float>(), p.row<Act>(r), dp.row<Act>(r), partial, d);
          }
        });
    add(sums, dw_p.as<float>(), d);
    if (both) add(sums + d, dw_a.as<float>(), d);
  });
}

}  // namespace sps::ops
