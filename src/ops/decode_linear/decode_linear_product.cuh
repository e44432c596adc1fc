// y^T = w x^T for few rows. The numbers along k are cut into parts, the same for any number of rows; a sum is
// that of its parts, in order. The parts are shared out over the warps of a block. (With more rows, whose
// numbers would come to every block in full, over the blocks of a cluster: decode_linear_cluster.cuh.)
//
// A warp has eight features and a part. Its lanes ask for weights kDepth chunks ahead, each for the bytes
// that it will use itself, so nobody waits for anybody on the way; the first chunks are asked for before the
// kernel before this one has ended.
#pragma once

#include "ops/decode_linear/decode_linear_cuda.h"
#include "ops/decode_linear/decode_linear_sums.cuh"
#include "ops/launch.cuh"

namespace sps::ops::decode_product {

template <class T>
struct Product {
  const void* x = nullptr;  // T, or floats where there is a gain
  int64_t x_stride = 0;
  const int32_t* pick = nullptr;  // rows of x; null: all
  const float* gain = nullptr;    // of a norm
  float eps = 0;
  const T* w = nullptr;
  int64_t w_stride = 0;
  int rows = 0, k = 0;
  int outputs = 0;  // columns of the result: of the two streams of SwiGLU, one
  int part_chunks = 0, tiles = 0;
  DecodeEnd end = DecodeEnd::store;
  bool floats = false;                 // the result is f32, not T
  void *y = nullptr, *rest = nullptr;  // columns from `split` on go to rest
  int64_t y_stride = 0, rest_stride = 0;
  int split = 0;
};

// Bytes of shared memory that a block can have.
inline int most_shared() {
  static const int bytes = [] {
    int most = 0;
    SPS_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    return most;
  }();
  return bytes;
}

// How many parts k is cut into. Depends on k alone: so do the bits.
inline int parts_of(int64_t k) {
  return k <= 2048 ? 4 : 8;
}

// All but `tiles`.
template <class T>
Product<T> make_product(const DecodeCall& call) {
  const DecodeRows& x = call.x;
  Product<T> p;
  p.x = x.x.data, p.x_stride = x.x.stride;
  if (x.gain) {
    p.gain = x.gain.as<float>(), p.eps = x.eps;
    p.pick = x.pick.empty() ? nullptr : x.pick.data();
  }
  p.w = call.w.as<T>(), p.w_stride = call.w.stride;
  p.rows = int(x.rows()), p.k = int(call.w.cols);
  p.end = call.end;
  p.outputs = int(call.end == DecodeEnd::swiglu ? call.w.rows / 2 : call.w.rows);
  p.floats = call.y.dtype == DType::f32;
  p.y = call.y.data, p.y_stride = call.y.stride, p.split = int(call.y.cols);
  p.rest = call.rest.data, p.rest_stride = call.rest.stride;
  p.part_chunks = int(ceil_div(ceil_div(p.k, kChunk<T>), parts_of(p.k)));
  return p;
}

// Read where kernels before this one have written: past the first-level cache, which may be older than that.
__device__ __forceinline__ uint4 read_vector(const void* p) {
  return __ldcg(static_cast<const uint4*>(p));
}

// ---- RMSNorm of a row by a warp

// A lane adds up the squares of every 32nd four numbers, in order; of the lanes' sums comes the scale.
__device__ __forceinline__ float add_squares(float4 v, float sum) {
  return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
}
__device__ __forceinline__ float scale_of(float lane_sum, float eps, int k) {
  return 1 / sqrtf(warp_sum(lane_sum) / float(k) + eps);
}
// What the numbers of a row are multiplied with; read(c) gives four of them. k is a multiple of 4.
template <class Read>
__device__ __forceinline__ float norm_scale(Read&& read, float eps, int k) {
  const int lane = int(threadIdx.x) % kWarp;
  float sum = 0;
#pragma unroll 4
  for (int c = 4 * lane; c < k; c += 4 * kWarp) sum = add_squares(read(c), sum);
  return scale_of(sum, eps, k);
}
__device__ __forceinline__ float4 normed(float4 v, float scale, float4 gain) {
  return {v.x * (scale * gain.x), v.y * (scale * gain.y), v.z * (scale * gain.z), v.w * (scale * gain.w)};
}

// Calls put(c, n) with n[0 .. 4), the normed numbers of columns c .. c + 3, for all columns below `columns`:
// k, or more, and then zeros behind it. read(c) gives four numbers of the row, twice. k and columns are
// multiples of 4. put may write where columns up to c were read.
template <class Read, class Put>
__device__ __forceinline__ void norm_row(Read&& read, const float* gain, float eps, int k, int columns,
                                         Put&& put) {
  const int lane = int(threadIdx.x) % kWarp;
  const float scale = norm_scale(read, eps, k);
  for (int first = 0; first < columns; first += 4 * kWarp) {
    const int c = first + 4 * lane;
    float n[4] = {};
    if (c < k) {
      const float4 v = normed(read(c), scale, *reinterpret_cast<const float4*>(gain + c));
      n[0] = v.x, n[1] = v.y, n[2] = v.z, n[3] = v.w;
    }
    __syncwarp();
    if (c < columns) put(c, n);
  }
}

// ---- the product

template <class T>
__device__ __forceinline__ float silu_times(float gate, float up) {
  if constexpr (sizeof(T) == sizeof(float)) return up * (gate / (1 + expf(-gate)));
  return up * (gate * __fdividef(1, 1 + __expf(-gate)));
}

// One number of the result, where it is stored as it is.
template <class T>
__device__ __forceinline__ void put_result(const Product<T>& p, int row, int feature, float sum) {
  const bool behind = feature >= p.split;
  void* const y = behind ? p.rest : p.y;
  const int64_t at = behind ? row * p.rest_stride + feature - p.split : row * p.y_stride + feature;
  if (p.floats)
    static_cast<float*>(y)[at] = sum;
  else
    static_cast<T*>(y)[at] = from_float<T>(sum);
}

template <class T, int kFeatureWarps, int kPartWarps, int kDepth>
struct BlockShape {
  static constexpr int kThreads = kWarp * kFeatureWarps * kPartWarps;
  static constexpr int kColumns = kFeatures * kFeatureWarps;  // of a block's tile, before SwiGLU
  static constexpr int kRing = kDepth * 2 * kThreads * kVectorBytes;

  // A row of x; where it is normed, it comes as floats.
  static __host__ __device__ int row_bytes(const Product<T>& p) {
    const int bytes = kPartWarps * p.part_chunks * kChunkBytes;
    return (p.gain != nullptr ? bytes * int(sizeof(float) / sizeof(T)) : bytes) + kHalf;
  }
  static __host__ __device__ int sums_bytes(int rows) {
    return kPartWarps * rows * kColumns * int(sizeof(float));
  }
  static int bytes(const Product<T>& p) {
    return kRing + row_bytes(p) * p.rows + sums_bytes(p.rows) +
           (p.gain != nullptr ? p.k * int(sizeof(float)) : 0);
  }
};

template <class T, int kFeatureWarps, int kPartWarps, int kRows, int kDepth>
__global__ void __launch_bounds__(kWarp* kFeatureWarps* kPartWarps) product_kernel(const Product<T> p) {
  using Shape = BlockShape<T, kFeatureWarps, kPartWarps, kDepth>;
  constexpr int kThreads = Shape::kThreads, kColumns = Shape::kColumns;
  constexpr int kPerVector = kVectorBytes / int(sizeof(T));
  let_next_start();

  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const x_rows = shared + Shape::kRing;
  const int row_bytes = Shape::row_bytes(p);
  float* const sums = reinterpret_cast<float*>(x_rows + row_bytes * p.rows);
  float* const gain = sums + Shape::sums_bytes(p.rows) / int(sizeof(float));

  const int tid = int(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  const int feature_warp = warp % kFeatureWarps, part_warp = warp / kFeatureWarps;
  const int first_tile = int(blockIdx.x), tile_step = int(gridDim.x);

  // The weights that are asked for next: the lane's bytes of a chunk. Nothing is read where k is at its
  // limit.
  const int lane_k = part_warp * p.part_chunks * kChunk<T> + lane % 4 * kPerVector;
  int ask_tile = first_tile, ask_chunk = 0, ask_k = 0, limit = 0;
  const T* from = nullptr;
  const auto enter_tile = [&] {
    int feature, row;
    if (kFeatureWarps > 1 && p.end == DecodeEnd::swiglu) {
      constexpr int kPairs = kFeatureWarps > 1 ? kFeatureWarps / 2 : 1;
      feature = (ask_tile * kPairs + feature_warp % kPairs) * kFeatures + lane / 4;
      row = feature + (feature_warp >= kPairs ? p.outputs : 0);
    } else {
      feature = row = (ask_tile * kFeatureWarps + feature_warp) * kFeatures + lane / 4;
    }
    limit = feature < p.outputs ? p.k : 0;
    from = p.w + row * p.w_stride + lane_k;
    ask_chunk = 0, ask_k = lane_k;
  };
  const auto place = [&](int slot, int half) {
    return shared + ((slot * 2 + half) * kThreads + tid) * kVectorBytes;
  };
  const auto ask = [&](int slot) {
    if (ask_tile < p.tiles) {
      constexpr int kBehind = kChunk<T> / 2;
      copy_async_stream(place(slot, 0), from, ask_k < limit);
      copy_async_stream(place(slot, 1), from + kBehind, ask_k + kBehind < limit);
      from += kChunk<T>, ask_k += kChunk<T>;
      if (++ask_chunk == p.part_chunks) {
        ask_tile += tile_step;
        enter_tile();
      }
    }
    copy_async_group();
  };
  enter_tile();
  if (p.gain != nullptr)
    for (int i = tid; i < p.k / 4; i += kThreads) copy_async_16(gain + 4 * i, p.gain + 4 * i, true);
  copy_async_group();
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) ask(slot);

  wait_for_previous();

  const int across = p.end == DecodeEnd::swiglu ? kColumns / 2 : kColumns, results = p.rows * across;
  // What the first sum is added to; it comes while the sums are made.
  float old = 0;
  if (p.end == DecodeEnd::add && tid < results) {
    const int feature = first_tile * across + tid % across;
    if (feature < p.outputs)
      old = __ldcg(static_cast<const float*>(p.y) + tid / across * p.y_stride + feature);
  }

  const auto stage = [&](const auto* from, int vectors, int most) {
    constexpr int kEach = kVectorBytes / int(sizeof(*from));
#pragma unroll 4
    for (int i = tid; i < p.rows * vectors; i += kThreads) {
      const int r = i / vectors, v = i % vectors;
      const int64_t row = p.pick != nullptr ? __ldcg(p.pick + r) : r;
      const uint4 x =
          v * kEach < most ? read_vector(from + row * p.x_stride + v * kEach) : make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(x_rows + r * row_bytes + v * kVectorBytes) = x;
    }
    __syncthreads();
  };
  const int columns = kPartWarps * p.part_chunks * kChunk<T>;
  if (p.gain == nullptr) {
    stage(static_cast<const T*>(p.x), columns / kPerVector, p.k);
  } else {
    stage(static_cast<const float*>(p.x), p.k / 4, p.k);
    copy_async_wait_groups<kDepth>();  // the gain
    __syncthreads();
    for (int r = warp; r < p.rows; r += kThreads / kWarp) {
      unsigned char* const row = x_rows + r * row_bytes;
      norm_row([&](int c) { return *(reinterpret_cast<const float4*>(row) + c / 4); }, gain, p.eps, p.k,
               columns, [&](int c, const float(&n)[4]) { store(reinterpret_cast<T*>(row) + c, n); });
    }
    __syncthreads();
  }

  const SharedRows x{x_rows, p.rows, row_bytes};
  // The parts of a sum, in order.
  const auto total = [&](int row, int column) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kPartWarps; ++part) sum += sums[(part * p.rows + row) * kColumns + column];
    return sum;
  };

  int slot = 0;
  for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
    Sums<T, kRows> own;
    for (int chunk = 0; chunk < p.part_chunks; ++chunk) {
      copy_async_wait_groups<kDepth - 1>();
      const uint4 w[2] = {*reinterpret_cast<const uint4*>(place(slot, 0)),
                          *reinterpret_cast<const uint4*>(place(slot, 1))};
      own.add(w, x, (part_warp * p.part_chunks + chunk) * kChunkBytes, lane);
      ask(slot);
      slot = slot + 1 < kDepth ? slot + 1 : 0;
    }
    own.put(sums + part_warp * p.rows * kColumns + feature_warp * kFeatures, kColumns, p.rows, lane);
    __syncthreads();
    for (int i = tid; i < results; i += kThreads) {
      const int row = i / across, column = i % across, feature = tile * across + column;
      if (feature >= p.outputs) continue;
      const float sum = total(row, column);
      if (p.end == DecodeEnd::swiglu) {
        static_cast<T*>(p.y)[row * p.y_stride + feature] =
            from_float<T>(silu_times<T>(sum, total(row, column + across)));
      } else if (p.end == DecodeEnd::add) {
        float& to = static_cast<float*>(p.y)[row * p.y_stride + feature];
        to = (tile == first_tile && i == tid ? old : __ldcg(&to)) + sum;
      } else {
        put_result(p, row, feature, sum);
      }
    }
    if (tile + tile_step < p.tiles) __syncthreads();  // the sums are free again
  }
}

template <class T>
__global__ void __launch_bounds__(128)
    norm_kernel(const float* x, int64_t x_stride, const int32_t* pick, const float* gain, float eps, int rows,
                int k, T* y, int64_t y_stride) {
  let_next_start();
  wait_for_previous();
  const int r = int(blockIdx.x) * 4 + int(threadIdx.x) / kWarp;
  if (r >= rows) return;
  const int64_t row = pick != nullptr ? __ldcg(pick + r) : r;
  norm_row([&](int c) { return __ldcg(reinterpret_cast<const float4*>(x + row * x_stride + c)); }, gain, eps,
           k, k, [&](int c, const float(&n)[4]) { store(y + r * y_stride + c, n); });
}

}  // namespace sps::ops::decode_product
