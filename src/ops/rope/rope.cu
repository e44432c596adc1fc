// Heads in rows of any number: see rope_units.cuh for one of them.
#include "ops/rope/rope_kernels.h"
#include "ops/rope/rope_units.cuh"

namespace sps::ops {

namespace {

using namespace rope;

// The fast kernels: 2^log lanes hold a head, a unit each, and turn several heads of one row by the same
// angles. Heads slice, slice + slices, ... are one thread's, so that neighbours read neighbouring heads.
template <class In>
constexpr int kHeadsAtOnce = std::is_same_v<In, float> ? 2 : 4;

struct Lanes {
  int log, units;
  unsigned slices;
};

// Which row, slice and unit are this thread's. All groups of a block go through the same number of turns.
struct Place {
  int64_t row;
  int slice, lane;
  bool live;

  __device__ Place(const Shape& shape, const Lanes& lanes, unsigned first_group) {
    const unsigned group = first_group + (threadIdx.x >> lanes.log);
    lane = int(threadIdx.x) & ((1 << lanes.log) - 1);
    row = group / lanes.slices;
    slice = int(group % lanes.slices);
    live = row < shape.rows && lane < lanes.units;
  }
};

constexpr int kBlock = 256;

template <class Act>
struct Norm {
  const float* gain;  // null: no norm
  float eps;
  Rows<float> rstd;
  bool one_row;  // x is one row
};

template <class In, class Out, bool kAdjacent, bool kNorm>
__global__ void __launch_bounds__(kBlock, 2)
    rotate_kernel(Shape shape, Lanes lanes, Angles angles, Rows<const In> x, Norm<Out> norm, Rows<Out> y) {
  constexpr int kHeads = kHeadsAtOnce<In>;
  const Place place(shape, lanes, blockIdx.x * unsigned(kBlock >> lanes.log));
  const Unit<kPiece> unit(shape, place.lane);
  const Turn<kPiece> turn(angles, place.row, unit, place.live);
  float v[kHeads][2][kPiece];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int h = place.slice + i * int(lanes.slices);
    load_unit(x[place.row] + int64_t(h) * shape.head_dim, unit, shape.head_dim, place.live && h < shape.heads,
              v[i]);
  }
  float gain[2][kPiece];
  if constexpr (kNorm) load_unit(norm.gain, unit, shape.head_dim, place.live, gain);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int h = place.slice + i * int(lanes.slices);
    const bool live = place.live && h < shape.heads;
    if constexpr (kNorm) {
      const float k = norm_factor(v[i], lanes.log, shape.head_dim, norm.eps);
      if (live && place.lane == 0 && (place.row == 0 || !norm.one_row)) norm.rstd[place.row][h] = k;
      scale_unit(v[i], k, gain);
    }
    turn.template apply<!kAdjacent>(v[i]);
    if (live) store_unit(y[place.row] + int64_t(h) * shape.head_dim, unit, shape.head_dim, v[i]);
  }
}

template <class Act>
struct NormBackward {
  Rows<const Act> x;
  Rows<const float> rstd;
  const float* gain;
  float* partials;  // [blocks, head_dim] of dgain
};

template <class Act, class Grad, bool kAdjacent>
__global__ void __launch_bounds__(kBlock, 2)
    norm_backward_kernel(Shape shape, Lanes lanes, Angles angles, Rows<const Grad> dy, NormBackward<Act> norm,
                         Rows<Act> dx) {
  constexpr int kHeads = kHeadsAtOnce<Grad> / 2;
  const unsigned groups = kBlock >> lanes.log, all = unsigned(shape.rows) * lanes.slices;
  float dgain[2][kPiece] = {}, gain[2][kPiece];
  {
    const Place place(shape, lanes, 0);
    load_unit(norm.gain, Unit<kPiece>(shape, place.lane), shape.head_dim, place.lane < lanes.units, gain);
  }
  for (unsigned first = blockIdx.x * groups; first < all; first += gridDim.x * groups) {
    const Place place(shape, lanes, first);
    const Unit<kPiece> unit(shape, place.lane);
    const Turn<kPiece> turn(angles, place.row, unit, place.live);
    float dn[kHeads][2][kPiece], x[kHeads][2][kPiece];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int h = place.slice + i * int(lanes.slices);
      const int64_t at = int64_t(h) * shape.head_dim;
      load_unit(dy[place.row] + at, unit, shape.head_dim, place.live && h < shape.heads, dn[i]);
      load_unit(norm.x[place.row] + at, unit, shape.head_dim, place.live && h < shape.heads, x[i]);
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int h = place.slice + i * int(lanes.slices);
      const bool live = place.live && h < shape.heads;
      const float k = live ? norm.rstd[place.row][h] : 0;
      turn.template apply<!kAdjacent>(dn[i]);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 2 * kPiece; ++j) {
        float &d = dn[i][j / kPiece][j % kPiece], &xhat = x[i][j / kPiece][j % kPiece];
        xhat *= k;
        dgain[j / kPiece][j % kPiece] += d * xhat;
        d *= gain[j / kPiece][j % kPiece];
        sum += d * xhat;
      }
      const float mean = lanes_sum(sum, lanes.log) / float(shape.head_dim);
#pragma unroll
      for (int j = 0; j < 2 * kPiece; ++j) {
        float& d = dn[i][j / kPiece][j % kPiece];
        d = k * (d - x[i][j / kPiece][j % kPiece] * mean);
      }
      if (live) store_unit(dx[place.row] + int64_t(h) * shape.head_dim, unit, shape.head_dim, dn[i]);
    }
  }
  // The block's sum over its groups, in order. Rows of head_dim numbers: at most 16 numbers for each thread.
  __shared__ alignas(16) float sums[kBlock * 2 * kPiece];
  const Place place(shape, lanes, 0);
  if (place.lane < lanes.units)
    store_unit(sums + (threadIdx.x >> lanes.log) * shape.head_dim, Unit<kPiece>(shape, place.lane),
               shape.head_dim, dgain);
  __syncthreads();
  for (int c = int(threadIdx.x); c < shape.head_dim; c += kBlock) {
    float sum = 0;
    for (unsigned g = 0; g < groups; ++g) sum += sums[g * shape.head_dim + c];
    norm.partials[int64_t(blockIdx.x) * shape.head_dim + c] = sum;
  }
}

// For every other width and alignment: a warp a head, number by number.
template <class In, class Out>
__global__ void __launch_bounds__(kBlock)
    rotate_any_kernel(Shape shape, int units, Angles angles, Rows<const In> x, Norm<Out> norm, Rows<Out> y) {
  const int64_t group = int64_t(blockIdx.x) * (kBlock / 32) + threadIdx.x / 32;
  const int64_t row = group / shape.heads;
  const int h = int(group - row * shape.heads), lane = int(threadIdx.x % 32);
  if (row >= shape.rows) return;
  const In* from = x[row] + int64_t(h) * shape.head_dim;
  Out* to = y[row] + int64_t(h) * shape.head_dim;
  float k = 1;
  if (norm.gain != nullptr) {
    float sum = 0;
    for (int c = lane; c < shape.head_dim; c += 32) sum += to_float(from[c]) * to_float(from[c]);
    k = 1 / sqrtf(warp_sum(sum) / float(shape.head_dim) + norm.eps);
    if (lane == 0 && (row == 0 || !norm.one_row)) norm.rstd[row][h] = k;
  }
  for (int u = lane; u < units; u += 32) {
    const Unit<1> unit(shape, u);
    float v[2][1];
    load_unit(from, unit, shape.head_dim, true, v);
    if (norm.gain != nullptr) {
      float gain[2][1];
      load_unit(norm.gain, unit, shape.head_dim, true, gain);
      v[0][0] *= k * gain[0][0];
      v[1][0] *= k * gain[1][0];
    }
    Turn<1>(angles, row, unit, true).template apply<true>(v);
    store_unit(to, unit, shape.head_dim, v);
  }
}

constexpr int kAnyWarps = 4;

template <class Act, class Grad>
__global__ void __launch_bounds__(kAnyWarps * 32)
    norm_backward_any_kernel(Shape shape, int units, Angles angles, Rows<const Grad> dy,
                             NormBackward<Act> norm, Rows<Act> dx) {
  __shared__ float sums[kAnyWarps][kRopeMaxHeadDim];
  const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  for (int c = lane; c < shape.head_dim; c += 32) sums[warp][c] = 0;
  __syncwarp();
  const int64_t all = shape.rows * shape.heads;
  for (int64_t group = int64_t(blockIdx.x) * kAnyWarps + warp; group < all;
       group += int64_t(gridDim.x) * kAnyWarps) {
    const int64_t row = group / shape.heads;
    const int h = int(group - row * shape.heads);
    const int64_t at = int64_t(h) * shape.head_dim;
    const float k = norm.rstd[row][h];
    float mean = 0;
    for (int pass = 0; pass < 2; ++pass) {
      const bool last = pass == 1;
      float sum = 0;
      for (int u = lane; u < units; u += 32) {
        const Unit<1> unit(shape, u);
        float d[2][1], x[2][1], gain[2][1];
        load_unit(dy[row] + at, unit, shape.head_dim, true, d);
        load_unit(norm.x[row] + at, unit, shape.head_dim, true, x);
        load_unit(norm.gain, unit, shape.head_dim, true, gain);
        Turn<1>(angles, row, unit, true).template apply<true>(d);
        for (int i = 0; i < 2; ++i) {
          const float xhat = x[i][0] * k;
          if (last && (i == 0 || unit.second < shape.head_dim))
            sums[warp][i == 0 ? unit.first : unit.second] += d[i][0] * xhat;
          d[i][0] *= gain[i][0];
          sum += d[i][0] * xhat;
          d[i][0] = k * (d[i][0] - xhat * mean);
        }
        if (last) store_unit(dx[row] + at, unit, shape.head_dim, d);
      }
      mean = warp_sum(sum) / float(shape.head_dim);
    }
  }
  __syncthreads();
  for (int c = int(threadIdx.x); c < shape.head_dim; c += kAnyWarps * 32) {
    float sum = 0;
    for (int w = 0; w < kAnyWarps; ++w) sum += sums[w][c];
    norm.partials[int64_t(blockIdx.x) * shape.head_dim + c] = sum;
  }
}

// Rows that all began as one: partials[block] = sum of every gridDim.x-th row, turned back. A thread stays in
// its unit.
template <class Grad, int kWidth, bool kAcross>
__global__ void __launch_bounds__(64)
    sum_turned_kernel(Shape shape, int units, Angles angles, Rows<const Grad> dy, float* partials) {
  const int u = int(blockIdx.y * 64 + threadIdx.x);
  if (u >= units * shape.heads) return;
  const int h = u / units;
  const int64_t at = int64_t(h) * shape.head_dim;
  const Unit<kWidth> unit(shape, u - h * units);
  float sum[2][kWidth] = {};
#pragma unroll 4
  for (int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    float v[2][kWidth];
    load_unit(dy[row] + at, unit, shape.head_dim, true, v);
    Turn<kWidth>(angles, row, unit, true).template apply<kAcross>(v);
#pragma unroll
    for (int j = 0; j < 2 * kWidth; ++j) sum[j / kWidth][j % kWidth] += v[j / kWidth][j % kWidth];
  }
  store_unit(partials + int64_t(blockIdx.x) * shape.heads * shape.head_dim + at, unit, shape.head_dim, sum);
}

// From dn, the gradient of the one normalised row, to dx and dgain. One block.
template <class Act>
__global__ void __launch_bounds__(kBlock)
    one_row_kernel(Shape shape, const float* dn, const float* gain, const Act* x, const float* rstd, Act* dx,
                   float* dgain) {
  const int lane = int(threadIdx.x % 32), hd = shape.head_dim;
  for (int h = int(threadIdx.x / 32); h < shape.heads; h += kBlock / 32) {
    const float* d = dn + int64_t(h) * hd;
    const Act* xh = x + int64_t(h) * hd;
    const float k = gain != nullptr ? rstd[h] : 1;
    float sum = 0;
    if (gain != nullptr)
      for (int c = lane; c < hd; c += 32) sum += d[c] * gain[c] * to_float(xh[c]) * k;
    const float mean = warp_sum(sum) / float(hd);
    for (int c = lane; c < hd; c += 32)
      dx[int64_t(h) * hd + c] =
          from_float<Act>(gain != nullptr ? k * (d[c] * gain[c] - to_float(xh[c]) * k * mean) : d[c]);
  }
  if (gain == nullptr) return;
  for (int c = int(threadIdx.x); c < hd; c += kBlock) {
    float sum = 0;
    for (int h = 0; h < shape.heads; ++h)
      sum += dn[int64_t(h) * hd + c] * to_float(x[int64_t(h) * hd + c]) * rstd[h];
    dgain[c] += sum;
  }
}

Shape shape_of(Tensor y, int64_t heads, const RopeTable& table) {
  return {y.rows, int(heads), int(y.cols / heads), int(table.cos.cols), table.pairs == RopePairs::adjacent};
}
Angles angles_of(const RopeTable& table, std::span<const int32_t> positions, float sign) {
  return {rows_of<const float>(table.cos), rows_of<const float>(table.sin), positions.data(), sign};
}

// Whether the units of every head are whole pieces of 16 bytes, and a warp holds a head.
bool is_fast(const Shape& shape, const RopeTable& table, std::initializer_list<Tensor> rows) {
  return shape.pairs % kPiece == 0 && shape.head_dim % (2 * kPiece) == 0 &&
         shape.head_dim <= 32 * 2 * kPiece && in_pieces({table.cos, table.sin}) && in_pieces(rows);
}

Lanes lanes_of(const Shape& shape, int heads_at_once) {
  Lanes lanes{0, units_of<kPiece>(shape), unsigned((shape.heads + heads_at_once - 1) / heads_at_once)};
  while ((1 << lanes.log) < lanes.units) ++lanes.log;
  SPS_CHECK(shape.rows * lanes.slices < INT32_MAX);  // groups are counted in 32 bits
  return lanes;
}

template <class In, class Out>
void rotate(const Exec& ex, const Shape& shape, const RopeTable& table, const Angles& angles, Tensor x,
            const Norm<Out>& norm, Tensor gain, Tensor y) {
  const Rows<const In> from = rows_of<const In>(x);
  const Rows<Out> to = rows_of<Out>(y);
  if (!is_fast(shape, table, {x, gain, y})) {
    const auto blocks = unsigned((shape.rows * shape.heads + kBlock / 32 - 1) / (kBlock / 32));
    rotate_any_kernel<In, Out>
        <<<blocks, kBlock, 0, stream_of(ex)>>>(shape, units_of<1>(shape), angles, from, norm, to);
    SPS_LAUNCHED();
    return;
  }
  const Lanes lanes = lanes_of(shape, kHeadsAtOnce<In>);
  const int64_t groups = kBlock >> lanes.log;
  const auto blocks = unsigned((shape.rows * lanes.slices + groups - 1) / groups);
  const auto run = [&]<bool kAdjacent, bool kNorm>() {
    rotate_kernel<In, Out, kAdjacent, kNorm>
        <<<blocks, kBlock, 0, stream_of(ex)>>>(shape, lanes, angles, from, norm, to);
    SPS_LAUNCHED();
  };
  if constexpr (std::is_same_v<In, Out>) {
    if (gain)
      return shape.adjacent ? run.template operator()<true, true>() : run.template operator()<false, true>();
  }
  shape.adjacent ? run.template operator()<true, false>() : run.template operator()<false, false>();
}

template <class Act, class Grad>
void norm_backward(const Exec& ex, const Shape& shape, const RopeTable& table, const Angles& angles,
                   Tensor dy, Tensor gain, Tensor x, Tensor rstd, Tensor dx, Tensor dgain) {
  const bool fast = is_fast(shape, table, {dy, gain, x, dx});
  const Lanes lanes = lanes_of(shape, kHeadsAtOnce<Grad> / 2);
  const int64_t blocks = fast ? summing_blocks(shape.rows * lanes.slices, kBlock >> lanes.log, 2)
                              : summing_blocks(shape.rows * shape.heads, kAnyWarps, 8);
  auto* partials = reinterpret_cast<float*>(
      device_scratch(ex, DeviceSlot::partial, size_t(blocks * shape.head_dim) * sizeof(float)));
  const NormBackward<Act> norm{rows_of<const Act>(x), rows_of<const float>(rstd), gain.as<float>(), partials};
  const Rows<const Grad> from = rows_of<const Grad>(dy);
  const Rows<Act> to = rows_of<Act>(dx);
  if (!fast)
    norm_backward_any_kernel<Act, Grad><<<unsigned(blocks), kAnyWarps * 32, 0, stream_of(ex)>>>(
        shape, units_of<1>(shape), angles, from, norm, to);
  else if (shape.adjacent)
    norm_backward_kernel<Act, Grad, true>
        <<<unsigned(blocks), kBlock, 0, stream_of(ex)>>>(shape, lanes, angles, from, norm, to);
  else
    norm_backward_kernel<Act, Grad, false>
        <<<unsigned(blocks), kBlock, 0, stream_of(ex)>>>(shape, lanes, angles, from, norm, to);
  SPS_LAUNCHED();
  add_partials(ex, partials, blocks, shape.head_dim, dgain.as<float>());
}

template <class Act, class Grad>
void backward_one_row(const Exec& ex, const Shape& shape, const RopeTable& table, const Angles& angles,
                      Tensor dy, Tensor gain, Tensor x, Tensor rstd, Tensor dx, Tensor dgain) {
  constexpr int64_t kRowsOfBlock = 64;
  const int64_t blocks = std::max<int64_t>(1, (shape.rows + kRowsOfBlock - 1) / kRowsOfBlock), cols = dy.cols;
  auto* partials = reinterpret_cast<float*>(
      device_scratch(ex, DeviceSlot::partial, size_t((blocks + 1) * cols) * sizeof(float)));
  float* dn = partials + blocks * cols;
  const auto run = [&]<int kWidth, bool kAcross>() {
    const int units = units_of<kWidth>(shape);
    const dim3 grid(unsigned(blocks), unsigned((units * shape.heads + 63) / 64));
    sum_turned_kernel<Grad, kWidth, kAcross>
        <<<grid, 64, 0, stream_of(ex)>>>(shape, units, angles, rows_of<const Grad>(dy), partials);
    SPS_LAUNCHED();
  };
  if (!is_fast(shape, table, {dy}))
    run.template operator()<1, true>();
  else if (shape.adjacent)
    run.template operator()<kPiece, false>();
  else
    run.template operator()<kPiece, true>();
  add_partials(ex, partials, blocks, cols, dn, false);
  one_row_kernel<Act><<<1, kBlock, 0, stream_of(ex)>>>(
      shape, dn, gain ? gain.as<float>() : nullptr, gain ? x.as<Act>() : nullptr,
      gain ? rstd.as<float>() : nullptr, dx.as<Act>(), gain ? dgain.as<float>() : nullptr);
  SPS_LAUNCHED();
}

}  // namespace

void rope_forward_cuda(const Exec& ex, Tensor x, int64_t heads, const RopeTable& table,
                       std::span<const int32_t> positions, const QkNorm& norm, Tensor rstd, Tensor y) {
  if (y.empty()) return;
  with_device_type(y.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const Norm<Act> n{norm.gain ? norm.gain.as<float>() : nullptr, norm.eps,
                      norm.gain ? rows_of<float>(rstd) : Rows<float>{}, x.rows == 1};
    rotate<Act, Act>(ex, shape_of(y, heads, table), table, angles_of(table, positions, 1), x, n, norm.gain,
                     y);
  });
}

void rope_backward_cuda(const Exec& ex, Tensor dy, int64_t heads, const RopeTable& table,
                        std::span<const int32_t> positions, const QkNorm& norm, Tensor x, Tensor rstd,
                        Tensor dx, Tensor dgain) {
  if (dx.empty()) return;
  const Shape shape = shape_of(dy, heads, table);
  const Angles angles = angles_of(table, positions, -1);
  const auto run = [&]<class Act, class Grad>() {
    if (dx.rows == 1)
      backward_one_row<Act, Grad>(ex, shape, table, angles, dy, norm.gain, x, rstd, dx, dgain);
    else if (norm.gain)
      norm_backward<Act, Grad>(ex, shape, table, angles, dy, norm.gain, x, rstd, dx, dgain);
    else
      rotate<Grad, Act>(ex, shape, table, angles, dy, {}, {}, dx);
  };
  if (dx.dtype == DType::f32)
    run.template operator()<float, float>();
  else if (dy.dtype == DType::f32)
    run.template operator()<bf16, float>();
  else
    run.template operator()<bf16, bf16>();
}

}  // namespace sps::ops
