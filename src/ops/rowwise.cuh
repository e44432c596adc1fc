// What the CUDA kernels that walk rows share: a matrix as a kernel sees it, groups of threads that keep a row
// in their registers, and sums over rows whose order depends on the shape alone.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "ops/cuda.cuh"

namespace sps::ops {

// A matrix inside a kernel; one row serves every row number. Absent (data is null) where the tensor is empty.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;
  __device__ T* operator[](int64_t row) const { return data + row * stride; }
};

template <class T>
Rows<T> rows_of(const Tensor& t) {
  if (t.empty()) return {};
  return {t.as<std::remove_const_t<T>>(), t.rows == 1 ? 0 : t.stride};
}

// Columns of a thread's piece of a row: 16 bytes of bf16, 32 of f32.
constexpr int kPiece = 8;

// Whether every row of every tensor can be read in such pieces.
inline bool in_pieces(std::initializer_list<Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) {
    return t.empty() || (t.cols % kPiece == 0 && rows_aligned(16, t));
  });
}

// kThreads threads keep a row of up to kThreads * kPieces * kWidth columns in registers, kPieces pieces of
// kWidth columns each. A block holds kGroups rows.
template <int kThreads_, int kPieces_, int kWidth_>
struct RowGroup {
  static constexpr int kThreads = kThreads_, kPieces = kPieces_, kWidth = kWidth_;
  static constexpr int kBlock = kThreads < 256 ? 256 : kThreads, kGroups = kBlock / kThreads;
  static constexpr int kMostColumns = kThreads * kPieces * kWidth;

  static __device__ int index() { return int(threadIdx.x) / kThreads; }
  static __device__ int lane() { return int(threadIdx.x) % kThreads; }
  static __device__ int column(int piece) { return (piece * kThreads + lane()) * kWidth; }

  // The sum over the group's threads, the same bits in all of them. Every thread of the block must call it.
  __device__ float sum(float v) {
    v = warp_sum(v);
    if constexpr (kThreads > 32) {
      // Two buffers in turn: who writes one again has passed a barrier that all readers reached after
      // reading.
      __shared__ float parts[2][kBlock / 32];
      turn_ ^= 1;
      if (threadIdx.x % 32 == 0) parts[turn_][threadIdx.x / 32] = v;
      __syncthreads();
      v = 0;
      for (int i = 0; i < kThreads / 32; ++i) v += parts[turn_][index() * (kThreads / 32) + i];
    }
    return v;
  }

  // Adds the groups' registers up, in order, and writes the block's sums to to[0 .. d).
  __device__ void add_groups(const float (&v)[kPieces][kWidth], float* to, int d) const {
    if constexpr (kGroups == 1) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        if (column(i) < d) store(to + column(i), v[i]);
    } else {
      constexpr int kColumns = kThreads * kWidth;
      __shared__ alignas(16) float sums[kGroups][kColumns];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        __syncthreads();
        store(&sums[index()][lane() * kWidth], v[i]);
        __syncthreads();
        for (int c = int(threadIdx.x); c < kColumns && i * kColumns + c < d; c += kBlock) {
          float total = 0;
          for (int g = 0; g < kGroups; ++g) total += sums[g][c];
          to[i * kColumns + c] = total;
        }
      }
    }
  }

 private:
  int turn_ = 0;
};

// Calls f with the group for rows of d columns, in pieces of kPiece columns or else one by one. kMost is the
// number of pieces that a thread has registers for.
template <int kMost, class F>
void with_row_group(int64_t d, bool pieces, F&& f) {
  const auto fits = [&]<class Group>(Group group) {
    if (d > Group::kMostColumns) return false;
    f(group);
    return true;
  };
  const bool done =
      pieces ? fits(RowGroup<32, kMost / 2, kPiece>{}) || fits(RowGroup<32, kMost, kPiece>{}) ||
                   fits(RowGroup<64, kMost, kPiece>{}) || fits(RowGroup<128, kMost, kPiece>{}) ||
                   fits(RowGroup<512, kMost, kPiece>{})
             : fits(RowGroup<32, 4, 1>{}) || fits(RowGroup<256, 4, 1>{}) || fits(RowGroup<1024, 8, 1>{});
  SPS_CHECK(done);  // 8192 columns one by one, 2048 * kMost in pieces
}

// Blocks of a kernel that adds up over rows, `per_block` rows at a time: each leaves a partial sum, so their
// number depends on the shape alone. `waves` blocks for each of an H200's multiprocessors.
inline int64_t summing_blocks(int64_t rows, int64_t per_block, int64_t waves) {
  return std::clamp<int64_t>((rows + per_block - 1) / per_block, 1, 132 * waves);
}

// y[c] += sum over i of partials[i * cols + c]: eight sums of every eighth i, added in order.
template <class T>
__global__ void __launch_bounds__(256)
    add_partials_kernel(const float* partials, int64_t count, int64_t cols, T* y, bool add) {
  __shared__ float sums[8][32];
  const int column = int(threadIdx.x % 32), part = int(threadIdx.x / 32);
  const int64_t c = int64_t(blockIdx.x) * 32 + column;
  float sum = 0;
  if (c < cols) {
#pragma unroll 8
    for (int64_t i = part; i < count; i += 8) sum += partials[i * cols + c];
  }
  sums[part][column] = sum;
  __syncthreads();
  if (part != 0 || c >= cols) return;
  for (int i = 1; i < 8; ++i) sum += sums[i][column];
  y[c] = from_float<T>(add ? to_float(y[c]) + sum : sum);
}

// y is one row, in any act dtype; what stands there is added to, or overwritten.
template <class T>
void add_partials(const Exec& ex, const float* partials, int64_t count, int64_t cols, T* y, bool add = true) {
  if (cols == 0) return;
  add_partials_kernel<<<unsigned((cols + 31) / 32), 256, 0, stream_of(ex)>>>(partials, count, cols, y, add);
  SPS_LAUNCHED();
}

// Element by element: a thread reads its pieces of two rows, then works on them and writes. Op has
//   template <int kWidth> struct Loaded;      what a piece of kWidth columns needs
//   read(row, column, live, Loaded&), write(row, column, Loaded&)
// and may write where it reads.
template <int kWidth, class Op>
__global__ void __launch_bounds__(256) elementwise_kernel(const Op op, int64_t rows, int64_t cols) {
  constexpr int kRows = 2;
  const int64_t c = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * kWidth;
  const int64_t first = int64_t(blockIdx.x) * blockDim.y * kRows + threadIdx.y;
  typename Op::template Loaded<kWidth> loaded[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t r = first + i * blockDim.y;
    op.read(r, c, r < rows && c < cols, loaded[i]);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t r = first + i * blockDim.y;
    if (r < rows && c < cols) op.write(r, c, loaded[i]);
  }
}

template <class Op>
void elementwise(const Exec& ex, const Op& op, int64_t rows, int64_t cols, bool pieces) {
  if (rows == 0 || cols == 0) return;
  const int64_t across = pieces ? cols / kPiece : cols;
  unsigned x = 1;
  while (x < 256 && x < across) x *= 2;
  const auto idle = [&] { return (across + x - 1) / x * x - across; };
  while (x > 32 && idle() * 8 > across) x /= 2;
  const dim3 block(x, 256 / x);
  const dim3 grid(unsigned((rows + 2 * block.y - 1) / (2 * block.y)), unsigned((across + x - 1) / x));
  if (pieces)
    elementwise_kernel<kPiece><<<grid, block, 0, stream_of(ex)>>>(op, rows, cols);
  else
    elementwise_kernel<1><<<grid, block, 0, stream_of(ex)>>>(op, rows, cols);
  SPS_LAUNCHED();
}

}  // namespace sps::ops
