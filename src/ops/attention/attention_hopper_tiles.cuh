// What the Hopper kernels share beyond the instructions: which tiles of keys a tile of queries visits, and
// how a warp's accumulators leave for memory.
#pragma once

#include "ops/attention/attention_cuda.cuh"
#include "ops/attention/attention_hopper.cuh"

namespace sps::ops::attention {

constexpr int kTileKeys = 128;

// Tiles of kTileKeys keys of one set, for a range of queries.
struct TileRange {
  int first, last;          // those that are visited
  int all_first, all_last;  // of them, those that every query sees in full
};
__device__ __forceinline__ TileRange tile_range(const Problem& p, DeviceBand band,
                                                const QueryRange& queries) {
  const TileKeys keys = queries.keys(band);
  TileRange r{0, (p.length + kTileKeys - 1) / kTileKeys, 0, 0};
  if (p.skip_tiles) {
    r.first = max(keys.any.begin, 0) / kTileKeys;
    r.last = band.hi < band.lo ? r.first : max(r.first, (keys.any.end + kTileKeys - 1) / kTileKeys);
  }
  r.all_last = max(r.first, min(max(keys.all.end, 0) / kTileKeys, r.last));
  r.all_first = min(max((keys.all.begin + kTileKeys - 1) / kTileKeys, r.first), r.all_last);
  return r;
}

// Is one of a thread's accumulators, in rows `row` < rows of the warp's 16, infinite or NaN?
template <int kCount>
__device__ __forceinline__ bool not_finite(const float (&x)[kCount], int rows) {
  bool bad = false;
#pragma unroll
  for (int e = 0; e < kCount; ++e)
    bad |= int(threadIdx.x) % 32 / 4 + 8 * (e / 2 % 2) < rows && !(fabsf(x[e]) < INFINITY);
  return bad;
}

// kColumns columns of a warp's 16 rows of accumulators, from column kFrom on, to rows row.. and columns
// column.. of `to`: the first `rows` and `columns` of them. bf16 goes through `staging`, so that it leaves in
// pieces of 16 bytes.
template <int kColumns>
struct Staging {
  static constexpr int kRowBytes = 2 * kColumns + 16;  // the 16 spread the rows over the banks
  static constexpr int kBytes = 16 * kRowBytes;
};
template <int kColumns, int kFrom, int kCount>
__device__ __forceinline__ void store_block(char* staging, const float (&x)[kCount], const DeviceRows& to,
                                            int64_t row, int column, int rows, int columns, bool accumulate) {
  constexpr int kRowBytes = Staging<kColumns>::kRowBytes, kPieces = kColumns / 8;
  static_assert(kFrom + kColumns <= 2 * kCount);
  const int lane = hopper::in_place(int(threadIdx.x) % 32);
  if (to.dtype == DType::bf16) {
    __syncwarp();
#pragma unroll
    for (int e = 0; e < kColumns / 2; e += 2)
      *reinterpret_cast<uint32_t*>(staging + (lane / 4 + e / 2 % 2 * 8) * kRowBytes + e / 4 * 16 +
                                   lane % 4 * 4) = hopper::pack_bf16(x[kFrom / 2 + e], x[kFrom / 2 + e + 1]);
    __syncwarp();
    auto* out = static_cast<__nv_bfloat16*>(to.data) + row * to.stride + column;
#pragma unroll
    for (int n = 0; n < kPieces / 2; ++n) {
      const int r = (lane + 32 * n) / kPieces, piece = (lane + 32 * n) % kPieces;
      if (r < rows && 8 * piece < columns)
        *reinterpret_cast<uint4*>(out + r * to.stride + 8 * piece) =
            *reinterpret_cast<const uint4*>(staging + r * kRowBytes + 16 * piece);
    }
  } else {
    auto* out = static_cast<float*>(to.data) + row * to.stride + column;
#pragma unroll
    for (int e = 0; e < kColumns / 2; e += 2) {
      const int r = lane / 4 + e / 2 % 2 * 8, c = e / 4 * 8 + lane % 4 * 2;
      if (r >= rows || c >= columns) continue;
      auto* at = reinterpret_cast<float2*>(out + r * to.stride + c);
      float2 sum = accumulate ? *at : float2{0, 0};
      sum.x += x[kFrom / 2 + e], sum.y += x[kFrom / 2 + e + 1];
      *at = sum;
    }
  }
}

}  // namespace sps::ops::attention
