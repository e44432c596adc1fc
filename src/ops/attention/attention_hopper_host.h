// What the hosts of the Hopper kernels share: tensor maps, and the order in which blocks take work.
#pragma once

#include <cuda.h>

#include "ops/attention/attention_cuda.h"
#include "tensor/cuda.h"

namespace sps::ops::attention {

// Work items: `tiles` tiles of each of `heads` heads, the last tile first. Heads go by sections whose keys
// and values stay in the L2 cache together, and a tile of all heads of a section comes before the next tile.
// Blocks take items in that order through `counter`, which starts at 0.
struct HopperSchedule {
  int32_t items = 0, tiles = 0, heads = 0, section = 1;
  int32_t* counter = nullptr;

  struct Place {
    int tile, head;
  };
#ifdef __CUDACC__
  __device__ __forceinline__ Place find(int item) const {
    const int before = item / (section * tiles), first = before * section;
    const int within = item - first * tiles, wide = min(section, heads - first);
    return {tiles - 1 - within / wide, first + within % wide};
  }
#endif
};

// Heads of a section, when so many rows of a head are worked on at about the same time.
constexpr int64_t kCachedBytes = int64_t{24} << 20;  // of the L2 cache, which halves share
constexpr int section_of(int heads, int64_t row_bytes, int64_t rows) {
  const int64_t fit = kCachedBytes / (row_bytes * rows > 0 ? row_bytes * rows : 1);
  const int most = fit < 1 ? 1 : fit < heads ? int(fit) : heads;
  const int sections = (heads + most - 1) / most;
  return (heads + sections - 1) / sections;
}

// Boxes of 64 columns and `box_rows` rows of one head; rows outside a sequence and columns outside a head are
// zero.
CUtensorMap tile_map(const Problem& problem, const DeviceRows& rows, int heads, int box_rows);

// Both streams see about the same keys of the set, so that 64 queries of each make a tile as good as 128 of
// one.
bool seen_alike(const Problem& problem, int set);

// `readers` heads for each key head of each sequence, which has `row_bytes` bytes a position to keep in
// cache.
HopperSchedule make_schedule(const Problem& problem, int tiles, int readers, int64_t row_bytes,
                             int32_t* counter);

}  // namespace sps::ops::attention
