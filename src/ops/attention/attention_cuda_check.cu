// Any shape, in plain f32 arithmetic. A block of eight warps owns 32 rows (queries, or keys in the gradients
// of keys), a warp four of them, and walks over tiles of 32 rows of the other side, one to a lane. Scores go
// through shared memory to be weights of the rows that are added up, there with a lane to a column: 128
// columns to a block, so that wide heads are several blocks with the same scores.
#include <climits>
#include <cmath>

#include "ops/attention/attention_cuda.cuh"
#include "ops/cuda.cuh"

namespace sps::ops::attention {

namespace {

constexpr int kTile = 32, kThreads = 256, kRows = kTile / (kThreads / 32);
constexpr int kDepth = 32, kColumns = 128;  // of dot products, of sums: columns at once

template <class T>
struct HeadRows {
  const T* data;
  int64_t stride;
  int length, head_dim;

  __device__ HeadRows(const Problem& p, const DeviceRows& rows, int sequence, int head)
      : data(static_cast<const T*>(rows.data) + int64_t(sequence) * p.length * rows.stride +
             int64_t(head) * p.head_dim),
        stride(rows.stride),
        length(p.length),
        head_dim(p.head_dim) {}
};

// Rows apart by a number of banks that keeps 16-byte reads of eight neighbouring rows in different ones.
struct Shared {
  alignas(16) float own[kTile][kDepth + 4], other[kTile][kDepth + 4];
  float weights[kTile][kTile];
  float rows[kTile][kColumns];
};

// to[r][c] = element (first + r, column + c), zero where there is none.
template <class T, int kWidth, int kStride>
__device__ inline void load_block(float (&to)[kTile][kStride], const HeadRows<T>& from, int first,
                                  int column) {
  for (int i = int(threadIdx.x); i < kTile * kWidth; i += kThreads) {
    const int r = i / kWidth, c = i % kWidth;
    const bool there = first + r < from.length && column + c < from.head_dim;
    to[r][c] = there ? to_float(from.data[(first + r) * from.stride + column + c]) : 0.0F;
  }
}

// Dot products of this warp's rows of `own` with this lane's row of `other`.
template <class T>
__device__ inline void dot_products(float (&dot)[kRows], Shared& shared, const HeadRows<T>& own,
                                    int own_first, const HeadRows<T>& other, int other_first) {
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * kRows;
#pragma unroll
  for (int r = 0; r < kRows; ++r) dot[r] = 0;
  for (int column = 0; column < own.head_dim; column += kDepth) {
    __syncthreads();
    load_block<T, kDepth>(shared.own, own, own_first, column);
    load_block<T, kDepth>(shared.other, other, other_first, column);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kDepth; c += 4) {
      const float4 y = *reinterpret_cast<const float4*>(&shared.other[lane][c]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(&shared.own[warp_row + r][c]);
        dot[r] += x.x * y.x;
        dot[r] += x.y * y.y;
        dot[r] += x.z * y.z;
        dot[r] += x.w * y.w;
      }
    }
  }
}

using Sums = float[kRows][kColumns / 32];

__device__ inline void clear(Sums& sums) {
#pragma unroll
  for (auto& row : sums)
#pragma unroll
    for (float& x : row) x = 0;
}

// sums[r] += weight of (this warp's row r, row of `from`) * that row, over the rows of the tile that r sees:
// a bit of sees[r] each. What is not seen is not multiplied either: it may be NaN.
template <class T>
__device__ inline void add_rows(Sums& sums, Shared& shared, const float (&weight)[kRows],
                                const unsigned (&sees)[kRows], const HeadRows<T>& from, int first,
                                int column) {
  const int lane = int(threadIdx.x) % 32, warp_row = int(threadIdx.x) / 32 * kRows;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) shared.weights[warp_row + r][lane] = weight[r];
  load_block<T, kColumns>(shared.rows, from, first, column);
  __syncthreads();
  for (int j = 0; j < kTile; ++j)
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if ((sees[r] >> j & 1) == 0) continue;
      const float w = shared.weights[warp_row + r][j];
#pragma unroll
      for (int c = 0; c < kColumns / 32; ++c) sums[r][c] += w * shared.rows[j][lane + 32 * c];
    }
}

// Writes factor * sums[r] at row first + r, rounded before anything is added.
template <class T>
__device__ inline void write_row(T* row, const float (&sums)[kColumns / 32], float factor, int column,
                                 int head_dim, bool accumulate) {
#pragma unroll
  for (int i = 0; i < kColumns / 32; ++i) {
    const int c = column + int(threadIdx.x) % 32 + 32 * i;
    if (c >= head_dim) continue;
    const float x = __fmul_rn(sums[i], factor);
    row[c] = from_float<T>(accumulate ? to_float(row[c]) + x : x);
  }
}
__device__ inline void write_gradient(const Problem& p, const DeviceRows& to, const Sums& sums, int sequence,
                                      int first, int head, float factor, int column, bool accumulate) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= p.length) continue;
    const int64_t at = (int64_t(sequence) * p.length + first + r) * to.stride + int64_t(head) * p.head_dim;
    if (to.dtype == DType::bf16)
      write_row(static_cast<bf16*>(to.data) + at, sums[r], factor, column, p.head_dim, false);
    else
      write_row(static_cast<float*>(to.data) + at, sums[r], factor, column, p.head_dim, accumulate);
  }
}

// What each of this warp's queries sees, with the lane's key; queries past the end see nothing.
struct WarpQueries {
  int first, starts[kRows];

  __device__ WarpQueries(const int32_t* document_start, int tile_first, int tile_last)
      : first(tile_first + int(threadIdx.x) / 32 * kRows) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) starts[r] = first + r <= tile_last ? document_start[first + r] : INT_MAX;
  }
  __device__ bool sees(DeviceBand band, int r, int key) const {
    return visible_keys(band, first + r, starts[r]).has(key);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ Problem p) {
  __shared__ Shared shared;
  const QueryTile<kTile> tile(p);
  const int column = tile.rest * kColumns, lane = int(threadIdx.x) % 32;
  const DeviceQueries& queries = p.queries[tile.stream];
  const int32_t* document_start = p.document_start + int64_t(tile.sequence) * p.length;
  const WarpQueries mine(document_start, tile.first, tile.last);
  const HeadRows<T> q(p, queries.q, tile.sequence, tile.head);
  const KeyWalk<kTile> walk(p, queries, QueryRange(document_start, tile.first, tile.last));
  float top[kRows], sum[kRows];
  Sums o;
  clear(o);
#pragma unroll
  for (int r = 0; r < kRows; ++r) top[r] = -INFINITY, sum[r] = 0;
  for (auto at = walk.begin(); !walk.at_end(at); at = walk.next(at)) {
    float p_of[kRows];
    unsigned sees[kRows];
    dot_products(p_of, shared, q, tile.first, HeadRows<T>(p, p.keys[at.set].k, tile.sequence, tile.key_head),
                 at.first);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool seen = mine.sees(queries.band[at.set], r, at.first + lane);
      sees[r] = __ballot_sync(~0U, seen);
      const float score = seen ? p_of[r] * p.scale : -INFINITY;
      const float new_top = fmaxf(top[r], warp_max(score)), base = new_top == -INFINITY ? 0.0F : new_top;
      const float shrink = expf(top[r] - base);
      p_of[r] = expf(score - base);
      sum[r] = sum[r] * shrink + warp_sum(p_of[r]);
      top[r] = new_top;
#pragma unroll
      for (float& x : o[r]) x *= shrink;
    }
    add_rows(o, shared, p_of, sees, HeadRows<T>(p, p.keys[at.set].v, tile.sequence, tile.key_head), at.first,
             column);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (mine.first + r > tile.last) continue;
    const int64_t row = int64_t(tile.sequence) * p.length + mine.first + r;
    write_row(static_cast<T*>(queries.o.data) + row * queries.o.stride + int64_t(tile.head) * p.head_dim,
              o[r], sum[r] == 0 ? 0.0F : 1 / sum[r], column, p.head_dim, false);
    if (lane == 0 && column == 0)
      static_cast<float*>(queries.lse.data)[row * queries.lse.stride + tile.head] =
          sum[r] == 0 ? -INFINITY : top[r] + logf(sum[r]);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) query_kernel(const __grid_constant__ Problem p) {
  __shared__ Shared shared;
  const QueryTile<kTile> tile(p);
  const int column = tile.rest * kColumns, lane = int(threadIdx.x) % 32;
  const DeviceQueries& queries = p.queries[tile.stream];
  const int32_t* document_start = p.document_start + int64_t(tile.sequence) * p.length;
  const WarpQueries mine(document_start, tile.first, tile.last);
  const HeadRows<T> q(p, queries.q, tile.sequence, tile.head), d_o(p, queries.d_o, tile.sequence, tile.head);
  const KeyWalk<kTile> walk(p, queries, QueryRange(document_start, tile.first, tile.last));
  const int64_t statistics = p.statistics_of(tile.stream, tile.sequence, tile.head) + mine.first;
  Sums dq;
  clear(dq);
  for (auto at = walk.begin(); !walk.at_end(at); at = walk.next(at)) {
    const HeadRows<T> k(p, p.keys[at.set].k, tile.sequence, tile.key_head);
    float s[kRows], ds[kRows];
    unsigned sees[kRows];
    dot_products(s, shared, q, tile.first, k, at.first);
    dot_products(ds, shared, d_o, tile.first, HeadRows<T>(p, p.keys[at.set].v, tile.sequence, tile.key_head),
                 at.first);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sees[r] = __ballot_sync(~0U, mine.sees(queries.band[at.set], r, at.first + lane));
      ds[r] = exp2f(s[r] * p.scale_log2 - p.statistics.lse2[statistics + r]) *
              (ds[r] - p.statistics.delta[statistics + r]);
    }
    add_rows(dq, shared, ds, sees, k, at.first, column);
  }
  write_gradient(p, queries.dq, dq, tile.sequence, mine.first, tile.head, p.scale, column, false);
}

template <class T>
__global__ void __launch_bounds__(kThreads) key_kernel(const __grid_constant__ Problem p) {
  __shared__ Shared shared;
  const KeyTile<kTile> tile(p);
  const int column = tile.rest * kColumns, lane = int(threadIdx.x) % 32;
  const int first = tile.first + int(threadIdx.x) / 32 * kRows;
  const DeviceKeys& keys = p.keys[tile.set];
  const int32_t* document_start = p.document_start + int64_t(tile.sequence) * p.length;
  const HeadRows<T> k(p, keys.k, tile.sequence, tile.key_head), v(p, keys.v, tile.sequence, tile.key_head);
  const QueryWalk<kTile> walk(p, tile.set, tile.first, tile.last,
                              document_end(document_start, tile.last, p.length));
  Sums dk, dv;
  clear(dk);
  clear(dv);
  for (auto at = walk.begin(); !walk.at_end(at); at = walk.next(at)) {
    const int head = tile.key_head * p.group + at.in_group, query = at.first + lane;
    const DeviceQueries& queries = p.queries[at.stream];
    const HeadRows<T> q(p, queries.q, tile.sequence, head), d_o(p, queries.d_o, tile.sequence, head);
    const int64_t statistics = p.statistics_of(at.stream, tile.sequence, head) + query;
    const float lse2 = p.statistics.lse2[statistics], delta = p.statistics.delta[statistics];
    const Interval seen =
        visible_keys(queries.band[tile.set], query, query < p.length ? document_start[query] : INT_MAX);
    float s[kRows], ds[kRows];
    unsigned sees[kRows];
    dot_products(s, shared, k, tile.first, q, at.first);
    dot_products(ds, shared, v, tile.first, d_o, at.first);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sees[r] = __ballot_sync(~0U, seen.has(first + r));
      s[r] = exp2f(s[r] * p.scale_log2 - lse2);
      ds[r] = s[r] * (ds[r] - delta);
    }
    add_rows(dv, shared, s, sees, d_o, at.first, column);
    add_rows(dk, shared, ds, sees, q, at.first, column);
  }
  write_gradient(p, keys.dk, dk, tile.sequence, first, tile.key_head, p.scale, column, keys.accumulate);
  write_gradient(p, keys.dv, dv, tile.sequence, first, tile.key_head, 1, column, keys.accumulate);
}

unsigned blocks(const Problem& p, int64_t tiles) {
  return unsigned(tiles * ceil_div(p.head_dim, kColumns));
}

}  // namespace

void forward_check(const Exec& ex, const Problem& p) {
  with_device_type(p.dtype, [&](auto t) {
    forward_kernel<decltype(t)><<<blocks(p, QueryTile<kTile>::blocks(p)), kThreads, 0, stream_of(ex)>>>(p);
  });
  SPS_LAUNCHED();
}

void backward_check(const Exec& ex, const Problem& p) {
  const unsigned of_queries = blocks(p, QueryTile<kTile>::blocks(p)),
                 of_keys = blocks(p, KeyTile<kTile>::blocks(p));
  with_device_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    if (of_queries > 0) query_kernel<T><<<of_queries, kThreads, 0, stream_of(ex)>>>(p);
    if (of_keys > 0) key_kernel<T><<<of_keys, kThreads, 0, stream_of(ex)>>>(p);
  });
  SPS_LAUNCHED();
}

}  // namespace sps::ops::attention
