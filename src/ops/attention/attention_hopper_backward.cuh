// What surrounds the products of the backward pass on Hopper (attention_hopper_backward.cu): the shared
// memory of a block, and its threads that load tiles and add up dq.
#pragma once

#include "ops/attention/attention_hopper.cuh"
#include "ops/attention/attention_hopper_host.h"
#include "ops/attention/attention_hopper_tiles.cuh"

namespace sps::ops::attention {

using namespace hopper;

struct BackwardMaps {
  CUtensorMap q[kMaxQueryStreams], d_o[kMaxQueryStreams], k[kMaxKeySets], v[kMaxKeySets];
};

// What the kernels need besides the problem.
struct BackwardWork {
  HopperSchedule schedule;       // tiles of it: key tiles of all sets, `order` of sets outermost
  int32_t order[kMaxKeySets]{};  // sets, the one with most to do first: it comes last
  int32_t key_tiles = 0, query_tiles = 0;
  int32_t* turns = nullptr;  // of each half of a query tile's dq: blocks that have added to it
  int32_t* starts =
      nullptr;          // document_start, padded as the statistics are; what sees nothing starts at kNever
  float* dq = nullptr;  // of each query tile: kQueryGradient floats, in the order of the accumulators
};

constexpr int32_t kNever = 1 << 30;

// A key tile, and how many steps it takes: tiles of queries of one head. Negative: there are no more.
struct OwnedKeys {
  int steps;
  int set, sequence, head, tile;
};
struct Step {
  int i0, stream;
  int groups;  // bit g: some query sees some of group g's keys; bit 2 + g: some do not see some
  int tile,
      turn;  // query tile among all, and how many blocks add to it before; tile negative: there are no more
};

// Shared memory of a block, and the bytes from its start to each part.
template <int kHeadDim_, int kQueries_, bool kTurns_, bool kEarly_>
struct BackwardShape {
  static constexpr int kHeadDim = kHeadDim_, kQueries = kQueries_, kKeys = kTileKeys, kStages = 2;
  static constexpr int kGroups = 2, kWarps = 4 * kGroups;  // that compute
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kLoadRegisters = kHeadDim == 128 ? 24 : 40, kRegisters = kHeadDim == 128 ? 240 : 232;
  static constexpr int kChunks = (kHeadDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kQueryChunk = kQueries * kChunkRowBytes, kKeyChunk = kKeys * kChunkRowBytes;
  static constexpr int kQueryTile = kChunks * kQueryChunk, kKeyTile = kChunks * kKeyChunk;
  static constexpr int kScoreTile = kQueries / kChunkColumns * kKeyChunk;
  // Each group makes 64 x 64 of the tile's dq: half the queries of 64 columns, or half the columns of 64
  // queries.
  static constexpr bool kSplitQueries = kQueries == 128;
  static constexpr int kGroupGradient = 64 * 64, kQueryGradient = kGroups * kGroupGradient;
  static constexpr int kRowBytes = kQueries * int(sizeof(float));  // of a statistic
  static_assert(kSplitQueries ? kChunks == 1 : kQueries == 64 && kChunks == 2);
  // Groups issue their products in turns; the product for dv starts before the gradients of scores are made.
  static constexpr bool kTurns = kTurns_, kEarly = kEarly_;

  static constexpr int kK = 0, kV = kKeyTile, kQ = kV + kKeyTile, kDo = kQ + kStages * kQueryTile;
  static constexpr int kScores = kDo + kStages * kQueryTile, kDq = kScores + 2 * kScoreTile;
  static constexpr int kLse = kDq + kQueryGradient * int(sizeof(float)), kDelta = kLse + kStages * kRowBytes;
  static constexpr int kStarts = kDelta + kStages * kRowBytes, kKvFull = kStarts + kStages * kRowBytes;
  static constexpr int kKvEmpty = kKvFull + 8, kTileFull = kKvEmpty + 8, kTileEmpty = kTileFull + 16;
  static constexpr int kQFull = kTileEmpty + 16, kQEmpty = kQFull + 8 * kStages;
  static constexpr int kDoFull = kQEmpty + 8 * kStages, kDoEmpty = kDoFull + 8 * kStages;
  static constexpr int kScoresFull = kDoEmpty + 8 * kStages, kScoresEmpty = kScoresFull + 16;
  static constexpr int kDqFull = kScoresEmpty + 16, kDqEmpty = kDqFull + 8 * kGroups;
  static constexpr int kTiles = kDqEmpty + 8 * kGroups, kSteps = kTiles + 2 * int(sizeof(OwnedKeys));
  static constexpr int kDqSteps = kSteps + kStages * int(sizeof(Step));
  static constexpr int kEnd = kDqSteps + 2 * kGroups * int(sizeof(Step));
  static constexpr int kBytes = kEnd + 1024;  // the start is moved to a multiple of 1024
  static constexpr int kStaging = Staging<64>::kBytes;
  static_assert(kWarps * kStaging <= 2 * kScoreTile);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Query tiles first .. last - 1 of a stream visit the key tile.
template <class Shape>
__device__ __forceinline__ Interval query_tiles(const Problem& p, const BackwardWork& work, DeviceBand band,
                                                int tile, const int32_t* starts) {
  if (!p.skip_tiles) return {0, work.query_tiles};
  const int key = tile * Shape::kKeys, first = (key + band.lo) / Shape::kQueries;
  if (band.hi < band.lo || key + band.lo >= p.length) return {0, 0};
  // First keys of query tiles grow; the first one beyond the key tile ends the walk.
  const auto beyond = [&](int query_tile) {
    return starts[query_tile * Shape::kQueries] / Shape::kKeys > tile;
  };
  int low = first, high = min(work.query_tiles, (key + Shape::kKeys - 1 + band.hi) / Shape::kQueries + 1);
  if (!beyond(high - 1)) return {first, high};
  while (low < high) {
    const int middle = (low + high) / 2;
    if (beyond(middle))
      high = middle;
    else
      low = middle + 1;
  }
  return {first, low};
}

// The thread that takes tickets and feeds the ring of query tiles.
template <class Shape>
__device__ __forceinline__ void load_steps(const BackwardMaps& maps, const Problem& p,
                                           const BackwardWork& work, char* smem) {
  const uint32_t base = smem_address(smem);
  auto* steps = reinterpret_cast<Step*>(smem + Shape::kSteps);
  Ring<Shape::kStages> ring;
#pragma unroll 1
  for (Ring<2> tiles;; ++tiles.steps) {
    const int ticket = atomicAdd(work.schedule.counter, 1);
    barrier_wait(base + Shape::kTileEmpty + 8 * tiles.stage(), tiles.parity() ^ 1);
    OwnedKeys& keys = reinterpret_cast<OwnedKeys*>(smem + Shape::kTiles)[tiles.stage()];
    if (ticket >= work.schedule.items) {
      keys.steps = -1;
      barrier_arrive(base + Shape::kTileFull + 8 * tiles.stage());
      break;
    }
    const auto [place_tile, key_head] = work.schedule.find(ticket);
    const int place = place_tile / work.key_tiles, tile = place_tile % work.key_tiles;
    const int sequence = key_head / p.kv_heads, kv_head = key_head % p.kv_heads, set = work.order[place];
    const int32_t* starts = p.document_start + int64_t(sequence) * p.length;
    Interval queries[kMaxQueryStreams];
    int count = 0;
#pragma unroll
    for (int stream = 0; stream < kMaxQueryStreams; ++stream) {
      queries[stream] = {0, 0};
      if (stream < p.streams)
        queries[stream] = query_tiles<Shape>(p, work, p.queries[stream].band[set], tile, starts);
      count += max(0, queries[stream].end - queries[stream].begin) * p.group;
    }
    keys = {count, set, sequence, kv_head, tile};
    barrier_arrive(base + Shape::kTileFull + 8 * tiles.stage());
#pragma unroll 1
    for (int stream = 0; stream < p.streams; ++stream) {
      const Interval visits = stream == 0 ? queries[0] : queries[1];
#pragma unroll 1
      for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
        const int64_t row = (int64_t(stream) * p.batch + sequence) * p.heads + head;
#pragma unroll 1
        for (int n = visits.begin; n < visits.end; ++n, ++ring.steps) {
          // What there is to know of the step is made ready while the ring is full.
          Step step{n * Shape::kQueries, stream, 0, int(row) * work.query_tiles + n, 0};
          const int i0 = step.i0;
          const QueryRange range(starts, i0, min(i0 + Shape::kQueries, p.length) - 1);
#pragma unroll 1
          for (int at = place; at < p.sets; ++at) {
            const TileRange visited = tile_range(p, p.queries[stream].band[work.order[at]], range);
            step.turn += at > place ? visited.last - visited.first : visited.last - 1 - tile;
          }
          const TileKeys seen = range.keys(p.queries[stream].band[set]);
#pragma unroll
          for (int group = 0; group < Shape::kGroups; ++group) {
            const int j0 = tile * Shape::kKeys + 64 * group;
            if (!p.skip_tiles || seen.any.touches(j0, 64)) step.groups |= 1 << group;
            if (!seen.all.covers(j0, 64)) step.groups |= 4 << group;
          }
          const uint32_t stage = ring.stage(), parity = ring.parity() ^ 1;
          const uint32_t q_full = base + Shape::kQFull + 8 * stage,
                         do_full = base + Shape::kDoFull + 8 * stage;
          const int64_t at = row * p.statistics.padded + i0;
          barrier_wait(base + Shape::kDoEmpty + 8 * stage, parity);
          barrier_expect(do_full, Shape::kQueryTile + Shape::kRowBytes);
          load_tile<Shape::kHeadDim, Shape::kQueries>(base + Shape::kDo + stage * Shape::kQueryTile,
                                                      &maps.d_o[stream], do_full, head, i0, sequence);
          load_bytes(base + Shape::kDelta + stage * Shape::kRowBytes, p.statistics.delta + at,
                     Shape::kRowBytes, do_full);
          barrier_wait(base + Shape::kQEmpty + 8 * stage, parity);
          steps[stage] = step;
          barrier_expect(q_full, Shape::kQueryTile + 2 * Shape::kRowBytes);
          load_tile<Shape::kHeadDim, Shape::kQueries>(base + Shape::kQ + stage * Shape::kQueryTile,
                                                      &maps.q[stream], q_full, head, i0, sequence);
          load_bytes(base + Shape::kLse + stage * Shape::kRowBytes, p.statistics.lse2 + at, Shape::kRowBytes,
                     q_full);
          load_bytes(base + Shape::kStarts + stage * Shape::kRowBytes,
                     work.starts + sequence * p.statistics.padded + i0, Shape::kRowBytes, q_full);
        }
      }
    }
  }
}

// The thread that loads keys and values.
template <class Shape>
__device__ __forceinline__ void load_keys(const BackwardMaps& maps, char* smem) {
  const uint32_t base = smem_address(smem);
  for (Ring<2> tiles;; ++tiles.steps) {
    barrier_wait(base + Shape::kTileFull + 8 * tiles.stage(), tiles.parity());
    const OwnedKeys keys = reinterpret_cast<const OwnedKeys*>(smem + Shape::kTiles)[tiles.stage()];
    barrier_arrive(base + Shape::kTileEmpty + 8 * tiles.stage());
    if (keys.steps < 0) break;
    barrier_wait(base + Shape::kKvEmpty, (tiles.steps & 1) ^ 1);
    barrier_expect(base + Shape::kKvFull, 2 * Shape::kKeyTile);
    load_tile<Shape::kHeadDim, Shape::kKeys>(base + Shape::kK, &maps.k[keys.set], base + Shape::kKvFull,
                                             keys.head, keys.tile * Shape::kKeys, keys.sequence);
    load_tile<Shape::kHeadDim, Shape::kKeys>(base + Shape::kV, &maps.v[keys.set], base + Shape::kKvFull,
                                             keys.head, keys.tile * Shape::kKeys, keys.sequence);
  }
}

// The thread that adds one group's parts of dq, each at its turn.
template <class Shape>
__device__ __forceinline__ void add_dq(const BackwardWork& work, char* smem, int group) {
  const uint32_t base = smem_address(smem), full = base + Shape::kDqFull + 8 * group;
  constexpr uint32_t kBytes = Shape::kGroupGradient * sizeof(float);
  for (uint32_t n = 0;; ++n) {
    barrier_wait(full, n & 1);
    const Step step = reinterpret_cast<const Step*>(smem + Shape::kDqSteps)[2 * group + (n & 1)];
    if (step.tile < 0) break;
    const int64_t half = int64_t(step.tile) * Shape::kGroups + group;
    float* to = work.dq + half * Shape::kGroupGradient;
    if (step.turn == 0) {
      store_bytes(to, base + Shape::kDq + group * kBytes, kBytes);
    } else {
      await_count(work.turns + half, step.turn);
      add_floats(to, base + Shape::kDq + group * kBytes, kBytes);
    }
    stores_commit();
    stores_wait_read();
    barrier_arrive(base + Shape::kDqEmpty + 8 * group);
    stores_wait();
    set_count(work.turns + half, step.turn + 1);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::attention
