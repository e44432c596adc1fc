// Backward attention on Hopper, five matrix products for a pair of tiles. A block works through key tiles:
// 128 keys of one set and head, and one after the other the tiles of queries that see some of them, of every
// stream and of every query head that reads the head. Where both streams see about the same keys of the set,
// a tile of 128 queries is the same 64 positions of both: a narrow band then has fewer tiles. Two warpgroups
// own 64 keys each, with dk and dv in registers. Scores and probabilities are kept transposed, keys down, so
// that they are operands of the products for dk and dv as they come out. dq needs both warpgroups' gradients
// of scores; each of them multiplies its half of dq one step later, so that neither waits for the other and
// one's exponentials run beside the other's products.
//
// A block's part of dq is added in global memory, in f32: a thread of the block waits for its turn at the
// query tile and lets the copy engine add. Turns follow the order of the tickets that blocks take before each
// key tile, so every turn that is waited for belongs to a tile that is being worked on or done, and sums have
// the same bits every time. Key tiles come last to first: the next tile's block reaches a query tile one step
// later by itself.
#include "ops/attention/attention_hopper_backward.cuh"

#include <algorithm>

#include "ops/attention/attention_hopper.h"
#include "ops/attention/attention_hopper_rows.cuh"

namespace sps::ops::attention {

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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
    if (is_first()) dq_part(n).at = -1;
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
  __device__ __forceinline__ const Step& step(uint32_t n) const {
    return reinterpret_cast<const Step*>(smem_ + Shape::kSteps)[n % Shape::kQStages];
  }
  // Scores of step n.
  __device__ __forceinline__ void multiply_queries(float (&s)[kPairs], uint32_t n) {
    const Ring<Shape::kQStages> ring{n};
    barrier_wait(base_ + Shape::kQFull + 8 * ring.stage(), ring.parity());
    multiply_keys(s, Shape::kK, Shape::kQ + ring.stage() * Shape::kQueryTile);
  }
  // Where the thread that adds reads about step n. It has read about step n - 2 when dq of step n - 1 is
  // handed over.
  __device__ __forceinline__ Part& dq_part(uint32_t n) const {
    return reinterpret_cast<Part*>(smem_ + Shape::kDqSteps)[2 * group() + n % 2];
  }

  // All steps of a key tile, n is the number of the first; returns that of the next tile's.
  __device__ __forceinline__ uint32_t tile(uint32_t n) {
    float s[kPairs], dk[kSums], dv[kSums];
#pragma unroll
    for (int e = 0; e < kSums; ++e) dk[e] = dv[e] = 0;
    barrier_wait(base_ + Shape::kKvFull, tiles_.steps & 1);
    int left = keys().steps;
    if (left > 0) {
      multiply_queries(s, n);
      products_wait<0>();
      pin(s);
      bool first = true;
#pragma unroll 1
      for (; left > 0; --left, ++n, first = false) {
        const int groups = step(n).groups;
        const bool more = left > 1, masked = groups >> (2 + group()) & 1;
        if ((groups & 3) == 3)
          work<true, true>(s, dk, dv, n, first, more, masked);
        else if (groups >> group() & 1)
          work<true, false>(s, dk, dv, n, first, more, masked);
        else
          work<false, false>(s, dk, dv, n, first, more, masked);
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
  // Turns are for steps in which both groups have scores.
  template <bool kSeen, bool kTurns>
  __device__ __forceinline__ void work(float (&s)[kPairs], float (&dk)[kSums], float (&dv)[kSums], uint32_t n,
                                       bool first, bool more, bool masked) {
    const uint32_t stage = n % 2, parity = n / 2 % 2, q = n % Shape::kQStages;
    const int d_o = Shape::kDo + int(stage) * Shape::kQueryTile;
    uint32_t weights[kPairs / 2], slopes[kPairs / 2];
    barrier_wait(base_ + Shape::kDoFull + 8 * stage, parity);
    if constexpr (kSeen) {
      float dp[kPairs];
      multiply_keys(dp, Shape::kV, d_o);
      if (masked) mask(s, n);
      probabilities(s, q);
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
    if constexpr (kTurns) await_turn();
    if constexpr (kSeen) {
      if constexpr (!Shape::kEarly) add_queries(dv, weights, d_o);
      add_queries(dk, slopes, Shape::kQ + int(q) * Shape::kQueryTile);
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
    multiply_queries(s, n + (more ? 1 : 0));
    if constexpr (kTurns) pass_turn();
    products_wait<1>();
    pin(dk);
    pin(dq);
    if (!first) {
      warp_arrive(base_ + Shape::kScoresEmpty + 8 * (1 - stage));
      hand_over(dq, n - 1);
    }
    if (is_first()) dq_part(n) = step(n).part[group()];
    products_wait<0>();
    pin(s);
    warp_arrive(base_ + Shape::kQEmpty + 8 * q);
  }

  // Keys (of the tile at `rows`) times queries.
  __device__ __forceinline__ void multiply_keys(float (&d)[kPairs], int rows, int queries) {
    products_begin();
    // Made anew in every step: as values kept from step to step its parts go to local memory.
    const uint32_t own = in_place(base_ + rows + group() * 64 * kChunkRowBytes);
    multiply_rows<Shape::kHeadDim, Shape::kQueries, Shape::kKeyChunk, Shape::kQueryChunk>(d, own,
                                                                                          base_ + queries);
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

  // What a stage of `part` holds of a thread's queries 8 n and 8 n + 1 from its first.
  template <class Pair>
  __device__ __forceinline__ Pair of_queries(int part, uint32_t stage, int n) const {
    return *reinterpret_cast<const Pair*>(smem_ + part + stage * Shape::kRowBytes +
                                          4 * (8 * n + 2 * (lane() % 4)));
  }

  // Scores of pairs that are not visible become -inf.
  __device__ __forceinline__ void mask(float (&s)[kPairs], uint32_t n) const {
    const int j = keys().tile * Shape::kKeys + warp_row() + lane() / 4;
#pragma unroll
    for (int part = 0; part < Shape::kParts; ++part) {
      const Part& queries = step(n).part[part];
      const DeviceBand band = p_.queries[queries.stream].band[keys().set];
      const int i = queries.i0 + 2 * (lane() % 4);
#pragma unroll
      for (int e = 0; e < 32; e += 4) {
        const int at = 32 * part + e;
        const int2 start = of_queries<int2>(Shape::kStarts, n % Shape::kQStages, at / 4);
        const Interval a = visible_keys(band, i + 2 * e, start.x),
                       b = visible_keys(band, i + 2 * e + 1, start.y);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (j + 8 * r < a.begin || j + 8 * r >= a.end) s[at + 2 * r] = -INFINITY;
          if (j + 8 * r < b.begin || j + 8 * r >= b.end) s[at + 2 * r + 1] = -INFINITY;
        }
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
    const uint32_t at = base_ + Shape::kScores + buffer * Shape::kScoreTile + row * kChunkRowBytes +
                        (lane() / 16 ^ row % 8) * 16;
#pragma unroll
    for (int k = 0; k < Shape::kQueries / 16; ++k)
      store_blocks((at ^ k % 4 * 32) + k / 4 * Shape::kKeyChunk, slopes + 4 * k);
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
    barrier_init(base + Shape::kKvFull, 1),
        barrier_init(base + Shape::kKvEmpty, kWarpArrivals * Shape::kWarps);
    for (int s = 0; s < 2; ++s) {
      barrier_init(base + Shape::kTileFull + 8 * s, 1);
      barrier_init(base + Shape::kTileEmpty + 8 * s, kWarpArrivals * Shape::kWarps + 1);
      barrier_init(base + Shape::kScoresFull + 8 * s, kWarpArrivals * Shape::kWarps);
      barrier_init(base + Shape::kScoresEmpty + 8 * s, kWarpArrivals * Shape::kWarps);
      barrier_init(base + Shape::kDqFull + 8 * s, kWarpArrivals * Shape::kWarps / Shape::kGroups);
      barrier_init(base + Shape::kDqEmpty + 8 * s, 1);
    }
    for (int s = 0; s < Shape::kQStages; ++s) {
      barrier_init(base + Shape::kQFull + 8 * s, 1);
      barrier_init(base + Shape::kQEmpty + 8 * s, kWarpArrivals * Shape::kWarps);
    }
    for (int s = 0; s < Shape::kDoStages; ++s) {
      barrier_init(base + Shape::kDoFull + 8 * s, 1);
      barrier_init(base + Shape::kDoEmpty + 8 * s, kWarpArrivals * Shape::kWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<Shape::kLoadRegisters>();
    if (threadIdx.x < kWarp) load_steps<Shape>(maps, p, work, smem);
    if (threadIdx.x == 32) load_keys<Shape>(maps, smem);
    if (threadIdx.x == 64) add_dq<Shape>(work, smem, 0);
    if (threadIdx.x == 96) add_dq<Shape>(work, smem, 1);
  } else {
    take_registers<Shape::kRegisters>();
    KeyOwner<Shape>(p, smem).run();
  }
#endif
}

// No turns taken, no tickets; document starts where the copy engine can fetch them, and how many there are.
__global__ void __launch_bounds__(256)
    prepare_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardWork work,
                   int counters) {
  const int n = int(blockIdx.x * blockDim.x + threadIdx.x), padded = int(p.statistics.padded);
  if (n < counters) work.schedule.counter[n] = 0;
  if (n < p.batch * padded)
    work.starts[n] = n % padded < p.length ? p.document_start[n / padded * p.length + n % padded] : kNever;
  const int sequence = int(blockIdx.x);
  if (sequence >= p.batch) return;
  int documents = 0;
  for (int first = 0; first < p.length; first += 256) {
    const int i = first + int(threadIdx.x);
    documents += __syncthreads_count(i < p.length && p.document_start[int64_t(sequence) * p.length + i] == i);
  }
  if (threadIdx.x == 0) work.documents[sequence] = documents;
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
    maps.q[s] = tile_map(p, p.queries[s].q, p.heads, 64);
    maps.d_o[s] = tile_map(p, p.queries[s].d_o, p.heads, 64);
  }
  for (int s = 0; s < p.sets; ++s) {
    maps.k[s] = tile_map(p, p.keys[s].k, p.kv_heads, Shape::kKeys);
    maps.v[s] = tile_map(p, p.keys[s].v, p.kv_heads, Shape::kKeys);
  }
  BackwardWork work;
  work.query_tiles = (p.length + Shape::kQueries - 1) / Shape::kQueries;
  for (int s = 0; s < p.sets; ++s) work.order[s] = s, work.paired[s] = seen_alike(p, s);
  // The longest tiles first: while the last of those are under way, blocks that are through take the short
  // tiles of heads that were done long before.
  std::stable_sort(work.order, work.order + p.sets,
                   [&](int a, int b) { return work_of(p, a) > work_of(p, b); });
  using Sizes = HopperBackwardScratch;
  static_assert(Shape::kGroups == Sizes::kGroups && Shape::kQueryGradient == Sizes::kQueryGradient &&
                Shape::kQueries == Sizes::queries(Shape::kHeadDim));
  const Sizes sizes(p.batch, p.length, p.heads, p.streams, p.head_dim);
  const int64_t query_tiles = sizes.query_tiles, counters = sizes.counters, starts = sizes.starts;
  auto* scratch = reinterpret_cast<int32_t*>(device_scratch(ex, DeviceSlot::workspace, sizes.bytes()));
  work.turns = scratch + 1;
  work.starts = scratch + sizes.starts_at();
  work.documents = scratch + sizes.documents_at();
  work.dq = reinterpret_cast<float*>(scratch + sizes.dq_at());
  const int key_tiles = (p.length + Shape::kKeys - 1) / Shape::kKeys;
  // A position of a key head keeps in cache q, d_o and the sums of dq of all that read it, and k and v.
  work.row_bytes = int64_t{8} * p.head_dim * p.streams * p.group + int64_t{4} * p.head_dim * p.sets;
  work.schedule = make_schedule(p, key_tiles, 1, work.row_bytes, scratch);
  const auto blocks = unsigned(std::max<int64_t>((std::max(counters, starts) + 255) / 256, p.batch));
  prepare_kernel<<<blocks, 256, 0, stream_of(ex)>>>(p, work, int(counters));
  SPS_LAUNCHED();
  SPS_CUDA(cudaFuncSetAttribute(backward_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Shape::kBytes));
  const int blocks_of_work = std::min(p.sets * work.schedule.items, gpu_info().multiprocessors);
  if (blocks_of_work > 0)
    backward_kernel<Shape><<<blocks_of_work, Shape::kThreads, Shape::kBytes, stream_of(ex)>>>(maps, p, work);
  SPS_LAUNCHED();
  if (query_tiles > 0) dq_kernel<Shape><<<unsigned(query_tiles), 256, 0, stream_of(ex)>>>(p, work);
  SPS_LAUNCHED();
}

}  // namespace

void backward_hopper(const Exec& ex, const Problem& p) {
  if (p.batch == 0 || p.length == 0) return;
  if (p.head_dim == 64) return launch_backward<BackwardShape<64, 128, 2, true, false>>(ex, p);
  if (p.head_dim == 96) return launch_backward<BackwardShape<96, 64, 2, true, true>>(ex, p);
  launch_backward<BackwardShape<128, 64, 3, false, false>>(ex, p);
}

}  // namespace sps::ops::attention
