// What surrounds the products of the backward pass on Hopper (attention_hopper_backward.cu): the shared
// memory of a block, and its threads that load tiles and add up dq.
#pragma once

#include "ops/attention/attention_hopper.cuh"
#include "ops/attention/attention_hopper_host.h"
#include "ops/attention/attention_hopper_tiles.cuh"
#include "ops/cuda.cuh"

namespace sps::ops::attention {

using namespace hopper;

struct BackwardMaps {
  CUtensorMap q[kMaxQueryStreams], d_o[kMaxQueryStreams], k[kMaxKeySets], v[kMaxKeySets];
};

// What the kernels need besides the problem.
struct BackwardWork {
  HopperSchedule schedule;       // of the key tiles of one set, with sections for one document a sequence
  int64_t row_bytes = 0;         // that a position of a key head keeps in cache
  int32_t order[kMaxKeySets]{};  // sets: all tiles of one, of all heads, come before the next one's
  bool paired[kMaxKeySets]{};    // a step of the set is the same 64 queries of both streams
  int32_t query_tiles = 0;
  int32_t* turns = nullptr;  // of each half of a query tile's dq: blocks that have added to it
  int32_t* starts =
      nullptr;  // document_start, padded as the statistics are; what sees nothing starts at kNever
  int32_t* documents = nullptr;  // of each sequence
  float* dq = nullptr;  // of each query tile: kQueryGradient floats, in the order of the accumulators
};

constexpr int32_t kNever = 1 << 30;

// A key tile, and how many steps it takes: tiles of queries of one head. Negative: there are no more.
struct OwnedKeys {
  int steps;
  int set, sequence, head, tile;
};
// 64 queries, and what a group does of their dq.
struct Part {
  int i0, stream;
  int at;    // the group's piece of dq, among all; negative: there are no more
  int turn;  // how many blocks add to it before
};
// Parts 0 and 1 are the halves of a step of 128 queries, and a group has the dq of one of them. A step of 64
// is both, and a group has half the columns.
struct Step {
  Part part[2];
  int groups;  // bit g: some query sees some of group g's keys; bit 2 + g: some do not see some
};

// Shared memory of a block, and the bytes from its start to each part.
template <int kHeadDim_, int kQueries_, int kQStages_, bool kTurns_, bool kEarly_>
struct BackwardShape {
  static constexpr int kHeadDim = kHeadDim_, kQueries = kQueries_, kKeys = kTileKeys;
  static constexpr int kQStages = kQStages_, kDoStages = 2;
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
  static constexpr int kParts = kQueries / 64, kPartBytes = 64 * int(sizeof(float));
  // Groups issue their products in turns; the product for dv starts before the gradients of scores are made.
  static constexpr bool kTurns = kTurns_, kEarly = kEarly_;

  static constexpr int kK = 0, kV = kKeyTile, kQ = kV + kKeyTile, kDo = kQ + kQStages * kQueryTile;
  static constexpr int kScores = kDo + kDoStages * kQueryTile, kDq = kScores + 2 * kScoreTile;
  static constexpr int kLse = kDq + kQueryGradient * int(sizeof(float));
  static constexpr int kStarts = kLse + kQStages * kRowBytes, kDelta = kStarts + kQStages * kRowBytes;
  static constexpr int kKvFull = kDelta + kDoStages * kRowBytes, kKvEmpty = kKvFull + 8;
  static constexpr int kTileFull = kKvEmpty + 8, kTileEmpty = kTileFull + 16;
  static constexpr int kQFull = kTileEmpty + 16, kQEmpty = kQFull + 8 * kQStages;
  static constexpr int kDoFull = kQEmpty + 8 * kQStages, kDoEmpty = kDoFull + 8 * kDoStages;
  static constexpr int kScoresFull = kDoEmpty + 8 * kDoStages, kScoresEmpty = kScoresFull + 16;
  static constexpr int kDqFull = kScoresEmpty + 16, kDqEmpty = kDqFull + 8 * kGroups;
  static constexpr int kTiles = kDqEmpty + 8 * kGroups, kSteps = kTiles + 2 * int(sizeof(OwnedKeys));
  static constexpr int kDqSteps = kSteps + kQStages * int(sizeof(Step));
  static constexpr int kFound = kDqSteps + 2 * kGroups * int(sizeof(Part));
  static constexpr int kEnd = kFound + 32 * int(sizeof(Step));
  static constexpr int kBytes = kEnd + 1024;  // the start is moved to a multiple of 1024
  static constexpr int kStaging = Staging<64>::kBytes;
  static_assert(kWarps * kStaging <= 2 * kScoreTile);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Which queries share a step: 2^shift of them, of one stream or of both together.
struct Sharing {
  int stream, other, shift;
};
template <class Shape>
__device__ __forceinline__ Sharing sharing_of(const BackwardWork& work, int set, int stream) {
  if (Shape::kSplitQueries && work.paired[set]) return {0, 1, 6};
  return {stream, stream, Shape::kQueries == 128 ? 7 : 6};
}
__device__ __forceinline__ DeviceBand band_of(const Problem& p, int set, const Sharing& sharing) {
  return hull(p.queries[sharing.stream].band[set], p.queries[sharing.other].band[set]);
}

// Steps begin .. end - 1 of a sequence have queries that may see keys of the tile.
template <class Shape>
__device__ __forceinline__ Interval seen_steps(const Problem& p, int set, const Sharing& sharing, int tile,
                                               const int32_t* starts) {
  const DeviceBand band = band_of(p, set, sharing);
  const int shift = sharing.shift, steps = ((p.length - 1) >> shift) + 1;
  const int key = tile * Shape::kKeys, first = (key + band.lo) >> shift;
  if (band.hi < band.lo || key + band.lo >= p.length) return {0, 0};
  // First keys of steps grow; the first one beyond the key tile ends the walk.
  const auto beyond = [&](int step) { return starts[step << shift] / Shape::kKeys > tile; };
  int low = first, high = min(steps, ((key + Shape::kKeys - 1 + band.hi) >> shift) + 1);
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

// Blocks that add to the dq of 64 queries from i0 on before the block with `tile` of the set at `place`:
// those of sets before it, and of its own set those with later tiles.
template <class Shape>
__device__ __forceinline__ int turn_of(const Problem& p, const BackwardWork& work, const int32_t* starts,
                                       int stream, int i0, int place, int tile) {
  int turn = 0;
#pragma unroll 1
  for (int at = 0; at <= place; ++at) {
    const int set = work.order[at];
    const Sharing sharing = sharing_of<Shape>(work, set, stream);
    const int first = i0 >> sharing.shift << sharing.shift;
    if (first >= p.length) continue;  // the second half of the last 128
    const QueryRange queries(starts, first, min(first + (1 << sharing.shift), p.length) - 1);
    const TileRange visited = tile_range(p, band_of(p, set, sharing), queries);
    turn += at < place ? visited.last - visited.first : visited.last - 1 - tile;
  }
  return turn;
}

// What there is to know of the step whose first query is i0.
template <class Shape>
__device__ __forceinline__ Step find_step(const Problem& p, const BackwardWork& work, const OwnedKeys& keys,
                                          int place, const Sharing& sharing, int head, int i0) {
  const int32_t* starts = p.document_start + int64_t(keys.sequence) * p.length;
  Step step;
  step.groups = 0;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const bool pair = sharing.stream != sharing.other;
    const int stream = part == 0 ? sharing.stream : sharing.other;
    const int first = i0 + (Shape::kSplitQueries && !pair ? 64 * part : 0);
    const int row = (stream * p.batch + keys.sequence) * p.heads + head;
    const int piece = Shape::kSplitQueries ? first / 64 : 2 * (first / 64) + part;
    Part& to = step.part[part];
    to = {first, stream, 2 * row * work.query_tiles + piece, 0};
    if (part == 1 && !Shape::kSplitQueries)
      to.turn = step.part[0].turn;
    else
      to.turn = turn_of<Shape>(p, work, starts, stream, first, place, keys.tile);
    if (first >= p.length || (part == 1 && !Shape::kSplitQueries)) continue;
    const QueryRange range(starts, first, min(first + 64, p.length) - 1);
    const TileKeys seen = range.keys(p.queries[stream].band[keys.set]);
#pragma unroll
    for (int group = 0; group < Shape::kGroups; ++group) {
      const int j0 = keys.tile * Shape::kKeys + 64 * group;
      if (!p.skip_tiles || seen.any.touches(j0, 64)) step.groups |= 1 << group;
      if (!seen.all.covers(j0, 64)) step.groups |= 4 << group;
    }
  }
  return step;
}

// Loads the queries of step n and what is known of them. Where a step is of two parts a warp does it, every
// copy by a lane of its own; else one lane does.
template <class Shape>
__device__ __forceinline__ void load_step(const BackwardMaps& maps, const Problem& p,
                                          const BackwardWork& work, char* smem, uint32_t n, const Step& step,
                                          int sequence, int head) {
  constexpr bool kTogether = Shape::kParts == 2;
  const int lane = int(threadIdx.x) % kWarp, part = kTogether ? lane % 2 : 0;
  const auto mine = [&](int copy) { return !kTogether || lane / 2 == copy; };
  const bool first = !kTogether || lane == 0;
  const int stream = step.part[part].stream, i0 = step.part[part].i0;
  const int64_t row = p.statistics_of(stream, sequence, head) + i0;
  const uint32_t base = smem_address(smem), part_tile = part * 64 * kChunkRowBytes,
                 part_row = part * Shape::kPartBytes;
  const auto load_d_o = [&] {
    const Ring<Shape::kDoStages> ring{n};
    const uint32_t stage = ring.stage(), full = base + Shape::kDoFull + 8 * stage;
    barrier_wait(base + Shape::kDoEmpty + 8 * stage, ring.parity() ^ 1);
    if (first) barrier_expect(full, Shape::kQueryTile + Shape::kRowBytes);
    if (kTogether) __syncwarp();
    if (mine(0))
      load_tile<Shape::kHeadDim, 64, Shape::kQueries>(
          base + Shape::kDo + stage * Shape::kQueryTile + part_tile, &maps.d_o[stream], full, head, i0,
          sequence);
    if (mine(1))
      load_bytes(base + Shape::kDelta + stage * Shape::kRowBytes + part_row, p.statistics.delta + row,
                 Shape::kPartBytes, full);
  };
  const auto load_q = [&] {
    const Ring<Shape::kQStages> ring{n};
    const uint32_t stage = ring.stage(), full = base + Shape::kQFull + 8 * stage;
    const uint32_t rows = base + stage * Shape::kRowBytes + part_row;
    barrier_wait(base + Shape::kQEmpty + 8 * stage, ring.parity() ^ 1);
    if (first) {
      reinterpret_cast<Step*>(smem + Shape::kSteps)[stage] = step;
      barrier_expect(full, Shape::kQueryTile + 2 * Shape::kRowBytes);
    }
    if (kTogether) __syncwarp();
    if (mine(0))
      load_tile<Shape::kHeadDim, 64, Shape::kQueries>(
          base + Shape::kQ + stage * Shape::kQueryTile + part_tile, &maps.q[stream], full, head, i0,
          sequence);
    if (mine(1)) load_bytes(rows + Shape::kLse, p.statistics.lse2 + row, Shape::kPartBytes, full);
    if (mine(2))
      load_bytes(rows + Shape::kStarts, work.starts + sequence * p.statistics.padded + i0, Shape::kPartBytes,
                 full);
  };
  // In the order in which their stages come free.
  if constexpr (Shape::kQStages > Shape::kDoStages) load_q();
  load_d_o();
  if constexpr (Shape::kQStages <= Shape::kDoStages) load_q();
}

// With short documents the blocks of a section reach only few rows of a head, and have little time between
// one tile's start and the next one's, which waits for it: then sections are larger.
__device__ __forceinline__ int section_now(const Problem& p, const BackwardWork& work) {
  int documents = 0;
  for (int s = int(threadIdx.x) % kWarp; s < p.batch; s += kWarp) documents += work.documents[s];
  documents = __reduce_add_sync(0xFFFFFFFF, documents);
  return section_of(work.schedule.heads, work.row_bytes, int64_t{p.batch} * p.length / max(documents, 1));
}

// The warp that takes tickets and feeds the ring of query tiles. What there is to know of a step takes longer
// to find than a step may take, so its lanes find it for the next 32 together.
template <class Shape>
__device__ __forceinline__ void load_steps(const BackwardMaps& maps, const Problem& p,
                                           const BackwardWork& work, char* smem) {
  const uint32_t base = smem_address(smem);
  const int lane = int(threadIdx.x) % kWarp;
  auto* found = reinterpret_cast<Step*>(smem + Shape::kFound);
  HopperSchedule schedule = work.schedule;
  schedule.section = section_now(p, work);
  uint32_t number = 0;  // of steps before
#pragma unroll 1
  for (Ring<2> tiles;; ++tiles.steps) {
    int ticket = lane == 0 ? atomicAdd(work.schedule.counter, 1) : 0;
    ticket = __shfl_sync(0xFFFFFFFF, ticket, 0);
    barrier_wait(base + Shape::kTileEmpty + 8 * tiles.stage(), tiles.parity() ^ 1);
    OwnedKeys& shown = reinterpret_cast<OwnedKeys*>(smem + Shape::kTiles)[tiles.stage()];
    const uint32_t tile_full = base + Shape::kTileFull + 8 * tiles.stage();
    if (ticket >= p.sets * schedule.items) {
      if (lane == 0) {
        shown.steps = -1;
        barrier_arrive(tile_full);
      }
      break;
    }
    const int place = ticket / schedule.items, set = work.order[place];
    const auto [tile, key_head] = schedule.find(ticket % schedule.items);
    OwnedKeys keys{0, set, key_head / p.kv_heads, key_head % p.kv_heads, tile};
    const int32_t* starts = p.document_start + int64_t(keys.sequence) * p.length;
    const int passes = sharing_of<Shape>(work, set, 0).other == 1 ? 1 : p.streams;
    const int all = ((p.length - 1) >> sharing_of<Shape>(work, set, 0).shift) + 1;  // steps of a sequence
    const auto visit_of = [&](Interval seen) { return p.skip_tiles ? seen : Interval{0, all}; };
    Interval seen_in[kMaxQueryStreams];
#pragma unroll
    for (int pass = 0; pass < kMaxQueryStreams; ++pass) {
      seen_in[pass] = {0, 0};
      if (pass >= passes) continue;
      seen_in[pass] = seen_steps<Shape>(p, set, sharing_of<Shape>(work, set, pass), keys.tile, starts);
      const Interval visit = visit_of(seen_in[pass]);
      keys.steps += max(0, visit.end - visit.begin) * p.group;
    }
    if (lane == 0) {
      shown = keys;
      barrier_arrive(tile_full);
    }
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const Sharing sharing = sharing_of<Shape>(work, set, pass);
      const Interval seen = pass == 0 ? seen_in[0] : seen_in[1], visit = visit_of(seen);
#pragma unroll 1
      for (int head = keys.head * p.group; head < (keys.head + 1) * p.group; ++head)
#pragma unroll 1
        for (int n = visit.begin; n < visit.end; n += kWarp) {
          const int count = min(kWarp, visit.end - n);
          // Of three in a narrow band the first is seen by one group's keys alone, the last by the other's:
          // side by side they take the time of one.
          int mine = min(n + lane, visit.end - 1);
          if (seen.end - seen.begin == 3 && mine > seen.begin && mine < seen.end)
            mine = seen.begin + seen.end - mine;
          const Step step = find_step<Shape>(p, work, keys, place, sharing, head, mine << sharing.shift);
          if constexpr (Shape::kParts == 2) {
            __syncwarp();
            found[lane] = step;
            __syncwarp();
#pragma unroll 1
            for (int at = 0; at < count; ++at, ++number)
              load_step<Shape>(maps, p, work, smem, number, found[at], keys.sequence, head);
          } else {
#pragma unroll 1
            for (int at = 0; at < count; ++at, ++number) {
              if (lane == at) load_step<Shape>(maps, p, work, smem, number, step, keys.sequence, head);
              __syncwarp();
            }
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
    const Part part = reinterpret_cast<const Part*>(smem + Shape::kDqSteps)[2 * group + (n & 1)];
    if (part.at < 0) break;
    float* to = work.dq + int64_t(part.at) * Shape::kGroupGradient;
    if (part.turn == 0) {
      store_bytes(to, base + Shape::kDq + group * kBytes, kBytes);
    } else {
      await_count(work.turns + part.at, part.turn);
      add_floats(to, base + Shape::kDq + group * kBytes, kBytes);
    }
    stores_commit();
    stores_wait_read();
    barrier_arrive(base + Shape::kDqEmpty + 8 * group);
    stores_wait();
    set_count(work.turns + part.at, part.turn + 1);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::attention
