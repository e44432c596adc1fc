// Backward attention on Hopper, five matrix products for a pair of tiles. A block owns 128 keys of one set
// and head and visits, one after the other, the tiles of queries that see some of them: of every stream, of
// every query head that reads the head. Two warpgroups own 64 keys each, with dk and dv in registers. Scores
// and probabilities are kept transposed, keys down, so that they are operands of the products for dk and dv
// as they come out.
//
// A block's part of dq is added in global memory, in f32: one thread of the block waits for its turn at the
// query tile and lets the copy engine add. Turns follow the order in which blocks start, which a ticket
// decides, so every turn that a block waits for is that of a block which runs or is done, and the sums have
// the same bits every time. Key tiles come last to first: the block of the next tile reaches a query tile one
// step later by itself.
#include <algorithm>

#include "ops/attention/attention_hopper.cuh"
#include "ops/attention/attention_hopper.h"
#include "ops/attention/attention_hopper_host.h"
#include "ops/attention/attention_hopper_rows.cuh"
#include "ops/attention/attention_hopper_tiles.cuh"

namespace sps::ops::attention {

namespace {

using namespace hopper;

struct BackwardMaps {
  CUtensorMap q[kMaxQueryStreams], d_o[kMaxQueryStreams], k[kMaxKeySets], v[kMaxKeySets];
};

// What the kernels need besides the problem.
struct BackwardWork {
  HopperSchedule schedule;       // tiles of it: key tiles of all sets, `order` of sets outermost
  int32_t order[kMaxKeySets]{};  // sets, the one with most to do first: it comes last
  int32_t key_tiles = 0, query_tiles = 0;
  int32_t* turns = nullptr;  // of each query tile: blocks that have added to it
  int32_t* starts =
      nullptr;          // document_start, padded as the statistics are; what sees nothing starts at kNever
  float* dq = nullptr;  // of each query tile: kQueryGradient floats, in the order of the accumulators
};

constexpr int32_t kNever = 1 << 30;

// A step of a block: one tile of queries of one head.
struct Step {
  int i0;  // first query; negative: there are no more
  int stream;
  int masked;      // some query does not see some key
  int tile, turn;  // query tile among all, and how many blocks add to it before
};

// Shared memory of a block, and the bytes from its start to each part.
template <int kHeadDim_, int kQueries_>
struct BackwardShape {
  static constexpr int kHeadDim = kHeadDim_, kQueries = kQueries_, kKeys = kTileKeys, kStages = 2;
  static constexpr int kGroups = 2, kWarps = 4 * kGroups;  // that compute
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kLoadRegisters = 24, kRegisters = 240;
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
  // The products for dv can start before the gradients of scores are made where registers allow.
  static constexpr bool kEarly = kQueries == 64;

  static constexpr int kK = 0, kV = kKeyTile, kQ = kV + kKeyTile, kDo = kQ + kStages * kQueryTile;
  static constexpr int kScores = kDo + kStages * kQueryTile, kDq = kScores + 2 * kScoreTile;
  static constexpr int kLse = kDq + kQueryGradient * int(sizeof(float)), kDelta = kLse + kStages * kRowBytes;
  static constexpr int kStarts = kDelta + kStages * kRowBytes, kKvFull = kStarts + kStages * kRowBytes;
  static constexpr int kQFull = kKvFull + 8, kQEmpty = kQFull + 8 * kStages;
  static constexpr int kDoFull = kQEmpty + 8 * kStages, kDoEmpty = kDoFull + 8 * kStages;
  static constexpr int kDqFull = kDoEmpty + 8 * kStages, kDqEmpty = kDqFull + 8;
  static constexpr int kSteps = kDqEmpty + 8, kDqStep = kSteps + kStages * int(sizeof(Step));
  static constexpr int kTicket = kDqStep + 2 * int(sizeof(Step)), kEnd = kTicket + 4;
  static constexpr int kBytes = kEnd + 1024;  // the start is moved to a multiple of 1024
  static_assert(kWarps * Staging<kHeadDim>::kBytes <= 2 * kStages * kQueryTile);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The keys that a block owns.
struct KeyTile {
  int set, place, sequence, head, tile;  // place: of the set in the order
};
__device__ __forceinline__ KeyTile find_keys(const Problem& p, const BackwardWork& work, int ticket) {
  const auto [tile, head] = work.schedule.find(ticket);
  const int place = tile / work.key_tiles;
  return {work.order[place], place, head / p.kv_heads, head % p.kv_heads, tile % work.key_tiles};
}

// Query tiles first .. last - 1 of a stream visit the key tile.
template <class Shape>
__device__ __forceinline__ Interval query_tiles(const Problem& p, const BackwardWork& work, DeviceBand band,
                                                int tile, const int32_t* starts) {
  if (!p.skip_tiles) return {0, work.query_tiles};
  const int first = (tile * Shape::kKeys + band.lo) / Shape::kQueries;
  if (band.hi < band.lo || tile * Shape::kKeys + band.lo >= p.length) return {0, 0};
  // First keys of query tiles grow; the first one beyond the key tile ends the walk.
  int low = first, high = work.query_tiles;
  while (low < high) {
    const int middle = (low + high) / 2, i0 = middle * Shape::kQueries;
    if (max(starts[i0], i0 - band.hi) / Shape::kKeys > tile)
      high = middle;
    else
      low = middle + 1;
  }
  return {first, low};
}

template <class Shape>
__device__ __forceinline__ void load_steps(const BackwardMaps& maps, const Problem& p,
                                           const BackwardWork& work, char* smem, const KeyTile& keys) {
  const uint32_t base = smem_address(smem);
  barrier_expect(base + Shape::kKvFull, 2 * Shape::kKeyTile);
  load_tile<Shape::kHeadDim, Shape::kKeys>(base + Shape::kK, &maps.k[keys.set], base + Shape::kKvFull,
                                           keys.head, keys.tile * Shape::kKeys, keys.sequence);
  load_tile<Shape::kHeadDim, Shape::kKeys>(base + Shape::kV, &maps.v[keys.set], base + Shape::kKvFull,
                                           keys.head, keys.tile * Shape::kKeys, keys.sequence);
  const int32_t* starts = p.document_start + int64_t(keys.sequence) * p.length;
  auto* steps = reinterpret_cast<Step*>(smem + Shape::kSteps);
  Ring<Shape::kStages> ring;
  for (int stream = 0; stream < p.streams; ++stream) {
    const Interval tiles = query_tiles<Shape>(p, work, p.queries[stream].band[keys.set], keys.tile, starts);
    for (int head = keys.head * p.group; head < (keys.head + 1) * p.group; ++head) {
      const int64_t row = (int64_t(stream) * p.batch + keys.sequence) * p.heads + head;
      for (int tile = tiles.begin; tile < tiles.end; ++tile, ++ring.steps) {
        Step step{tile * Shape::kQueries, stream, 1, int(row) * work.query_tiles + tile, 0};
        const int i1 = min(step.i0 + Shape::kQueries, p.length) - 1, start0 = starts[step.i0],
                  start1 = starts[i1];
        for (int place = keys.place; place < p.sets; ++place) {
          const TileRange range =
              tile_range(p, p.queries[stream].band[work.order[place]], step.i0, i1, start0, start1);
          if (place > keys.place) {
            step.turn += range.last - range.first;
          } else {
            step.turn += range.last - 1 - keys.tile;
            step.masked = keys.tile < range.all_first || keys.tile >= range.all_last;
          }
        }
        const uint32_t stage = ring.stage(), parity = ring.parity() ^ 1;
        const uint32_t q_full = base + Shape::kQFull + 8 * stage, do_full = base + Shape::kDoFull + 8 * stage;
        barrier_wait(base + Shape::kQEmpty + 8 * stage, parity);
        steps[stage] = step;
        barrier_expect(q_full, Shape::kQueryTile + 2 * Shape::kRowBytes);
        load_tile<Shape::kHeadDim, Shape::kQueries>(base + Shape::kQ + stage * Shape::kQueryTile,
                                                    &maps.q[stream], q_full, head, step.i0, keys.sequence);
        load_bytes(base + Shape::kLse + stage * Shape::kRowBytes,
                   p.statistics.lse2 + row * p.statistics.padded + step.i0, Shape::kRowBytes, q_full);
        load_bytes(base + Shape::kStarts + stage * Shape::kRowBytes,
                   work.starts + keys.sequence * p.statistics.padded + step.i0, Shape::kRowBytes, q_full);
        barrier_wait(base + Shape::kDoEmpty + 8 * stage, parity);
        barrier_expect(do_full, Shape::kQueryTile + Shape::kRowBytes);
        load_tile<Shape::kHeadDim, Shape::kQueries>(base + Shape::kDo + stage * Shape::kQueryTile,
                                                    &maps.d_o[stream], do_full, head, step.i0, keys.sequence);
        load_bytes(base + Shape::kDelta + stage * Shape::kRowBytes,
                   p.statistics.delta + row * p.statistics.padded + step.i0, Shape::kRowBytes, do_full);
      }
    }
  }
  barrier_wait(base + Shape::kQEmpty + 8 * ring.stage(), ring.parity() ^ 1);
  steps[ring.stage()].i0 = -1;
  barrier_arrive(base + Shape::kQFull + 8 * ring.stage());
}

// Adds the block's parts of dq, each at its turn.
template <class Shape>
__device__ __forceinline__ void add_dq(const BackwardWork& work, char* smem) {
  const uint32_t base = smem_address(smem);
  constexpr uint32_t kBytes = Shape::kQueryGradient * sizeof(float);
  for (uint32_t n = 0;; ++n) {
    barrier_wait(base + Shape::kDqFull, n & 1);
    const Step step = reinterpret_cast<const Step*>(smem + Shape::kDqStep)[n & 1];
    if (step.i0 < 0) break;
    float* to = work.dq + int64_t(step.tile) * Shape::kQueryGradient;
    if (step.turn == 0) {
      store_bytes(to, base + Shape::kDq, kBytes);
    } else {
      await_count(work.turns + step.tile, step.turn);
      add_floats(to, base + Shape::kDq, kBytes);
    }
    stores_commit();
    stores_wait_read();
    barrier_arrive(base + Shape::kDqEmpty);
    stores_wait();
    set_count(work.turns + step.tile, step.turn + 1);
  }
}

// One warpgroup that computes: 64 keys.
template <class Shape>
class KeyOwner {
 public:
  __device__ __forceinline__ KeyOwner(const Problem& p, char* smem, const KeyTile& keys)
      : p_(p), smem_(smem), base_(smem_address(smem)), keys_(keys) {}

  __device__ __forceinline__ void run() {
    float s[kPairs], dk[kSums], dv[kSums];
#pragma unroll
    for (int e = 0; e < kSums; ++e) dk[e] = dv[e] = 0;
    barrier_wait(base_ + Shape::kKvFull, 0);
    barrier_wait(base_ + Shape::kQFull, 0);
    int i0 = step(0).i0;
    multiply_keys(s, Shape::kK, Shape::kQ);
    products_wait<0>();
    pin(s);
    uint32_t n = 0;
#pragma unroll 1
    for (; i0 >= 0; ++n) {
      const uint32_t stage = n % 2, parity = n / 2 % 2;
      uint32_t weights[kPairs / 2], slopes[kPairs / 2];
      {
        float dp[kPairs];
        barrier_wait(base_ + Shape::kDoFull + 8 * stage, parity);
        multiply_keys(dp, Shape::kV, Shape::kDo + stage * Shape::kQueryTile);
        const bool masked = step(stage).masked;
        if (masked) mask(s, stage);
        probabilities(s, stage);
        if constexpr (Shape::kEarly) {
          pack_operand(s, weights);
          add_queries(dv, weights, Shape::kDo + stage * Shape::kQueryTile);
          products_wait<1>();
        } else {
          pin(s);
          barrier_wait(base_ + Shape::kDoFull + 8 * stage,
                       parity);  // complete; keeps the wait below in its place
          products_wait<0>();
        }
        pin(dp);
        gradients(s, dp, stage, masked);
        pack_operand(dp, slopes);
        if constexpr (!Shape::kEarly) {
          pack_operand(s, weights);
          add_queries(dv, weights, Shape::kDo + stage * Shape::kQueryTile);
        }
      }
      add_queries(dk, slopes, Shape::kQ + stage * Shape::kQueryTile);
      // Both groups' keys take part in dq. A buffer of slopes is written again two steps later: by then its
      // readers have passed the barrier of the step between.
      store_slopes(slopes, stage);
      fence_async_shared();
      named_sync(1, Shape::kGroups * kWarpgroupThreads);
      float dq[32];
      multiply_slopes(dq, stage);
      if (is_first()) dq_step(n) = step(stage);
      products_wait<2>();
      pin(dv);
      warp_arrive(base_ + Shape::kDoEmpty + 8 * stage);
      const uint32_t next = (n + 1) % 2;
      barrier_wait(base_ + Shape::kQFull + 8 * next, (n + 1) / 2 % 2);
      i0 = step(next).i0;
      multiply_keys(s, Shape::kK, Shape::kQ + next * Shape::kQueryTile);
      products_wait<1>();
      pin(dk);
      pin(dq);
      warp_arrive(base_ + Shape::kQEmpty + 8 * stage);
      hand_over(dq, n);
      products_wait<0>();
      pin(s);
    }
    barrier_wait(base_ + Shape::kDqEmpty, (n & 1) ^ 1);
    if (is_first()) dq_step(n).i0 = -1;
    warp_arrive(base_ + Shape::kDqFull);
    named_sync(1, Shape::kGroups * kWarpgroupThreads);  // the tiles of queries become staging
    store(dk, dv);
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
    return threadIdx.x == kWarpgroupThreads;
  }
  // First of the warp's 16 keys of the tile.
  static __device__ __forceinline__ int warp_row() {
    return 16 * (int(threadIdx.x) / 32 - 4);
  }

  __device__ __forceinline__ const Step& step(int stage) const {
    return reinterpret_cast<const Step*>(smem_ + Shape::kSteps)[stage];
  }
  // Where the thread that adds reads about step n. It has read about step n - 2 when dq of step n - 1 is
  // handed over.
  __device__ __forceinline__ Step& dq_step(uint32_t n) const {
    return reinterpret_cast<Step*>(smem_ + Shape::kDqStep)[n % 2];
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
    const DeviceBand band = p_.queries[step(stage).stream].band[keys_.set];
    const int j = keys_.tile * Shape::kKeys + warp_row() + lane() / 4;
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
  // dp to the gradients of scores, but for the scale. A pair that is not visible has probability 0 and a
  // gradient of 0, whatever its dp.
  __device__ __forceinline__ void gradients(const float (&s)[kPairs], float (&dp)[kPairs], uint32_t stage,
                                            bool masked) const {
    if (masked) {
#pragma unroll
      for (int e = 0; e < kPairs; ++e) dp[e] = s[e] == 0 ? 0 : dp[e];
    }
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
    barrier_wait(base_ + Shape::kDqEmpty, (n & 1) ^ 1);
    auto* to = reinterpret_cast<float4*>(smem_ + Shape::kDq) + group() * (Shape::kGroupGradient / 4) +
               threadIdx.x % kWarpgroupThreads;
#pragma unroll
    for (int e = 0; e < 32; e += 4) to[e / 4 * kWarpgroupThreads] = {dq[e], dq[e + 1], dq[e + 2], dq[e + 3]};
    fence_async_shared();
    warp_arrive(base_ + Shape::kDqFull);
  }

  __device__ __forceinline__ void store(float (&dk)[kSums], const float (&dv)[kSums]) {
    const DeviceKeys& keys = p_.keys[keys_.set];
    const int j0 = keys_.tile * Shape::kKeys + warp_row(), rows = min(16, p_.length - j0);
    const int64_t first = int64_t(keys_.sequence) * p_.length + j0;
#pragma unroll
    for (int e = 0; e < kSums; ++e) dk[e] *= p_.scale;
    if (__any_sync(0xFFFFFFFF, not_finite(dk, rows) || not_finite(dv, rows))) {
      for (int j = j0; j < j0 + rows; ++j)
        row_of_dk<Shape::kHeadDim>(p_, keys_.set, keys_.sequence, keys_.head, j);
      return;
    }
    char* staging = smem_ + Shape::kQ + (int(threadIdx.x) / 32 - 4) * Staging<Shape::kHeadDim>::kBytes;
    const int column = keys_.head * Shape::kHeadDim;
    if (keys.dk.data)
      store_block<Shape::kHeadDim>(staging, dk, keys.dk, first, column, rows, Shape::kHeadDim,
                                   keys.accumulate);
    if (keys.dv.data)
      store_block<Shape::kHeadDim>(staging, dv, keys.dv, first, column, rows, Shape::kHeadDim,
                                   keys.accumulate);
  }

  const Problem& p_;
  char* smem_;
  uint32_t base_;
  KeyTile keys_;
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardMaps maps, const __grid_constant__ Problem p,
                    const __grid_constant__ BackwardWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  char* smem = memory + (1024 - smem_address(memory) % 1024) % 1024;
  int& ticket = *reinterpret_cast<int*>(smem + Shape::kTicket);
  if (threadIdx.x == 0) {
    const uint32_t base = smem_address(smem);
    barrier_init(base + Shape::kKvFull, 1);
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(base + Shape::kQFull + 8 * s, 1), barrier_init(base + Shape::kDoFull + 8 * s, 1);
      barrier_init(base + Shape::kQEmpty + 8 * s, Shape::kWarps);
      barrier_init(base + Shape::kDoEmpty + 8 * s, Shape::kWarps);
    }
    barrier_init(base + Shape::kDqFull, Shape::kWarps), barrier_init(base + Shape::kDqEmpty, 1);
    barrier_init_fence();
    ticket = atomicAdd(work.schedule.counter, 1);
  }
  __syncthreads();
  const KeyTile keys = find_keys(p, work, ticket);
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<Shape::kLoadRegisters>();
    if (threadIdx.x == 0) load_steps<Shape>(maps, p, work, smem, keys);
    if (threadIdx.x == 32) add_dq<Shape>(work, smem);
  } else {
    take_registers<Shape::kRegisters>();
    KeyOwner<Shape>(p, smem, keys).run();
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
  if (work.turns[tile] > 0) {
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
  store_block<64>(staging + warp * Staging<64>::kBytes, dq, p.queries[stream].dq,
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
  const int64_t counters = query_tiles + 1, starts = p.batch * p.statistics.padded;
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
  if (work.schedule.items > 0)
    backward_kernel<Shape>
        <<<unsigned(work.schedule.items), Shape::kThreads, Shape::kBytes, stream_of(ex)>>>(maps, p, work);
  SPS_LAUNCHED();
  if (query_tiles > 0) dq_kernel<Shape><<<unsigned(query_tiles), 256, 0, stream_of(ex)>>>(p, work);
  SPS_LAUNCHED();
}

}  // namespace

void backward_hopper(const Exec& ex, const Problem& p) {
  if (p.batch == 0 || p.length == 0) return;
  if (p.head_dim == 64) return launch_backward<BackwardShape<64, 128>>(ex, p);
  if (p.head_dim == 96) return launch_backward<BackwardShape<96, 64>>(ex, p);
  launch_backward<BackwardShape<128, 64>>(ex, p);
}

}  // namespace sps::ops::attention
