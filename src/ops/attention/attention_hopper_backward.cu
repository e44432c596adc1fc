// Backward attention on Hopper, five matrix products for a pair of tiles. A block works through key tiles:
// 128 keys of one set and head, and one after the other the tiles of queries that see some of them, of every
// stream and of every query head that reads the head. Two warpgroups own 64 keys each, with dk and dv in
// registers. Scores and probabilities are kept transposed, keys down, so that they are operands of the
// products for dk and dv as they come out. dq needs both warpgroups' gradients of scores; each of them
// multiplies its half of dq one step later, so that neither waits for the other and one's exponentials run
// beside the other's products.
//
// A block's part of dq is added in global memory, in f32: a thread of the block waits for its turn at the
// query tile and lets the copy engine add. Turns follow the order of the tickets that blocks take before each
// key tile, so every turn that is waited for belongs to a tile that is being worked on or done, and sums have
// the same bits every time. Key tiles come last to first: the next tile's block reaches a query tile one step
// later by itself.
#include <algorithm>

#include "ops/attention/attention_hopper.cuh"
#include "ops/attention/attention_hopper.h"
#include "ops/attention/attention_hopper_host.h"
#include "ops/attention/attention_hopper_rows.cuh"
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

namespace {

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
          const QueryRange::Keys seen = range.keys(p.queries[stream].band[set]);
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

// One warpgroup that computes: 64 keys of each tile.
template <class Shape>
class KeyOwner {
 public:
  __device__ __forceinline__ KeyOwner(const Problem& p, char* smem)
      : p_(p), smem_(smem), base_(smem_address(smem)) {}

  __device__ __forceinline__ void run() {
    if (group() == Shape::kGroups - 1) pass_turn();
    uint32_t n = 0;  // steps so far
#pragma unroll 1
    for (;; ++tiles_.steps) {
      barrier_wait(base_ + Shape::kTileFull + 8 * tiles_.stage(), tiles_.parity());
      if (keys().steps < 0) break;
      n = tile(n);
      warp_arrive(base_ + Shape::kTileEmpty + 8 * tiles_.stage());
    }
    barrier_wait(base_ + Shape::kDqEmpty + 8 * group(), (n & 1) ^ 1);
    if (is_first()) dq_step(n).tile = -1;
    warp_arrive(base_ + Shape::kDqFull + 8 * group());
  }

 private:
  static constexpr int kPairs = Shape::kQueries / 2, kSums = Shape::kHeadDim / 2;  // of a thread

  static __device__ __forceinline__ int group() {
    return int(threadIdx.x) / kWarpgroupThreads - 1;
  }
  static __device__ __forceinline__ int lane() {
    return int(threadIdx.x) % 32;
  }
  static __device__ __forceinline__ bool is_first() {
    return threadIdx.x % kWarpgroupThreads == 0;
  }
  // First of the warp's 16 keys of the tile.
  static __device__ __forceinline__ int warp_row() {
    return 16 * (int(threadIdx.x) / 32 - 4);
  }

  // Groups issue their products in turns.
  __device__ __forceinline__ void await_turn() {
    if (Shape::kTurns) named_sync(1 + group(), 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_turn() {
    if (Shape::kTurns) named_arrive(2 - group(), 2 * kWarpgroupThreads);
  }

  __device__ __forceinline__ const OwnedKeys& keys() const {
    return reinterpret_cast<const OwnedKeys*>(smem_ + Shape::kTiles)[tiles_.stage()];
  }
  __device__ __forceinline__ const Step& step(int stage) const {
    return reinterpret_cast<const Step*>(smem_ + Shape::kSteps)[stage];
  }
  // Where the thread that adds reads about step n. It has read about step n - 2 when dq of step n - 1 is
  // handed over.
  __device__ __forceinline__ Step& dq_step(uint32_t n) const {
    return reinterpret_cast<Step*>(smem_ + Shape::kDqSteps)[2 * group() + n % 2];
  }

  // All steps of a key tile, n is the number of the first; returns that of the next tile's.
  __device__ __forceinline__ uint32_t tile(uint32_t n) {
    float s[kPairs], dk[kSums], dv[kSums];
#pragma unroll
    for (int e = 0; e < kSums; ++e) dk[e] = dv[e] = 0;
    barrier_wait(base_ + Shape::kKvFull, tiles_.steps & 1);
    int left = keys().steps;
    if (left > 0) {
      barrier_wait(base_ + Shape::kQFull + 8 * (n % 2), n / 2 % 2);
      multiply_keys(s, Shape::kK, Shape::kQ + n % 2 * Shape::kQueryTile);
      products_wait<0>();
      pin(s);
      bool first = true;
#pragma unroll 1
      for (; left > 0; --left, ++n, first = false) {
        const int groups = step(n % 2).groups;
        if (groups >> group() & 1)
          work<true>(s, dk, dv, n, first, left > 1, groups >> (2 + group()) & 1);
        else
          work<false>(s, dk, dv, n, first, left > 1, false);
      }
      const uint32_t last = n - 1;
      float dq[32];
      barrier_wait(base_ + Shape::kScoresFull + 8 * (last % 2), last / 2 % 2);
      multiply_slopes(dq, last % 2);
      products_wait<0>();
      pin(dq);
      warp_arrive(base_ + Shape::kScoresEmpty + 8 * (last % 2));
      warp_arrive(base_ + Shape::kKvEmpty);
      hand_over(dq, last);
    } else {
      warp_arrive(base_ + Shape::kKvEmpty);
    }
    named_sync(3, Shape::kGroups * kWarpgroupThreads);  // the gradients of scores have been read: staging now
    store(dk, dv);
    named_sync(3, Shape::kGroups * kWarpgroupThreads);
    return n;
  }

  // A step, whose scores are in s. If no query sees the group's keys (not kSeen) it takes part in dq alone.
  template <bool kSeen>
  __device__ __forceinline__ void work(float (&s)[kPairs], float (&dk)[kSums], float (&dv)[kSums], uint32_t n,
                                       bool first, bool more, bool masked) {
    const uint32_t stage = n % 2, parity = n / 2 % 2;
    const int d_o = Shape::kDo + int(stage) * Shape::kQueryTile;
    uint32_t weights[kPairs / 2], slopes[kPairs / 2];
    barrier_wait(base_ + Shape::kDoFull + 8 * stage, parity);
    if constexpr (kSeen) {
      float dp[kPairs];
      multiply_keys(dp, Shape::kV, d_o);
      if (masked) mask(s, stage);
      probabilities(s, stage);
      if constexpr (Shape::kEarly) {
        pack_operand(s, weights);
        add_queries(dv, weights, d_o);
        products_wait<1>();
      } else {
        pin(s);
        barrier_wait(base_ + Shape::kDoFull + 8 * stage,
                     parity);  // complete; keeps the wait below in its place
        products_wait<0>();
      }
      pin(dp);
      gradients(s, dp, stage);
      pack_operand(dp, slopes);
      if constexpr (!Shape::kEarly) pack_operand(s, weights);
    } else {
#pragma unroll
      for (int e = 0; e < kPairs / 2; ++e) slopes[e] = 0;
    }
    await_turn();
    if constexpr (kSeen) {
      if constexpr (!Shape::kEarly) add_queries(dv, weights, d_o);
      add_queries(dk, slopes, Shape::kQ + int(stage) * Shape::kQueryTile);
    }
    barrier_wait(base_ + Shape::kScoresEmpty + 8 * stage, parity ^ 1);
    store_slopes(slopes, stage);
    fence_async_shared();
    warp_arrive(base_ + Shape::kScoresFull + 8 * stage);
    // dq of the step before. The first step of a tile has none: its product is of no use, like the scores
    // after the last step, but the same products in every step are what the compiler can overlap.
    float dq[32];
    if (!first) barrier_wait(base_ + Shape::kScoresFull + 8 * (1 - stage), (n - 1) / 2 % 2);
    multiply_slopes(dq, 1 - stage);
    products_wait<2>();
    pin(dv);
    warp_arrive(base_ + Shape::kDoEmpty + 8 * stage);
    const uint32_t next = n + (more ? 1 : 0);
    barrier_wait(base_ + Shape::kQFull + 8 * (next % 2), next / 2 % 2);
    multiply_keys(s, Shape::kK, Shape::kQ + int(next % 2) * Shape::kQueryTile);
    pass_turn();
    products_wait<1>();
    pin(dk);
    pin(dq);
    if (!first) {
      warp_arrive(base_ + Shape::kScoresEmpty + 8 * (1 - stage));
      hand_over(dq, n - 1);
    }
    if (is_first()) dq_step(n) = step(stage);
    products_wait<0>();
    pin(s);
    warp_arrive(base_ + Shape::kQEmpty + 8 * stage);
  }

  // Keys (of the tile at `rows`) times queries.
  __device__ __forceinline__ void multiply_keys(float (&d)[kPairs], int rows, int queries) {
    products_begin();
    multiply_rows<Shape::kHeadDim, Shape::kQueries, Shape::kKeyChunk, Shape::kQueryChunk>(
        d, base_ + rows + group() * 64 * kChunkRowBytes, base_ + queries);
    products_commit();
  }
  __device__ __forceinline__ void add_queries(float (&d)[kSums], const uint32_t (&pairs)[kPairs / 2],
                                              int queries) {
    products_begin();
    add_columns<Shape::kQueries, Shape::kHeadDim, Shape::kQueryChunk>(d, pairs, base_ + queries);
    products_commit();
  }
  __device__ __forceinline__ void multiply_slopes(float (&dq)[32], int buffer) {
    const int queries = Shape::kSplitQueries ? group() : 0, columns = Shape::kSplitQueries ? 0 : group();
    products_begin();
    multiply_transposed<Shape::kKeys>(
        dq, base_ + Shape::kScores + buffer * Shape::kScoreTile + queries * Shape::kKeyChunk,
        base_ + Shape::kK + columns * Shape::kKeyChunk);
    products_commit();
  }

  // What the stage holds of a thread's queries 8 n and 8 n + 1 from its first.
  template <class Pair>
  __device__ __forceinline__ Pair of_queries(int part, uint32_t stage, int n) const {
    return *reinterpret_cast<const Pair*>(smem_ + part + stage * Shape::kRowBytes +
                                          4 * (8 * n + 2 * (lane() % 4)));
  }

  // Scores of pairs that are not visible become -inf.
  __device__ __forceinline__ void mask(float (&s)[kPairs], uint32_t stage) const {
    const DeviceBand band = p_.queries[step(stage).stream].band[keys().set];
    const int j = keys().tile * Shape::kKeys + warp_row() + lane() / 4;
    const int i = step(stage).i0 + 2 * (lane() % 4);
#pragma unroll
    for (int e = 0; e < kPairs; e += 4) {
      const int2 start = of_queries<int2>(Shape::kStarts, stage, e / 4);
      const Interval a = visible_keys(band, i + 2 * e, start.x),
                     b = visible_keys(band, i + 2 * e + 1, start.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (j + 8 * r < a.begin || j + 8 * r >= a.end) s[e + 2 * r] = -INFINITY;
        if (j + 8 * r < b.begin || j + 8 * r >= b.end) s[e + 2 * r + 1] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void probabilities(float (&s)[kPairs], uint32_t stage) const {
#pragma unroll
    for (int e = 0; e < kPairs; e += 4) {
      const float2 lse = of_queries<float2>(Shape::kLse, stage, e / 4);
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        s[e + r] = exp2_fast(s[e + r] * p_.scale_log2 - lse.x);
        s[e + r + 1] = exp2_fast(s[e + r + 1] * p_.scale_log2 - lse.y);
      }
    }
  }
  // dp to the gradients of scores, but for the scale.
  __device__ __forceinline__ void gradients(const float (&s)[kPairs], float (&dp)[kPairs],
                                            uint32_t stage) const {
#pragma unroll
    for (int e = 0; e < kPairs; e += 4) {
      const float2 delta = of_queries<float2>(Shape::kDelta, stage, e / 4);
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        dp[e + r] = s[e + r] * (dp[e + r] - delta.x);
        dp[e + r + 1] = s[e + r + 1] * (dp[e + r + 1] - delta.y);
      }
    }
  }

  // The slopes with keys as rows and queries as columns, swizzled as the copy engine would.
  __device__ __forceinline__ void store_slopes(const uint32_t (&slopes)[kPairs / 2], int buffer) const {
    const int row = warp_row() + lane() % 16;
    const uint32_t at = base_ + Shape::kScores + buffer * Shape::kScoreTile + row * kChunkRowBytes;
#pragma unroll
    for (int k = 0; k < Shape::kQueries / 16; ++k)
      store_blocks(at + k / 4 * Shape::kKeyChunk + ((2 * (k % 4) + lane() / 16) ^ (row % 8)) * 16,
                   slopes + 4 * k);
  }

  // dq to the thread that adds it.
  __device__ __forceinline__ void hand_over(const float (&dq)[32], uint32_t n) {
    barrier_wait(base_ + Shape::kDqEmpty + 8 * group(), (n & 1) ^ 1);
    auto* to = reinterpret_cast<float4*>(smem_ + Shape::kDq) + group() * (Shape::kGroupGradient / 4) +
               threadIdx.x % kWarpgroupThreads;
#pragma unroll
    for (int e = 0; e < 32; e += 4) to[e / 4 * kWarpgroupThreads] = {dq[e], dq[e + 1], dq[e + 2], dq[e + 3]};
    fence_async_shared();
    warp_arrive(base_ + Shape::kDqFull + 8 * group());
  }

  __device__ __forceinline__ void store(float (&dk)[kSums], const float (&dv)[kSums]) {
    const OwnedKeys at = keys();
    const DeviceKeys& to = p_.keys[at.set];
    const int j0 = at.tile * Shape::kKeys + warp_row(), rows = min(16, p_.length - j0);
    const int64_t first = int64_t(at.sequence) * p_.length + j0;
#pragma unroll
    for (int e = 0; e < kSums; ++e) dk[e] *= p_.scale;
    if (__any_sync(0xFFFFFFFF, not_finite(dk, rows) || not_finite(dv, rows))) {
      for (int j = j0; j < j0 + rows; ++j) row_of_dk<Shape::kHeadDim>(p_, at.set, at.sequence, at.head, j);
      return;
    }
    const int column = at.head * Shape::kHeadDim;
    if (to.dk.data) store_columns(dk, to.dk, first, column, rows, to.accumulate);
    if (to.dv.data) store_columns(dv, to.dv, first, column, rows, to.accumulate);
  }
  __device__ __forceinline__ void store_columns(const float (&x)[kSums], const DeviceRows& to, int64_t row,
                                                int column, int rows, bool accumulate) {
    constexpr int kRest = Shape::kHeadDim - 64;
    char* staging = smem_ + Shape::kScores + (int(threadIdx.x) / 32 - 4) * Shape::kStaging;
    store_block<64, 0>(staging, x, to, row, column, rows, 64, accumulate);
    if constexpr (kRest > 0)
      store_block<kRest, 64>(staging, x, to, row, column + 64, rows, kRest, accumulate);
  }

  const Problem& p_;
  char* smem_;
  uint32_t base_;
  Ring<2> tiles_;
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardMaps maps, const __grid_constant__ Problem p,
                    const __grid_constant__ BackwardWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  char* smem = memory + (1024 - smem_address(memory) % 1024) % 1024;
  if (threadIdx.x == 0) {
    const uint32_t base = smem_address(smem);
    barrier_init(base + Shape::kKvFull, 1), barrier_init(base + Shape::kKvEmpty, Shape::kWarps);
    for (int s = 0; s < 2; ++s) {
      barrier_init(base + Shape::kTileFull + 8 * s, 1);
      barrier_init(base + Shape::kTileEmpty + 8 * s, Shape::kWarps + 1);
      barrier_init(base + Shape::kScoresFull + 8 * s, Shape::kWarps);
      barrier_init(base + Shape::kScoresEmpty + 8 * s, Shape::kWarps);
      barrier_init(base + Shape::kDqFull + 8 * s, Shape::kWarps / Shape::kGroups);
      barrier_init(base + Shape::kDqEmpty + 8 * s, 1);
    }
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(base + Shape::kQFull + 8 * s, 1), barrier_init(base + Shape::kDoFull + 8 * s, 1);
      barrier_init(base + Shape::kQEmpty + 8 * s, Shape::kWarps);
      barrier_init(base + Shape::kDoEmpty + 8 * s, Shape::kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<Shape::kLoadRegisters>();
    if (threadIdx.x == 0) load_steps<Shape>(maps, p, work, smem);
    if (threadIdx.x == 32) load_keys<Shape>(maps, smem);
    if (threadIdx.x == 64) add_dq<Shape>(work, smem, 0);
    if (threadIdx.x == 96) add_dq<Shape>(work, smem, 1);
  } else {
    take_registers<Shape::kRegisters>();
    KeyOwner<Shape>(p, smem).run();
  }
#endif
}

// No turns taken, no tickets; document starts where the copy engine can fetch them.
__global__ void __launch_bounds__(256)
    prepare_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardWork work,
                   int counters) {
  const int n = int(blockIdx.x * blockDim.x + threadIdx.x), padded = int(p.statistics.padded);
  if (n < counters) work.schedule.counter[n] = 0;
  if (n < p.batch * padded)
    work.starts[n] = n % padded < p.length ? p.document_start[n / padded * p.length + n % padded] : kNever;
}

// Sums in f32 to dq: a block takes a query tile.
template <class Shape>
__global__ void __launch_bounds__(256)
    dq_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardWork work) {
  __shared__ __align__(16) char staging[Shape::kWarps * Staging<64>::kBytes];
  const int tile = blockIdx.x, within = tile % work.query_tiles, row = tile / work.query_tiles;
  const int head = row % p.heads, sequence = row / p.heads % p.batch, stream = row / p.heads / p.batch;
  const int group = int(threadIdx.x) / 128, warp = int(threadIdx.x) / 32;
  float dq[32] = {};
  if (work.turns[Shape::kGroups * tile + group] > 0) {
    const auto* from = reinterpret_cast<const float4*>(work.dq + int64_t(tile) * Shape::kQueryGradient) +
                       group * (Shape::kGroupGradient / 4) + threadIdx.x % 128;
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      const float4 x = from[e / 4 * 128];
      dq[e] = x.x * p.scale, dq[e + 1] = x.y * p.scale, dq[e + 2] = x.z * p.scale, dq[e + 3] = x.w * p.scale;
    }
  }
  const int i0 = within * Shape::kQueries + warp % 4 * 16 + (Shape::kSplitQueries ? 64 * group : 0);
  const int column = Shape::kSplitQueries ? 0 : 64 * group, rows = min(16, p.length - i0);
  store_block<64, 0>(staging + warp * Staging<64>::kBytes, dq, p.queries[stream].dq,
                     int64_t(sequence) * p.length + i0, head * Shape::kHeadDim + column, rows,
                     Shape::kHeadDim - column, false);
  if (__syncthreads_or(not_finite(dq, rows)))
    for (int n = warp; n < Shape::kQueries; n += 8) {
      const int i = within * Shape::kQueries + n;
      if (i < p.length) row_of_dq<Shape::kHeadDim>(p, stream, sequence, head, i);
    }
}

// Pairs that a set has, about.
int64_t work_of(const Problem& p, int set) {
  int64_t pairs = 0;
  for (int s = 0; s < p.streams; ++s)
    pairs += std::max(0, std::min(p.queries[s].band[set].hi, p.length - 1) - p.queries[s].band[set].lo + 1);
  return pairs;
}

template <class Shape>
void launch_backward(const Exec& ex, const Problem& p) {
  BackwardMaps maps{};
  for (int s = 0; s < p.streams; ++s) {
    maps.q[s] = tile_map(p, p.queries[s].q, p.heads, Shape::kQueries);
    maps.d_o[s] = tile_map(p, p.queries[s].d_o, p.heads, Shape::kQueries);
  }
  for (int s = 0; s < p.sets; ++s) {
    maps.k[s] = tile_map(p, p.keys[s].k, p.kv_heads, Shape::kKeys);
    maps.v[s] = tile_map(p, p.keys[s].v, p.kv_heads, Shape::kKeys);
  }
  BackwardWork work;
  work.key_tiles = (p.length + Shape::kKeys - 1) / Shape::kKeys;
  work.query_tiles = (p.length + Shape::kQueries - 1) / Shape::kQueries;
  for (int s = 0; s < p.sets; ++s) work.order[s] = s;
  std::stable_sort(work.order, work.order + p.sets,
                   [&](int a, int b) { return work_of(p, a) > work_of(p, b); });
  const int64_t query_tiles = int64_t(work.query_tiles) * p.streams * p.batch * p.heads;
  // Ticket and turns, document starts, sums.
  const auto rounded = [](int64_t numbers) { return (numbers + 31) / 32 * 32; };
  const int64_t counters = Shape::kGroups * query_tiles + 1, starts = p.batch * p.statistics.padded;
  auto* scratch = reinterpret_cast<int32_t*>(
      device_scratch(ex, DeviceSlot::workspace,
                     size_t(rounded(counters) + rounded(starts) + query_tiles * Shape::kQueryGradient) * 4));
  work.turns = scratch + 1;
  work.starts = scratch + rounded(counters);
  work.dq = reinterpret_cast<float*>(work.starts + rounded(starts));
  // A position of a key head keeps in cache q, d_o and the sums of dq of all that read it, and k and v.
  const int64_t row_bytes = int64_t{8} * p.head_dim * p.streams * p.group + int64_t{4} * p.head_dim * p.sets;
  work.schedule = make_schedule(p, p.sets * work.key_tiles, 1, row_bytes, scratch);
  const auto blocks = unsigned((std::max(counters, starts) + 255) / 256);
  prepare_kernel<<<blocks, 256, 0, stream_of(ex)>>>(p, work, int(counters));
  SPS_LAUNCHED();
  SPS_CUDA(cudaFuncSetAttribute(backward_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Shape::kBytes));
  const int blocks_of_work = std::min(work.schedule.items, gpu_info().multiprocessors);
  if (blocks_of_work > 0)
    backward_kernel<Shape><<<blocks_of_work, Shape::kThreads, Shape::kBytes, stream_of(ex)>>>(maps, p, work);
  SPS_LAUNCHED();
  if (query_tiles > 0) dq_kernel<Shape><<<unsigned(query_tiles), 256, 0, stream_of(ex)>>>(p, work);
  SPS_LAUNCHED();
}

}  // namespace

void backward_hopper(const Exec& ex, const Problem& p) {
  if (p.batch == 0 || p.length == 0) return;
  if (p.head_dim == 64) return launch_backward<BackwardShape<64, 128, true, false>>(ex, p);
  if (p.head_dim == 96) return launch_backward<BackwardShape<96, 64, true, true>>(ex, p);
  launch_backward<BackwardShape<128, 64, false, false>>(ex, p);
}

}  // namespace sps::ops::attention
