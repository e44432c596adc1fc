// What the Hopper kernels share beyond the instructions: which tiles of keys a tile of queries visits, and
// how a warp's accumulators leave for memory.
#pragma once

#include "ops/attention/attention_cuda.cuh"
#include "ops/attention/attention_hopper.cuh"

namespace sps::ops::attention {

constexpr int kTileKeys = 128;

// What both bands show, and what lies between.
__device__ __forceinline__ DeviceBand hull(DeviceBand a, DeviceBand b) {
  return {min(a.lo, b.lo), max(a.hi, b.hi)};
}

// The tiles of kTileKeys keys of one set that a range of queries visits in the backward pass.
struct TileRange {
  int first, last;
};
__device__ __forceinline__ TileRange tile_range(const Problem& p, DeviceBand band,
                                                const QueryRange& queries) {
  TileRange r{0, (p.length + kTileKeys - 1) / kTileKeys};
  if (p.skip_tiles) {
    const Interval any = queries.keys(band).any;
    r.first = max(any.begin, 0) / kTileKeys;
    r.last = band.hi < band.lo ? r.first : max(r.first, (any.end + kTileKeys - 1) / kTileKeys);
  }
  return r;
}

// The tiles of kTileKeys keys that queries of one stream, or of both, visit in the forward pass: set after
// set, the last tile first. Tiles begin at multiples of kTileKeys; or the last one ends with the last key
// that is seen, where that makes fewer tiles.
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const Problem& p, const QueryRange& queries, int stream, int other)
      : p_(p), queries_(queries), stream_(stream), other_(other) {
    enter_set();
  }
  __device__ __forceinline__ bool more() const { return set_ < p_.sets; }
  __device__ __forceinline__ void next(int tiles = 1) {
    tile_ -= tiles;
    if (tile_ >= first_) return;
    ++set_;
    enter_set();
  }
  // How many tiles from this one on hold nothing but keys of `all`.
  __device__ __forceinline__ int whole(Interval all) const {
    if (key() + kTileKeys > all.end) return 0;
    const int begin = max(all.begin - shift_, 0);
    return max(tile_ - max(first_, tiles(begin)) + 1, 0);
  }
  __device__ __forceinline__ int set() const { return set_; }
  __device__ __forceinline__ int key() const { return tile_ * kTileKeys + shift_; }  // the tile's first

 private:
  __device__ __forceinline__ void enter_set() {
    for (; set_ < p_.sets; ++set_) {
      const DeviceBand band = hull(p_.queries[stream_].band[set_], p_.queries[other_].band[set_]);
      Interval seen = queries_.keys(band).any;
      seen.begin = max(seen.begin, 0);
      if (seen.begin >= seen.end && p_.skip_tiles) continue;
      shift_ = 0;
      const int keys = seen.end - seen.begin;
      if (keys > 0 && tiles(keys) < tiles(seen.end) - seen.begin / kTileKeys)
        shift_ = seen.end % kTileKeys - kTileKeys;
      first_ = p_.skip_tiles ? (seen.begin - shift_) / kTileKeys : 0;
      tile_ = tiles((p_.skip_tiles ? seen.end : p_.length) - shift_) - 1;
      return;
    }
  }
  static __device__ __forceinline__ int tiles(int keys) { return (keys + kTileKeys - 1) / kTileKeys; }

  const Problem& p_;
  const QueryRange queries_;
  const int stream_, other_;
  int set_ = 0, first_ = 0, tile_ = 0, shift_ = 0;
};

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
