// Forward on tensor cores. A block of four warps owns 128 queries of one head of one stream, 32 to a warp,
// and walks over the tiles of 64 keys that any of them sees, set after set, with one online softmax. Scores,
// probabilities and output stay in registers.
//
// Streams and query heads that read the same keys are neighbouring blocks and run at the same time, so that
// keys and values come out of the L2 cache for all but the first; within a key head the tiles with most work
// go first.
#include <cmath>

#include "ops/attention/attention_tensor_cores.cuh"
#include "tensor/cuda.h"

namespace sps::ops::attention {

namespace {

constexpr int kQueries = 128, kKeys = 64;
constexpr int kTiles = kQueries / kWarps / 16;  // of 16 queries, in a warp

// State of a row: the largest score so far, and the sum of this lane's probabilities relative to it.
struct Softmax {
  float top = -INFINITY, sum = 0;
};

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}

// Turns scores into probabilities relative to the new maximum, and rescales o to it.
template <int D>
__device__ inline void online_softmax(float (&s)[kTiles][kKeys / 8][4], Softmax (&rows)[kTiles][2],
                                      float (&o)[kTiles][D / 8][4], float scale_log2) {
  float shrink[kTiles][2];
  bool changed = false;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Softmax& row = rows[m][half];
      float top = row.top;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      top = quad_max(top);
      const float finite = top == -INFINITY ? 0.0F : top, base = finite * scale_log2;
      shrink[m][half] = fast_exp2((row.top - finite) * scale_log2);  // exactly 1 where top stays
      changed |= top != row.top;
      row.top = top;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[m][n][e] = fast_exp2(s[m][n][e] * scale_log2 - base);
          sum += s[m][n][e];
        }
      row.sum = row.sum * shrink[m][half] + sum;
    }
  if (!__any_sync(~0U, changed)) return;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[m][n][e] *= shrink[m][e / 2];
}

// Writes this warp's rows of o, which stand in its part of the tile of queries, 16 bytes at a time.
template <int D>
__device__ inline void write_rows(const Problem& p, const DeviceRows& o, char* tile, int sequence, int head,
                                  int first_query) {
  const int warp_row = int(threadIdx.x) / 32 * 16 * kTiles;
#pragma unroll 1
  for (int i = int(threadIdx.x) & 31; i < 16 * kTiles * (D / 8); i += 32) {
    const int row = warp_row + i / (D / 8), column = i % (D / 8), query = first_query + row;
    if (query >= p.length || column * 8 >= p.head_dim) continue;
    auto* to = static_cast<uint16_t*>(o.data) + (int64_t(sequence) * p.length + query) * o.stride +
               head * p.head_dim + column * 8;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile + chunk_offset<D>(row, column));
  }
}

template <int D>
constexpr int kForwardShared = tile_bytes<D>(kQueries + 2 * kKeys) + int(sizeof(int)) * kQueries;

template <int D>
__global__ void __launch_bounds__(kThreads, D <= 64 ? 3 : 2)
    forward_kernel(const __grid_constant__ Problem p) {
  extern __shared__ __align__(128) char shared[];
  char* const q_tile = shared;
  char* const k_tile = q_tile + tile_bytes<D>(kQueries);
  char* const v_tile = k_tile + tile_bytes<D>(kKeys);

  const QueryTile<kQueries> tile(p);
  const DeviceQueries& queries = p.queries[tile.stream];
  load_tile<D, kQueries>(q_tile, HeadRows(p, queries.q, tile.sequence, tile.head), tile.first, p.length);

  const int32_t* const document_start = p.document_start + int64_t(tile.sequence) * p.length;
  const KeyWalk<kKeys> walk(p, queries, QueryRange(document_start, tile.first, tile.last));
  const auto load_keys = [&](char* to, const DeviceRows& from, int first) {
    load_tile<D, kKeys>(to, HeadRows(p, from, tile.sequence, tile.key_head), first, p.length);
  };
  auto at = walk.begin();
  if (!walk.at_end(at)) load_keys(k_tile, p.keys[at.set].k, at.first);

  const WarpQueries<kTiles> mine(document_start, tile.first, tile.last,
                                 reinterpret_cast<int*>(v_tile + tile_bytes<D>(kKeys)));
  float o[kTiles][D / 8][4];
  Softmax rows[kTiles][2];
  clear(o);
  while (!walk.at_end(at)) {
    const DeviceBand band = queries.band[at.set];
    const int first = at.first;
    copy_async_wait();
    __syncthreads();  // k is there, and nobody reads v any more
    const DeviceRows& v = p.keys[at.set].v;
    load_keys(v_tile, v, first);

    const auto seen = mine.range.keys(band);
    const bool work = mine.any && (!p.skip_tiles || seen.any.touches(first, kKeys));
    float s[kTiles][kKeys / 8][4];
    if (work) multiply_rows<D, kTiles, kKeys>(s, q_tile, mine.row, k_tile);

    copy_async_wait();
    const bool masked = walk.masked(at), found = masked && has_nonfinite<D, kKeys>(v_tile);
    if (found) clean_tile<D, kKeys>(v_tile);
    const bool unclean = barrier_or(masked, found);  // v is there, and nobody reads k any more
    at = walk.next(at);
    if (!walk.at_end(at)) load_keys(k_tile, p.keys[at.set].k, at.first);

    if (!work) continue;
    if (!seen.all.covers(first, kKeys)) {
      mine.for_pairs<kKeys>(band, first, [&](int m, int n, int e, bool visible) {
        s[m][n][e] = visible ? s[m][n][e] : -INFINITY;
      });
    }
    online_softmax<D>(s, rows, o, p.scale_log2);
    multiply_weights<D, kTiles, kKeys>(o, s, v_tile);
    if (unclean)
      add_nonfinite<D, kTiles>(o, HeadRows(p, v, tile.sequence, tile.key_head), first,
                               min(first + kKeys, p.length), 1, mine.sees(band));
  }

  // Where there was no tile of keys, that of the queries may still be on its way.
  copy_async_wait();
  __syncthreads();
  const int lane = int(threadIdx.x) & 31;
  float* const lse = static_cast<float*>(queries.lse.data);
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows[m][half].sum), inverse = sum == 0 ? 0.0F : 1 / sum;
      const int row = mine.row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)  // these rows of q are this warp's alone
        *reinterpret_cast<uint32_t*>(q_tile + chunk_offset<D>(row, n) + 4 * (lane & 3)) =
            pack_bf16(o[m][n][2 * half] * inverse, o[m][n][2 * half + 1] * inverse);
      const int query = tile.first + row;
      if (query <= tile.last && (lane & 3) == 0)
        lse[(int64_t(tile.sequence) * p.length + query) * queries.lse.stride + tile.head] =
            sum == 0 ? -INFINITY : rows[m][half].top * p.scale + logf(sum);
    }
  __syncwarp();
  write_rows<D>(p, queries.o, q_tile, tile.sequence, tile.head, tile.first);
}

template <int D>
void launch(const Exec& ex, const Problem& p) {
  SPS_CUDA(cudaFuncSetAttribute(forward_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kForwardShared<D>));
  forward_kernel<D>
      <<<unsigned(QueryTile<kQueries>::blocks(p)), kThreads, kForwardShared<D>, stream_of(ex)>>>(p);
  SPS_LAUNCHED();
}

}  // namespace

void forward_tensor_cores(const Exec& ex, const Problem& p) {
  if (p.head_dim <= 64) return launch<64>(ex, p);
  if (p.head_dim <= 96) return launch<96>(ex, p);
  launch<128>(ex, p);
}

}  // namespace sps::ops::attention
