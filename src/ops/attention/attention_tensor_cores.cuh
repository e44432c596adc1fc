// Tiles of bf16 rows in shared memory and their products on tensor cores, for the kernels of
// attention_cuda_forward.cu and attention_cuda_backward.cu.
//
// A tile is rows of D numbers, D = 64, 96 or 128; narrower heads are padded with zeros. 16-byte chunks of a
// row are permuted by the row's number so that eight neighbouring rows have the same chunk in different
// banks.
#pragma once

#include <climits>

#include "ops/attention/attention_cuda.cuh"
#include "ops/ptx.cuh"

namespace sps::ops::attention {

constexpr int kThreads = 128, kWarps = kThreads / 32;

template <int D>
__device__ constexpr int swizzle(int row) {
  constexpr int kChunks = D / 8;
  static_assert(kChunks % 4 == 0);
  return kChunks % 8 == 0 ? row & 7 : (row >> 1) & 3;
}
template <int D>
__device__ constexpr int chunk_offset(int row, int chunk) {  // in bytes
  return row * D * 2 + ((chunk ^ swizzle<D>(row)) << 4);
}
template <int D>
constexpr int tile_bytes(int rows) {
  return rows * D * 2;
}

// One head of the rows of a sequence in global memory.
struct HeadRows {
  const uint16_t* data;  // row 0
  int stride, head_dim;

  __device__ HeadRows(const Problem& p, const DeviceRows& rows, int sequence, int head)
      : data(static_cast<const uint16_t*>(rows.data) + int64_t(sequence) * p.length * rows.stride +
             head * p.head_dim),
        stride(int(rows.stride)),
        head_dim(p.head_dim) {}
  __device__ const uint16_t* row(int r) const { return data + int64_t(r) * stride; }
};

// The chunks of a tile that this thread loads and cleans: in column `column` + 8 kWide per step across, in
// row `row` + kRowsOfPass per step down. Steps do not change the permutation, so that they are constant
// offsets.
template <int D>
struct Chunks {
  static constexpr int kWide = D % 64 == 0 ? D / 8 : 4, kAcross = D / 8 / kWide,
                       kRowsOfPass = kThreads / kWide;
  static_assert(kRowsOfPass % 8 == 0);

  int row, column, offset;

  __device__ Chunks()
      : row(int(threadIdx.x) / kWide),
        column(int(threadIdx.x) % kWide * 8),
        offset(chunk_offset<D>(row, int(threadIdx.x) % kWide)) {}
  // body(row, column, offset in bytes of the chunk in the tile)
  template <int kRows, class Body>
  __device__ void for_each(Body&& body) const {
    static_assert(kRows % kRowsOfPass == 0);
#pragma unroll
    for (int down = 0; down < kRows; down += kRowsOfPass)
#pragma unroll
      for (int across = 0; across < kAcross; ++across)
        body(row + down, column + across * kWide * 8, offset + down * D * 2 + across * kWide * 16);
  }
};

// Issues the copy of rows [first, first + kRows) into the tile; zeros for rows from `length` on.
template <int D, int kRows>
__device__ inline void load_tile(char* tile, const HeadRows& from, int first, int length) {
  const uint16_t* const base = from.row(first);
  Chunks<D>().template for_each<kRows>([&](int row, int column, int offset) {
    const bool valid = first + row < length && column < from.head_dim;
    copy_async_16(tile + offset, base + row * from.stride + column, valid);
  });
}

// Of two bf16 numbers: ones in the sign places of those that are infinite or NaN.
__device__ inline uint32_t nonfinite(uint32_t x) {
  return ((x & 0x7F807F80U) + 0x00800080U) & 0x80008000U;
}
// Zeros in the place of those.
__device__ inline uint32_t finite(uint32_t two) {
  return two & ~((nonfinite(two) >> 15) * 0xFFFFU);
}

// Where a tile's rows are not all seen by all rows of the other side, what is masked has the weight 0, and
// 0 * NaN would spread. There the numbers that are not finite are taken out before the product and reach
// those who see them through add_nonfinite(). Both functions look at the chunks that this thread loaded.
template <int D, int kRows>
__device__ inline bool has_nonfinite(const char* tile) {
  uint32_t found = 0;
  Chunks<D>().template for_each<kRows>([&](int, int, int offset) {
    const uint4 x = *reinterpret_cast<const uint4*>(tile + offset);
    found |= nonfinite(x.x) | nonfinite(x.y) | nonfinite(x.z) | nonfinite(x.w);
  });
  return found != 0;
}
template <int D, int kRows>
__device__ inline void clean_tile(char* tile) {
  Chunks<D>().template for_each<kRows>([&](int, int, int offset) {
    uint4& x = *reinterpret_cast<uint4*>(tile + offset);
    x = make_uint4(finite(x.x), finite(x.y), finite(x.z), finite(x.w));
  });
}

// A barrier of the block; where the tile is masked, whether any thread found something to clean.
__device__ inline bool barrier_or(bool masked, bool found) {
  if (masked) return __syncthreads_or(int(found)) != 0;
  __syncthreads();
  return false;
}

// acc[m][n] covers rows 16 m + lane / 4 (+ 8) and columns 8 n + 2 (lane % 4) (+ 1); sees(m, half, row of
// `from`). `weight` is 1 where a visible row's weight is positive, 0 where it may be anything: then the sum
// becomes NaN.
template <int D, int kTiles, class Sees>
__device__ inline void add_nonfinite(float (&acc)[kTiles][D / 8][4], const HeadRows& from, int first,
                                     int last, float weight, Sees&& sees) {
  const int column = 2 * (int(threadIdx.x) & 3);
#pragma unroll 1
  for (int r = first; r < last; ++r) {
    const uint16_t* row = from.row(r) + column;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      if (n * 8 >= from.head_dim) continue;
      const uint32_t x = uint32_t(row[n * 8]) | uint32_t(row[n * 8 + 1]) << 16, where = nonfinite(x);
      if (where == 0) continue;
      const float low = (where & 0x8000U) != 0 ? weight * __uint_as_float(x << 16) : 0.0F;
      const float high = (where & 0x80000000U) != 0 ? weight * __uint_as_float(x & 0xFFFF0000U) : 0.0F;
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (sees(m, half, r)) acc[m][n][2 * half] += low, acc[m][n][2 * half + 1] += high;
    }
  }
}

// Where this lane's row of four 8x8 matrices lies in a tile, for load_matrices. `a`: rows 0..15 of two
// chunks, the order of operand a, and of operand b if transposed. `b`: the order of operand b, two blocks of
// 8 columns.
template <int D>
class MatrixAddress {
 public:
  __device__ static MatrixAddress a(const void* tile, int lane = int(threadIdx.x) & 31) {
    return MatrixAddress(tile, lane & 15, lane >> 4);
  }
  __device__ static MatrixAddress b(const void* tile, int lane = int(threadIdx.x) & 31) {
    return MatrixAddress(tile, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
  }
  // Rows from `row` (a multiple of 16), chunks 2 pair and 2 pair + 1.
  __device__ uint32_t at(int row, int pair) const {
    return row_ + uint32_t(row * D * 2) + (chunk_ ^ uint32_t(pair << 5));
  }

 private:
  __device__ MatrixAddress(const void* tile, int row, int chunk)
      : row_(shared_address(tile) + uint32_t(row * D * 2)), chunk_(uint32_t(chunk ^ swizzle<D>(row)) << 4) {
    // Keeps the compiler from holding the address of every chunk in a register throughout the walk.
    asm volatile("" : "+r"(chunk_));
  }
  uint32_t row_, chunk_;
};

template <int kTiles, int kBlocks>
__device__ inline void clear(float (&acc)[kTiles][kBlocks][4]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0;
}

// acc = x y^T for this warp's 16 kTiles rows of x, which begin at row `first`, and kRows rows of y.
template <int D, int kTiles, int kRows>
__device__ inline void multiply_rows(float (&acc)[kTiles][kRows / 8][4], const char* x, int first,
                                     const char* y) {
  const auto at_x = MatrixAddress<D>::a(x), at_y = MatrixAddress<D>::b(y);
  clear(acc);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) load_matrices(a[m], at_x.at(first + 16 * m, k));
#pragma unroll
    for (int n = 0; n < kRows / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, at_y.at(16 * n, k));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply_add(acc[m][2 * n], a[m], b[0], b[1]);
        multiply_add(acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// acc += w y for this warp's weights w [16 kTiles, kRows], rounded to bf16, and kRows rows of y.
template <int D, int kTiles, int kRows>
__device__ inline void multiply_weights(float (&acc)[kTiles][D / 8][4],
                                        const float (&w)[kTiles][kRows / 8][4], const char* y) {
  const auto at_y = MatrixAddress<D>::a(y);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      a[m][0] = pack_bf16(w[m][2 * k][0], w[m][2 * k][1]);
      a[m][1] = pack_bf16(w[m][2 * k][2], w[m][2 * k][3]);
      a[m][2] = pack_bf16(w[m][2 * k + 1][0], w[m][2 * k + 1][1]);
      a[m][3] = pack_bf16(w[m][2 * k + 1][2], w[m][2 * k + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, at_y.at(16 * k, n));
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        multiply_add(acc[m][2 * n], a[m], b[0], b[1]);
        multiply_add(acc[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The 16 kTiles queries of this warp, rows from `row` of the block's tile on; a thread of the block for each
// query of the tile. The starts of their documents wait in shared memory: only masks ask for them.
template <int kTiles>
struct WarpQueries {
  static constexpr int kQueries = 16 * kTiles * kWarps;
  static_assert(kQueries == kThreads);

  int row;
  bool any;  // some are within the sequence
  QueryRange range;
  int first;  // this lane's first query
  const int* starts;

  __device__ WarpQueries(const int32_t* document_start, int tile_first, int tile_last, int* shared_starts)
      : row(int(threadIdx.x) / 32 * 16 * kTiles),
        any(tile_first + row <= tile_last),
        range(document_start, min(tile_first + row, tile_last),
              min(tile_first + row + 16 * kTiles - 1, tile_last)),
        first(tile_first + row + (int(threadIdx.x) & 31) / 4),
        starts(shared_starts + row + (int(threadIdx.x) & 31) / 4) {
    const int query = tile_first + int(threadIdx.x);
    shared_starts[threadIdx.x] = query <= tile_last ? document_start[query] : INT_MAX;
    __syncwarp();
  }
  __device__ int query(int m, int half) const { return first + 16 * m + 8 * half; }
  __device__ Interval keys(DeviceBand band, int m, int half) const {
    return visible_keys(band, query(m, half), starts[16 * m + 8 * half]);
  }
  // body(m, n, e, visible) for this lane's elements of a tile of kKeys keys.
  template <int kKeys, class Body>
  __device__ void for_pairs(DeviceBand band, int first_key, Body&& body) const {
    const int key = first_key + 2 * (int(threadIdx.x) & 3);
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Interval seen = keys(band, m, half);
        const int begin = seen.begin - key;
        const auto count = unsigned(max(seen.end - seen.begin, 0));
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) body(m, n, 2 * half + e, unsigned(8 * n + e - begin) < count);
      }
  }
  __device__ auto sees(DeviceBand band) const {
    return [this, band](int m, int half, int key) { return keys(band, m, half).has(key); };
  }
};

}  // namespace sps::ops::attention
