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
  const float* scales = nullptr;  // of rows that have been multiplied by the gain already
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

// ---- RMSNorm
//
// A row is multiplied by the gain and rounded. Its scale, the root of its mean square's inverse, is a factor
// of its sums: nobody waits for it before the product. The squares are added up in the parts of the product.

__device__ __forceinline__ float squares_of(float4 v) {
  return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
}
__device__ __forceinline__ float4 times(float4 v, float4 gain) {
  return {v.x * gain.x, v.y * gain.y, v.z * gain.z, v.w * gain.w};
}
// Of numbers [begin, end), multiples of 4, by a warp: a lane adds up every 32nd four, in order. squares(c)
// are those of c .. c + 3.
template <class Squares>
__device__ __forceinline__ float part_squares(Squares&& squares, int begin, int end) {
  float sum = 0;
#pragma unroll 4
  for (int c = begin + 4 * (int(threadIdx.x) % kWarp); c < end; c += 4 * kWarp) sum += squares(c);
  return warp_sum(sum);
}
// Of all squares, which are those of the parts, in order.
__device__ __forceinline__ float scale_of(float squares, float eps, int k) {
  return 1 / sqrtf(squares / float(k) + eps);
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

  static __host__ __device__ int row_bytes(const Product<T>& p) {
    return kPartWarps * p.part_chunks * kChunkBytes + kHalf;
  }
  static __host__ __device__ int sums_bytes(int rows) {
    return kPartWarps * rows * kColumns * int(sizeof(float));
  }
  // Of a norm: the gain, the squares of each four numbers of a row, those of its parts.
  static __host__ __device__ int norm_floats(const Product<T>& p) {
    return p.gain != nullptr ? p.k + p.rows * (p.k / 4 + kPartWarps) : 0;
  }
  static int bytes(const Product<T>& p) {
    return kRing + row_bytes(p) * p.rows + sums_bytes(p.rows) + norm_floats(p) * int(sizeof(float));
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
  float *const squares = gain + p.k, *const of_parts = squares + p.rows * (p.k / 4);

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

  const int columns = kPartWarps * p.part_chunks * kChunk<T>;
  const auto row_of_x = [&](int r) {
    return int64_t{p.pick != nullptr ? __ldcg(p.pick + r) : r} * p.x_stride;
  };
  if (p.gain == nullptr) {
    const int vectors = columns / kPerVector;
#pragma unroll 4
    for (int i = tid; i < p.rows * vectors; i += kThreads) {
      const int r = i / vectors, v = i % vectors;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (v * kPerVector < p.k) x = read_vector(static_cast<const T*>(p.x) + row_of_x(r) + v * kPerVector);
      *reinterpret_cast<uint4*>(x_rows + r * row_bytes + v * kVectorBytes) = x;
    }
  } else {
    copy_async_wait_groups<kDepth>();  // the gain: a thread multiplies by what it has copied itself
    constexpr int kAtOnce = 4;         // fours that a thread asks for together, row by row
    int r = 4 * tid < columns ? 0 : p.rows, c = 4 * tid;
#pragma unroll 1
    while (r < p.rows) {
      const int first_row = r, first_column = c;
      const auto pass = [&] {
        c += 4 * kThreads;
        if (c >= columns) c = 4 * tid, ++r;
      };
      float4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, pass()) {
        v[i] = make_float4(0, 0, 0, 0);
        if (r < p.rows && c < p.k)
          v[i] = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + row_of_x(r) + c));
      }
      r = first_row, c = first_column;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, pass()) {
        if (r >= p.rows) break;
        float4 n{0, 0, 0, 0};
        if (c < p.k) {
          squares[r * (p.k / 4) + c / 4] = squares_of(v[i]);
          n = times(v[i], *reinterpret_cast<const float4*>(gain + c));
        }
        const float numbers[4] = {n.x, n.y, n.z, n.w};
        store(reinterpret_cast<T*>(x_rows + r * row_bytes) + c, numbers);
      }
    }
  }
  __syncthreads();
  if (p.gain != nullptr && feature_warp == 0) {
    const int begin = part_warp * p.part_chunks * kChunk<T>,
              end = min(begin + p.part_chunks * kChunk<T>, p.k);
#pragma unroll 1
    for (int r = 0; r < p.rows; ++r) {
      const float sum = part_squares([&](int c) { return squares[r * (p.k / 4) + c / 4]; }, begin, end);
      if (lane == 0) of_parts[r * kPartWarps + part_warp] = sum;
    }
  }

  const SharedRows x{x_rows, p.rows, row_bytes};
  // The parts of a sum, in order.
  const auto total = [&](int row, int column) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kPartWarps; ++part) sum += sums[(part * p.rows + row) * kColumns + column];
    return sum;
  };
  const auto scale = [&](int row) {
    if (p.scales != nullptr) return __ldcg(p.scales + row);
    if (p.gain == nullptr) return 1.0F;
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kPartWarps; ++part) sum += of_parts[row * kPartWarps + part];
    return scale_of(sum, p.eps, p.k);
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
      const float by = scale(row), sum = by * total(row, column);
      if (p.end == DecodeEnd::swiglu) {
        static_cast<T*>(p.y)[row * p.y_stride + feature] =
            from_float<T>(silu_times<T>(sum, by * total(row, column + across)));
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

// Rows of p multiplied by the gain, and their scales.
template <class T>
__global__ void __launch_bounds__(128)
    norm_kernel(const Product<T> p, int parts, T* y, int64_t y_stride, float* scales) {
  let_next_start();
  wait_for_previous();
  const int r = int(blockIdx.x) * 4 + int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  if (r >= p.rows) return;
  const int64_t row = p.pick != nullptr ? __ldcg(p.pick + r) : r;
  const auto read = [from = static_cast<const float*>(p.x) + row * p.x_stride](int c) {
    return __ldcg(reinterpret_cast<const float4*>(from + c));
  };
  float squares = 0;
  for (int part = 0; part < parts; ++part) {
    const int begin = part * p.part_chunks * kChunk<T>, end = min(begin + p.part_chunks * kChunk<T>, p.k);
    squares += part_squares([&](int c) { return squares_of(read(c)); }, begin, end);
  }
  if (lane == 0) scales[r] = scale_of(squares, p.eps, p.k);
  for (int c = 4 * lane; c < p.k; c += 4 * kWarp) {
    const float4 n = times(read(c), __ldg(reinterpret_cast<const float4*>(p.gain + c)));
    const float numbers[4] = {n.x, n.y, n.z, n.w};
    store(y + r * y_stride + c, numbers);
  }
}

}  // namespace sps::ops::decode_product
