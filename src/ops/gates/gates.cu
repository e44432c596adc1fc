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

template <class Act>
struct PoolForward {
  Rows<const Act> a, p;
  const float* w;
  Rows<float> g;
  Rows<Act> m;
  int64_t rows;
  int d;
};

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock) pool_forward_kernel(const PoolForward<Act> q) {
  Group group;
  const int64_t r = int64_t(blockIdx.x) * Group::kGroups + Group::index();
  const bool live = r < q.rows;
  Pieces<Group> a, p;
  a.read(q.a[r], live, q.d);
  p.read(q.p[r], live, q.d);
  const float gate = sigmoid(group.sum(dot(a, q.w, q.d) + dot(p, q.w + q.d, q.d)));
  if (!live) return;
  if (Group::lane() == 0) *q.g[r] = gate;
  scale(gate, a);
  add(1 - gate, p, a);
  a.write(q.m[r], q.d);
}

template <class Act>
struct PoolBackward {
  Rows<const Act> dm, a, p;
  const float* w;
  Rows<const float> g;
  Rows<Act> da, dp;
  float* partials;  // [2 * blocks, d] of dw: the state's half of every block, then the prediction's
  int64_t rows;
  int d;
};

// What pool's backward does to each stream: dx += k dm + t w, dw += t x.
template <class Group, class Act>
__device__ void pool_stream(float k, const Pieces<Group>& dm, float t, const float* w, const Pieces<Group>& x,
                            Act* dx, Pieces<Group>& dw, int d) {
  add(t, x, dw);
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i) {
    const int c = Group::column(i);
    if (c >= d) continue;
    float wi[Group::kWidth], v[Group::kWidth];
    load(w + c, wi);
    load(dx + c, v);
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) v[j] += k * dm.v[i][j] + t * wi[j];
    store(dx + c, v);
  }
}

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock, Group::kBlock > 256 ? 1 : 2)
    pool_backward_kernel(const PoolBackward<Act> q) {
  Group group;
  Pieces<Group> dw_a, dw_p;
  for (int64_t r0 = int64_t(blockIdx.x) * Group::kGroups; r0 < q.rows;
       r0 += int64_t(gridDim.x) * Group::kGroups) {
    const int64_t r = r0 + Group::index();
    const bool live = r < q.rows;
    Pieces<Group> dm, a, p;
    dm.read(q.dm[r], live, q.d);
    a.read(q.a[r], live, q.d);
    p.read(q.p[r], live, q.d);
    const float gate = live ? *q.g[r] : 0;
    const float t = group.sum(dot_difference(dm, a, p)) * gate * (1 - gate);
    if (!live) continue;
    pool_stream(gate, dm, t, q.w, a, q.da[r], dw_a, q.d);
    pool_stream(1 - gate, dm, t, q.w + q.d, p, q.dp[r], dw_p, q.d);
  }
  float* to = q.partials + int64_t(blockIdx.x) * q.d;
  group.add_groups(dw_a.v, to, q.d);
  group.add_groups(dw_p.v, to + int64_t(gridDim.x) * q.d, q.d);
}

template <class Act>
struct ScatterForward {
  Rows<const Act> a, p, f;
  const float *w_a, *w_p;
  Rows<float> s_a, s_p;
  Rows<Act> out_a, out_p;  // out_a may be absent
  int64_t rows;
  int d;
};

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock) scatter_forward_kernel(const ScatterForward<Act> q) {
  Group group;
  const int64_t r = int64_t(blockIdx.x) * Group::kGroups + Group::index();
  const bool live = r < q.rows, both = q.out_a.data != nullptr;
  Pieces<Group> a, p, f;
  p.read(q.p[r], live, q.d);
  f.read(q.f[r], live, q.d);
  if (both) a.read(q.a[r], live, q.d);
  const float gate_p = sigmoid(group.sum(dot(p, q.w_p, q.d)));
  const float gate_a = both ? sigmoid(group.sum(dot(a, q.w_a, q.d))) : 0;
  if (!live) return;
  if (Group::lane() == 0) {
    *q.s_p[r] = gate_p;
    if (both) *q.s_a[r] = gate_a;
  }
  p = f;
  scale(gate_p, p);
  p.write(q.out_p[r], q.d);
  if (!both) return;
  scale(gate_a, f);
  f.write(q.out_a[r], q.d);
}

template <class Act>
struct ScatterBackward {
  Rows<const Act> d_a, d_p, a, p, f;  // d_a and what belongs to it may be absent
  const float *w_a, *w_p;
  Rows<const float> s_a, s_p;
  Rows<Act> df, da, dp;
  float* partials;  // [2 * blocks, d]: dw_p of every block, then dw_a
  int64_t rows;
  int d;
};

// dx = t w
template <class Group, class Act>
__device__ void scaled_weights(float t, const float* w, Act* dx, int d) {
  Pieces<Group> v;
  v.read(w, true, d);
  scale(t, v);
  v.write(dx, d);
}

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock, Group::kBlock > 256 ? 1 : 2)
    scatter_backward_kernel(const ScatterBackward<Act> q) {
  Group group;
  const bool both = q.d_a.data != nullptr;
  Pieces<Group> dw_a, dw_p;
  for (int64_t r0 = int64_t(blockIdx.x) * Group::kGroups; r0 < q.rows;
       r0 += int64_t(gridDim.x) * Group::kGroups) {
    const int64_t r = r0 + Group::index();
    const bool live = r < q.rows;
    Pieces<Group> f, x, df, d_a;
    f.read(q.f[r], live, q.d);
    df.read(q.d_p[r], live, q.d);
    x.read(q.p[r], live, q.d);
    if (both) d_a.read(q.d_a[r], live, q.d);
    const float gate_p = live ? *q.s_p[r] : 0, gate_a = live && both ? *q.s_a[r] : 0;
    const float t_p = group.sum(dot(df, f)) * gate_p * (1 - gate_p);
    const float t_a = both ? group.sum(dot(d_a, f)) * gate_a * (1 - gate_a) : 0;
    if (!live) continue;
    scale(gate_p, df);
    if (both) add(gate_a, d_a, df);
    df.write(q.df[r], q.d);
    add(t_p, x, dw_p);
    scaled_weights<Group>(t_p, q.w_p, q.dp[r], q.d);
    if (both) {
      x.read(q.a[r], true, q.d);
      add(t_a, x, dw_a);
      scaled_weights<Group>(t_a, q.w_a, q.da[r], q.d);
    } else {
      Pieces<Group>{}.write(q.da[r], q.d);
    }
  }
  float* to = q.partials + int64_t(blockIdx.x) * q.d;
  group.add_groups(dw_p.v, to, q.d);
  if (both) group.add_groups(dw_a.v, to + int64_t(gridDim.x) * q.d, q.d);
}

constexpr int kForwardPieces = 4, kBackwardPieces = 2;

template <class Group>
int64_t backward_blocks(int64_t rows) {
  return summing_blocks(rows, Group::kGroups, Group::kBlock > 256 ? 1 : 2);
}

}  // namespace

void pool_forward_cuda(const Exec& ex, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor m) {
  if (a.empty()) return;
  with_device_type(a.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const PoolForward<Act> q{rows_of<const Act>(a),
                             rows_of<const Act>(p),
                             w_in.as<float>(),
                             rows_of<float>(g),
                             rows_of<Act>(m),
                             a.rows,
                             int(a.cols)};
    with_row_group<kForwardPieces>(a.cols, in_pieces({a, p, w_in, m}), [&]<class Group>(Group) {
      const auto blocks = unsigned((a.rows + Group::kGroups - 1) / Group::kGroups);
      pool_forward_kernel<Act, Group><<<blocks, Group::kBlock, 0, stream_of(ex)>>>(q);
      SPS_LAUNCHED();
    });
  });
}

void pool_backward_cuda(const Exec& ex, Tensor dm, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor da,
                        Tensor dp, Tensor dw_in) {
  if (a.empty()) return;
  const int64_t d = a.cols;
  with_device_type(a.dtype, [&](auto zero) {
    using Act = decltype(zero);
    with_row_group<kBackwardPieces>(d, in_pieces({dm, a, p, w_in, da, dp}), [&]<class Group>(Group) {
      const int64_t blocks = backward_blocks<Group>(a.rows);
      auto* partials = reinterpret_cast<float*>(
          device_scratch(ex, DeviceSlot::partial, size_t(2 * blocks * d) * sizeof(float)));
      const PoolBackward<Act> q{rows_of<const Act>(dm),
                                rows_of<const Act>(a),
                                rows_of<const Act>(p),
                                w_in.as<float>(),
                                rows_of<const float>(g),
                                rows_of<Act>(da),
                                rows_of<Act>(dp),
                                partials,
                                a.rows,
                                int(d)};
      pool_backward_kernel<Act, Group><<<unsigned(blocks), Group::kBlock, 0, stream_of(ex)>>>(q);
      SPS_LAUNCHED();
      add_partials(ex, partials, blocks, d, dw_in.as<float>());
      add_partials(ex, partials + blocks * d, blocks, d, dw_in.as<float>() + d);
    });
  });
}

void scatter_forward_cuda(const Exec& ex, Tensor a, Tensor p, Tensor f, Tensor w_a, Tensor w_p, Tensor s_a,
                          Tensor s_p, Tensor out_a, Tensor out_p) {
  if (f.empty()) return;
  const bool both = !out_a.empty();
  if (!both) a = w_a = s_a = {};
  with_device_type(f.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const ScatterForward<Act> q{rows_of<const Act>(a),
                                rows_of<const Act>(p),
                                rows_of<const Act>(f),
                                both ? w_a.as<float>() : nullptr,
                                w_p.as<float>(),
                                rows_of<float>(s_a),
                                rows_of<float>(s_p),
                                rows_of<Act>(out_a),
                                rows_of<Act>(out_p),
                                f.rows,
                                int(f.cols)};
    with_row_group<kForwardPieces>(
        f.cols, in_pieces({a, p, f, w_a, w_p, out_a, out_p}), [&]<class Group>(Group) {
          const auto blocks = unsigned((f.rows + Group::kGroups - 1) / Group::kGroups);
          scatter_forward_kernel<Act, Group><<<blocks, Group::kBlock, 0, stream_of(ex)>>>(q);
          SPS_LAUNCHED();
        });
  });
}

void scatter_backward_cuda(const Exec& ex, Tensor d_out_a, Tensor d_out_p, Tensor a, Tensor p, Tensor f,
                           Tensor w_a, Tensor w_p, Tensor s_a, Tensor s_p, Tensor df, Tensor da, Tensor dp,
                           Tensor dw_a, Tensor dw_p) {
  if (f.empty()) return;
  const bool both = !d_out_a.empty();
  if (!both) a = w_a = s_a = {};
  const int64_t d = f.cols;
  with_device_type(f.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const bool pieces = in_pieces({d_out_a, d_out_p, a, p, f, w_a, w_p, df, da, dp});
    with_row_group<kBackwardPieces>(d, pieces, [&]<class Group>(Group) {
      const int64_t blocks = backward_blocks<Group>(f.rows);
      auto* partials = reinterpret_cast<float*>(
          device_scratch(ex, DeviceSlot::partial, size_t(2 * blocks * d) * sizeof(float)));
      const ScatterBackward<Act> q{rows_of<const Act>(d_out_a),
                                   rows_of<const Act>(d_out_p),
                                   rows_of<const Act>(a),
                                   rows_of<const Act>(p),
                                   rows_of<const Act>(f),
                                   both ? w_a.as<float>() : nullptr,
                                   w_p.as<float>(),
                                   rows_of<const float>(s_a),
                                   rows_of<const float>(s_p),
                                   rows_of<Act>(df),
                                   rows_of<Act>(da),
                                   rows_of<Act>(dp),
                                   partials,
                                   f.rows,
                                   int(d)};
      scatter_backward_kernel<Act, Group><<<unsigned(blocks), Group::kBlock, 0, stream_of(ex)>>>(q);
      SPS_LAUNCHED();
      add_partials(ex, partials, blocks, d, dw_p.as<float>());
      if (both) add_partials(ex, partials + blocks * d, blocks, d, dw_a.as<float>());
    });
  });
}

}  // namespace sps::ops
