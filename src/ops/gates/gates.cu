// Each row is read once: its group of threads keeps it in registers between the dot product and its use.
#include "ops/gates/gates_kernels.h"
#include "ops/rowwise.cuh"

namespace sps::ops {

namespace {

__device__ float sigmoid(float z) {
  return 1 / (1 + expf(-z));
}

// One thread's pieces of a row.
template <class Group>
struct Pieces {
  float v[Group::kPieces][Group::kWidth] = {};

  template <class T>
  __device__ void read(const T* row, bool live, int d) {
#pragma unroll
    for (int i = 0; i < Group::kPieces; ++i)
      load_if(live && Group::column(i) < d, row + Group::column(i), v[i]);
  }
  template <class T>
  __device__ void write(T* row, int d) const {
#pragma unroll
    for (int i = 0; i < Group::kPieces; ++i)
      if (Group::column(i) < d) store(row + Group::column(i), v[i]);
  }
};

// The thread's part of the dot product with a vector of weights.
template <class Group>
__device__ float dot(const Pieces<Group>& x, const float* w, int d) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i) {
    float wi[Group::kWidth];
    load_if(Group::column(i) < d, w + Group::column(i), wi);
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) sum += x.v[i][j] * wi[j];
  }
  return sum;
}
template <class Group>
__device__ float dot(const Pieces<Group>& x, const Pieces<Group>& y) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i)
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) sum += x.v[i][j] * y.v[i][j];
  return sum;
}
// x . (y - z)
template <class Group>
__device__ float dot_difference(const Pieces<Group>& x, const Pieces<Group>& y, const Pieces<Group>& z) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i)
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) sum += x.v[i][j] * (y.v[i][j] - z.v[i][j]);
  return sum;
}
// y += t x
template <class Group>
__device__ void add(float t, const Pieces<Group>& x, Pieces<Group>& y) {
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i)
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) y.v[i][j] += t * x.v[i][j];
}
template <class Group>
__device__ void scale(float t, Pieces<Group>& x) {
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i)
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) x.v[i][j] *= t;
}

// The weights in a kernel; a's may be absent (null), like all that belongs to its output.
struct Weights {
  const float *in, *a, *p;
};
template <class T>
struct Gates {
  Rows<T> in, a, p;
};

template <class Act>
struct PoolForward {
  Rows<const Act> a, p;
  Weights w;
  Gates<float> gates;
  Rows<Act> m;
  int64_t rows;
  int d;
};

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock) pool_forward_kernel(const PoolForward<Act> q) {
  Group group;
  const int64_t r = int64_t(blockIdx.x) * Group::kGroups + Group::index();
  const bool live = r < q.rows, both = q.w.a != nullptr;
  Pieces<Group> a, p;
  a.read(q.a[r], live, q.d);
  p.read(q.p[r], live, q.d);
  const float g = sigmoid(group.sum(dot(a, q.w.in, q.d) + dot(p, q.w.in + q.d, q.d)));
  const float s_p = sigmoid(group.sum(dot(p, q.w.p, q.d)));
  const float s_a = both ? sigmoid(group.sum(dot(a, q.w.a, q.d))) : 0;
  if (!live) return;
  if (Group::lane() == 0) {
    *q.gates.in[r] = g;
    *q.gates.p[r] = s_p;
    if (both) *q.gates.a[r] = s_a;
  }
  scale(g, a);
  add(1 - g, p, a);
  a.write(q.m[r], q.d);
}

template <class Act>
struct PoolBackward {
  Rows<const Act> dm, a, p;
  Weights w;
  Rows<const float> g;
  Gates<const float> t;
  Rows<Act> da, dp;
  float* partials;  // [4 * blocks, d]: of every block dw_in's halves, dw_p, then dw_a
  int64_t rows;
  int d;
};

// What pool's backward does to each stream: dx = k dm + t w + t_out w_out, dw += t x, dw_out += t_out x.
template <class Group, class Act>
__device__ void pool_stream(float k, const Pieces<Group>& dm, float t, const float* w, float t_out,
                            const float* w_out, const Pieces<Group>& x, Act* dx, Pieces<Group>& dw,
                            Pieces<Group>& dw_out, int d) {
  add(t, x, dw);
  add(t_out, x, dw_out);
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i) {
    const int c = Group::column(i);
    if (c >= d) continue;
    float wi[Group::kWidth], wo[Group::kWidth], v[Group::kWidth];
    load(w + c, wi);
    load_if(w_out != nullptr, w_out + c, wo);
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) v[j] = k * dm.v[i][j] + t * wi[j] + t_out * wo[j];
    store(dx + c, v);
  }
}

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock, 1) pool_backward_kernel(const PoolBackward<Act> q) {
  Group group;
  const bool both = q.w.a != nullptr;
  Pieces<Group> in_a, in_p, out_a, out_p;
  for (int64_t r0 = int64_t(blockIdx.x) * Group::kGroups; r0 < q.rows;
       r0 += int64_t(gridDim.x) * Group::kGroups) {
    const int64_t r = r0 + Group::index();
    const bool live = r < q.rows;
    Pieces<Group> dm, a, p;
    dm.read(q.dm[r], live, q.d);
    a.read(q.a[r], live, q.d);
    p.read(q.p[r], live, q.d);
    const float g = live ? *q.g[r] : 0, t_p = live ? *q.t.p[r] : 0, t_a = live && both ? *q.t.a[r] : 0;
    const float t = group.sum(dot_difference(dm, a, p)) * g * (1 - g);
    if (!live) continue;
    pool_stream(g, dm, t, q.w.in, t_a, q.w.a, a, q.da[r], in_a, out_a, q.d);
    pool_stream(1 - g, dm, t, q.w.in + q.d, t_p, q.w.p, p, q.dp[r], in_p, out_p, q.d);
  }
  float* to = q.partials + int64_t(blockIdx.x) * q.d;
  const int64_t next = int64_t(gridDim.x) * q.d;
  group.add_groups(in_a.v, to, q.d);
  group.add_groups(in_p.v, to + next, q.d);
  group.add_groups(out_p.v, to + 2 * next, q.d);
  if (both) group.add_groups(out_a.v, to + 3 * next, q.d);
}

template <class Act>
struct ScatterForward {
  Rows<const Act> f;
  Gates<const float> gates;
  Rows<Act> out_a, out_p;  // out_a may be absent

  template <int kWidth>
  struct Loaded {
    float f[kWidth];
    float s_a, s_p;
  };
  template <int kWidth>
  __device__ void read(int64_t r, int64_t c, bool live, Loaded<kWidth>& x) const {
    load_if(live, f[r] + c, x.f);
    x.s_p = live ? *gates.p[r] : 0;
    x.s_a = live && out_a.data != nullptr ? *gates.a[r] : 0;
  }
  template <int kWidth>
  __device__ void write(int64_t r, int64_t c, const Loaded<kWidth>& x) const {
    float y[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) y[j] = x.s_p * x.f[j];
    store(out_p[r] + c, y);
    if (out_a.data == nullptr) return;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) y[j] = x.s_a * x.f[j];
    store(out_a[r] + c, y);
  }
};

template <class Act>
struct ScatterBackward {
  Rows<const Act> d_a, d_p, f;  // d_a may be absent
  Gates<const float> gates;
  Rows<Act> df;
  Gates<float> t;
  int64_t rows;
  int d;
};

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock) scatter_backward_kernel(const ScatterBackward<Act> q) {
  Group group;
  const int64_t r = int64_t(blockIdx.x) * Group::kGroups + Group::index();
  const bool live = r < q.rows, both = q.d_a.data != nullptr;
  Pieces<Group> f, df, d_a;
  f.read(q.f[r], live, q.d);
  df.read(q.d_p[r], live, q.d);
  if (both) d_a.read(q.d_a[r], live, q.d);
  const float s_p = live ? *q.gates.p[r] : 0, s_a = live && both ? *q.gates.a[r] : 0;
  const float t_p = group.sum(dot(df, f)) * s_p * (1 - s_p);
  const float t_a = both ? group.sum(dot(d_a, f)) * s_a * (1 - s_a) : 0;
  if (!live) return;
  if (Group::lane() == 0) {
    *q.t.p[r] = t_p;
    if (both) *q.t.a[r] = t_a;
  }
  scale(s_p, df);
  if (both) add(s_a, d_a, df);
  df.write(q.df[r], q.d);
}

constexpr int kPiecesOfARow = 4, kPiecesWithSums = 2;

Weights weights_of(const GateWeights& w, bool both) {
  return {w.in.as<float>(), both ? w.a.as<float>() : nullptr, w.p.as<float>()};
}
template <class T>
Gates<T> gates_of(const GateRows& g, bool both) {
  return {rows_of<T>(g.in), both ? rows_of<T>(g.a) : Rows<T>{}, rows_of<T>(g.p)};
}
// A block for each of its groups of rows.
template <class Group>
unsigned blocks_of(int64_t rows) {
  return unsigned((rows + Group::kGroups - 1) / Group::kGroups);
}

}  // namespace

void pool_forward_cuda(const Exec& ex, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates,
                       Tensor m) {
  if (a.empty()) return;
  const bool both = !w.a.empty();
  with_device_type(a.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const PoolForward<Act> q{rows_of<const Act>(a),
                             rows_of<const Act>(p),
                             weights_of(w, both),
                             gates_of<float>(gates, both),
                             rows_of<Act>(m),
                             a.rows,
                             int(a.cols)};
    const bool pieces = in_pieces({a, p, w.in, w.a, w.p, m});
    with_row_group<kPiecesOfARow>(a.cols, pieces, [&]<class Group>(Group) {
      pool_forward_kernel<Act, Group><<<blocks_of<Group>(a.rows), Group::kBlock, 0, stream_of(ex)>>>(q);
      SPS_LAUNCHED();
    });
  });
}

void pool_backward_cuda(const Exec& ex, Tensor dm, Tensor a, Tensor p, const GateWeights& w,
                        const GateRows& gates, const GateRows& t, Tensor da, Tensor dp,
                        const GateWeights& dw) {
  if (a.empty()) return;
  const bool both = !t.a.empty();
  const int64_t d = a.cols;
  with_device_type(a.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const bool pieces = in_pieces({dm, a, p, w.in, w.a, w.p, da, dp});
    with_row_group<kPiecesWithSums>(d, pieces, [&]<class Group>(Group) {
      const int64_t blocks = summing_blocks(a.rows, Group::kGroups, 1);
      auto* partials = reinterpret_cast<float*>(
          device_scratch(ex, DeviceSlot::partial, size_t(4 * blocks * d) * sizeof(float)));
      const PoolBackward<Act> q{rows_of<const Act>(dm),
                                rows_of<const Act>(a),
                                rows_of<const Act>(p),
                                weights_of(w, both),
                                rows_of<const float>(gates.in),
                                gates_of<const float>(t, both),
                                rows_of<Act>(da),
                                rows_of<Act>(dp),
                                partials,
                                a.rows,
                                int(d)};
      pool_backward_kernel<Act, Group><<<unsigned(blocks), Group::kBlock, 0, stream_of(ex)>>>(q);
      SPS_LAUNCHED();
      add_partials(ex, partials, blocks, d, dw.in.as<float>());
      add_partials(ex, partials + blocks * d, blocks, d, dw.in.as<float>() + d);
      add_partials(ex, partials + 2 * blocks * d, blocks, d, dw.p.as<float>());
      if (both) add_partials(ex, partials + 3 * blocks * d, blocks, d, dw.a.as<float>());
    });
  });
}

void scatter_forward_cuda(const Exec& ex, Tensor f, const GateRows& gates, Tensor out_a, Tensor out_p) {
  with_device_type(f.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const ScatterForward<Act> q{rows_of<const Act>(f), gates_of<const float>(gates, !out_a.empty()),
                                rows_of<Act>(out_a), rows_of<Act>(out_p)};
    elementwise(ex, q, f.rows, f.cols, in_pieces({f, out_a, out_p}));
  });
}

void scatter_backward_cuda(const Exec& ex, Tensor d_out_a, Tensor d_out_p, Tensor f, const GateRows& gates,
                           Tensor df, const GateRows& t) {
  if (f.empty()) return;
  const bool both = !d_out_a.empty();
  with_device_type(f.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const ScatterBackward<Act> q{rows_of<const Act>(d_out_a),
                                 rows_of<const Act>(d_out_p),
                                 rows_of<const Act>(f),
                                 gates_of<const float>(gates, both),
                                 rows_of<Act>(df),
                                 gates_of<float>(t, both),
                                 f.rows,
                                 int(f.cols)};
    with_row_group<kPiecesOfARow>(f.cols, in_pieces({d_out_a, d_out_p, f, df}), [&]<class Group>(Group) {
      scatter_backward_kernel<Act, Group><<<blocks_of<Group>(f.rows), Group::kBlock, 0, stream_of(ex)>>>(q);
      SPS_LAUNCHED();
    });
  });
}

}  // namespace sps::ops
