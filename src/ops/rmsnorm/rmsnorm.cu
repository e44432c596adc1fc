// A row is read once and stays in the registers of its group of threads between the two uses.
#include "ops/rmsnorm/rmsnorm_kernels.h"
#include "ops/rowwise.cuh"

namespace sps::ops {

namespace {

template <class Act>
struct Forward {
  Rows<const float> x;
  Rows<const Act> delta;
  const float* gain;
  float eps;
  Rows<float> s;
  Rows<Act> y;
  Rows<float> rstd;
  const int32_t* pick;  // null: every row
  int64_t rows;
  int d;
};

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock) forward_kernel(const Forward<Act> p) {
  Group group;
  const int64_t r = int64_t(blockIdx.x) * Group::kGroups + Group::index();
  const bool live = r < p.rows;
  const int64_t from = !live ? 0 : p.pick != nullptr ? p.pick[r] : r;
  float v[Group::kPieces][Group::kWidth];
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i) {
    const int c = Group::column(i);
    load_if(live && c < p.d, p.x[from] + c, v[i]);
  }
  if (p.delta.data != nullptr) {
    float delta[Group::kPieces][Group::kWidth];
#pragma unroll
    for (int i = 0; i < Group::kPieces; ++i) {
      const int c = Group::column(i);
      load_if(live && c < p.d, p.delta[from] + c, delta[i]);
    }
#pragma unroll
    for (int i = 0; i < Group::kPieces; ++i)
#pragma unroll
      for (int j = 0; j < Group::kWidth; ++j) v[i][j] += delta[i][j];
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i)
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) sum += v[i][j] * v[i][j];
  const float k = 1 / sqrtf(group.sum(sum) / float(p.d) + p.eps);
  if (!live) return;
  if (Group::lane() == 0) *p.rstd[r] = k;
  const bool writes = p.delta.data != nullptr || p.s.data != p.x.data;
#pragma unroll
  for (int i = 0; i < Group::kPieces; ++i) {
    const int c = Group::column(i);
    if (c >= p.d) continue;
    float gain[Group::kWidth];
    load(p.gain + c, gain);
    if (writes) store(p.s[r] + c, v[i]);
#pragma unroll
    for (int j = 0; j < Group::kWidth; ++j) v[i][j] *= k * gain[j];
    store(p.y[r] + c, v[i]);
  }
}

template <class Act>
struct Backward {
  Rows<const Act> dy;
  Rows<const float> s;
  const float* gain;
  Rows<const float> rstd, dres;
  Rows<float> ds;
  Rows<Act> ds_act;
  const int32_t* pick;
  float* partials;  // [blocks, d] of dgain
  int64_t rows;
  int d;
};

constexpr int kMostPieces = 4;

// Blocks that fit a multiprocessor: what a thread keeps is proportional to its columns.
template <class Group>
constexpr int backward_blocks() {
  return Group::kBlock > 256 ? 1 : Group::kPieces * Group::kWidth > 16 ? 2 : 3;
}

template <class Act, class Group>
__global__ void __launch_bounds__(Group::kBlock, backward_blocks<Group>())
    backward_kernel(const Backward<Act> p) {
  Group group;
  float dgain[Group::kPieces][Group::kWidth] = {};
  // The block's groups stay together: all of them take part in the sum.
  for (int64_t r0 = int64_t(blockIdx.x) * Group::kGroups; r0 < p.rows;
       r0 += int64_t(gridDim.x) * Group::kGroups) {
    const int64_t r = r0 + Group::index();
    const bool live = r < p.rows;
    const int64_t to = !live ? 0 : p.pick != nullptr ? p.pick[r] : r;
    const float k = live ? *p.rstd[r] : 0;
    float dy[Group::kPieces][Group::kWidth], s[Group::kPieces][Group::kWidth];
#pragma unroll
    for (int i = 0; i < Group::kPieces; ++i) {
      const int c = Group::column(i);
      load_if(live && c < p.d, p.dy[r] + c, dy[i]);
      load_if(live && c < p.d, p.s[r] + c, s[i]);
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Group::kPieces; ++i) {
      const int c = Group::column(i);
      float gain[Group::kWidth];
      load_if(c < p.d, p.gain + c, gain);
#pragma unroll
      for (int j = 0; j < Group::kWidth; ++j) {
        const float g = k * dy[i][j];
        dgain[i][j] += g * s[i][j];
        dy[i][j] = g * gain[j];  // k u
        sum += dy[i][j] * s[i][j];
      }
    }
    // ds = k u - m s, m = k^2 mean(u xhat) and u xhat = k u s
    const float m = k * k * (group.sum(sum) / float(p.d));
    if (!live) continue;
#pragma unroll
    for (int i = 0; i < Group::kPieces; ++i) {
      const int c = Group::column(i);
      if (c >= p.d) continue;
      float v[Group::kWidth] = {};
      if (p.dres.data != nullptr) load(p.dres[r] + c, v);
#pragma unroll
      for (int j = 0; j < Group::kWidth; ++j) v[j] += dy[i][j] - m * s[i][j];
      store(p.ds[to] + c, v);
      if (p.ds_act.data != nullptr) store(p.ds_act[to] + c, v);
    }
  }
  group.add_groups(dgain, p.partials + int64_t(blockIdx.x) * p.d, p.d);
}

// Rows of ds that were not picked become zero, a warp for each. Row r stands at most at place r among the
// picked, and at least at r less the number of rows left out: often the search has nothing to do.
template <class Act>
__global__ void __launch_bounds__(256)
    zero_unpicked_kernel(Rows<float> ds, Rows<Act> ds_act, const int32_t* pick, int64_t picked, int64_t rows,
                         int64_t d) {
  const int64_t r = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
  if (r >= rows) return;
  int64_t low = r > rows - picked ? r - (rows - picked) : 0, high = r < picked ? r : picked;
  while (low < high) {  // the first place that holds r or more
    const int64_t middle = (low + high) / 2;
    if (pick[middle] < r)
      low = middle + 1;
    else
      high = middle;
  }
  if (low < picked && pick[low] == r) return;
  for (int64_t c = threadIdx.x % 32; c < d; c += 32) {
    ds[r][c] = 0;
    if (ds_act.data != nullptr) ds_act[r][c] = from_float<Act>(0);
  }
}

}  // namespace

void rmsnorm_forward_cuda(const Exec& ex, Tensor x, Tensor delta, Tensor gain, float eps, Tensor s, Tensor y,
                          Tensor rstd, std::span<const int32_t> pick) {
  with_device_type(y.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const Forward<Act> p{rows_of<const float>(x),
                         rows_of<const Act>(delta),
                         gain.as<float>(),
                         eps,
                         rows_of<float>(s),
                         rows_of<Act>(y),
                         rows_of<float>(rstd),
                         pick.empty() ? nullptr : pick.data(),
                         s.rows,
                         int(s.cols)};
    with_row_group<kMostPieces>(s.cols, in_pieces({x, delta, gain, s, y}), [&]<class Group>(Group) {
      const auto blocks = unsigned((s.rows + Group::kGroups - 1) / Group::kGroups);
      forward_kernel<Act, Group><<<blocks, Group::kBlock, 0, stream_of(ex)>>>(p);
      SPS_LAUNCHED();
    });
  });
}

void rmsnorm_backward_cuda(const Exec& ex, Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres,
                           Tensor ds, Tensor ds_act, Tensor dgain, std::span<const int32_t> pick) {
  const int64_t rows = dy.rows, d = ds.cols;
  if (ds.empty()) return;
  with_device_type(dy.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const int32_t* picked = pick.empty() ? nullptr : pick.data();
    if (ds.rows != rows) {
      const auto blocks = unsigned((ds.rows + 7) / 8);
      zero_unpicked_kernel<Act><<<blocks, 256, 0, stream_of(ex)>>>(rows_of<float>(ds), rows_of<Act>(ds_act),
                                                                   picked, rows, ds.rows, d);
      SPS_LAUNCHED();
    }
    if (rows == 0) return;
    with_row_group<kMostPieces>(d, in_pieces({dy, s, gain, dres, ds, ds_act}), [&]<class Group>(Group) {
      const int64_t blocks = summing_blocks(rows, Group::kGroups, backward_blocks<Group>());
      auto* partials = reinterpret_cast<float*>(
          device_scratch(ex, DeviceSlot::partial, size_t(blocks * d) * sizeof(float)));
      const Backward<Act> p{rows_of<const Act>(dy),
                            rows_of<const float>(s),
                            gain.as<float>(),
                            rows_of<const float>(rstd),
                            rows_of<const float>(dres),
                            rows_of<float>(ds),
                            rows_of<Act>(ds_act),
                            picked,
                            partials,
                            rows,
                            int(d)};
      backward_kernel<Act, Group><<<unsigned(blocks), Group::kBlock, 0, stream_of(ex)>>>(p);
      SPS_LAUNCHED();
      add_partials(ex, partials, blocks, d, dgain.as<float>());
    });
  });
}

}  // namespace sps::ops
