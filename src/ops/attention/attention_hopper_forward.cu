// Forward attention on Hopper. A block works through query tiles, heaviest first. One thread of it feeds
// rings of key and value tiles through the copy engine; each of the other warpgroups owns 64 queries of the
// tile and keeps their scores, probabilities and sums in registers.
//
// Keys that every query of the tile sees go by 128 without any mask: the scores of the next 128 are
// multiplied out while the values of the last are added, and one warpgroup's exponentials run beside
// another's products. Tiles at the edge of a band or a document go by 64, masked, and only where the
// warpgroup's own queries see some.
#include <algorithm>

#include "ops/attention/attention_hopper.cuh"
#include "ops/attention/attention_hopper.h"
#include "ops/attention/attention_hopper_host.h"
#include "ops/attention/attention_hopper_rows.cuh"
#include "ops/attention/attention_hopper_tiles.cuh"

namespace sps::ops::attention {

using namespace hopper;

struct ForwardMaps {
  CUtensorMap q[kMaxQueryStreams], k[kMaxKeySets], v[kMaxKeySets];
};

// Shared memory of a block, and the bytes from its start to each part.
template <int kHeadDim_, int kStages_>
struct ForwardShape {
  static constexpr int kHeadDim = kHeadDim_, kWarpgroups = 2, kStages = kStages_;
  // Registers of a thread that loads and of one that computes. Together they are what the block starts with.
  static constexpr int kLoadRegisters = 40, kRegisters = 232;
  static constexpr int kQueries = 64 * kWarpgroups, kKeys = kTileKeys, kHalf = 64;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kWarps = 4 * kWarpgroups;  // that compute
  static constexpr int kChunks = (kHeadDim + kChunkColumns - 1) / kChunkColumns;
  static constexpr int kQueryChunk = kQueries * kChunkRowBytes, kKeyChunk = kKeys * kChunkRowBytes;
  static constexpr int kQueryTile = kChunks * kQueryChunk, kKeyTile = kChunks * kKeyChunk;
  static constexpr int kOutWarp = Staging<kHeadDim>::kBytes;

  static constexpr int kQ = 0, kK = kQueryTile, kV = kK + kStages * kKeyTile, kOut = kV + kStages * kKeyTile;
  static constexpr int kQFull = kOut + kWarps * kOutWarp, kQEmpty = kQFull + 8;
  static constexpr int kItemFull = kQEmpty + 8, kItemEmpty = kItemFull + 16;
  static constexpr int kKFull = kItemEmpty + 16, kKEmpty = kKFull + 8 * kStages;
  static constexpr int kVFull = kKEmpty + 8 * kStages, kVEmpty = kVFull + 8 * kStages;
  static constexpr int kItem = kVEmpty + 8 * kStages, kEnd = kItem + 8;
  static constexpr int kBytes = kEnd + 1024;  // the start is moved to a multiple of 1024
};

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One query tile of one head.
struct Item {
  int stream, sequence, head, i0, i1;
};
template <class Shape>
__device__ __forceinline__ Item find_item(const Problem& p, const HopperSchedule& schedule, int number) {
  const auto [tile, at] = schedule.find(number);
  int head = at;
  Item item;
  const int in_group = head % p.group;
  head /= p.group;
  item.stream = head % p.streams;
  head /= p.streams;
  item.head = head % p.kv_heads * p.group + in_group;
  item.sequence = head / p.kv_heads;
  item.i0 = tile * Shape::kQueries;
  item.i1 = min(item.i0 + Shape::kQueries, p.length) - 1;
  return item;
}

// The running softmax of two rows of a thread: rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Softmax {
  float top[2] = {-INFINITY, -INFINITY};  // largest score so far
  float sum[2] = {0, 0};                  // of exponentials, over this thread's columns

  // Scores to exponentials; returns in `keep` what former sums are multiplied by.
  template <int kCount>
  __device__ __forceinline__ void step(float (&s)[kCount], float (&keep)[2], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = s[2 * r];
#pragma unroll
      for (int e = 0; e < kCount; e += 4) most = fmaxf(most, fmaxf(s[e + 2 * r], s[e + 2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 2));
      most = fmaxf(most, top[r]);
      // Differences of scores, since a largest score that stays must keep sums to the bit.
      const float known = most == -INFINITY ? 0 : most, base = known * scale_log2;
      keep[r] = exp2_fast((top[r] - known) * scale_log2);
      top[r] = most;
      sum[r] *= keep[r];
#pragma unroll
      for (int e = 0; e < kCount; e += 4) {
        s[e + 2 * r] = exp2_fast(s[e + 2 * r] * scale_log2 - base);
        s[e + 2 * r + 1] = exp2_fast(s[e + 2 * r + 1] * scale_log2 - base);
        sum[r] += s[e + 2 * r] + s[e + 2 * r + 1];
      }
    }
  }
};

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&o)[kCount], const float (&keep)[2]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) o[e] *= keep[e / 2 % 2];
}

template <class Shape>
__device__ __forceinline__ void produce(const ForwardMaps& maps, const Problem& p,
                                        const HopperSchedule& schedule, char* smem) {
  const uint32_t base = smem_address(smem);
  Ring<Shape::kStages> ring;
  Ring<2> items;
  for (int number = blockIdx.x;; ++items.steps) {
    barrier_wait(base + Shape::kItemEmpty + 8 * items.stage(), items.parity() ^ 1);
    reinterpret_cast<int*>(smem + Shape::kItem)[items.stage()] = number;
    barrier_arrive(base + Shape::kItemFull + 8 * items.stage());
    if (number >= schedule.items) break;
    const int next = gridDim.x + atomicAdd(schedule.counter, 1);
    const Item item = find_item<Shape>(p, schedule, number);
    barrier_wait(base + Shape::kQEmpty, (items.steps & 1) ^ 1);
    barrier_expect(base + Shape::kQFull, Shape::kQueryTile);
    load_tile<Shape::kHeadDim, Shape::kQueries>(base + Shape::kQ, &maps.q[item.stream], base + Shape::kQFull,
                                                item.head, item.i0, item.sequence);
    const int32_t* starts = p.document_start + int64_t(item.sequence) * p.length;
    const QueryRange queries(starts, item.i0, item.i1);
    for (int set = 0; set < p.sets; ++set) {
      const TileRange range = tile_range(p, p.queries[item.stream].band[set], queries);
#pragma unroll 1
      for (int tile = range.last - 1; tile >= range.first; --tile, ++ring.steps) {
        const uint32_t stage = ring.stage(), parity = ring.parity() ^ 1;
        barrier_wait(base + Shape::kKEmpty + 8 * stage, parity);
        barrier_expect(base + Shape::kKFull + 8 * stage, Shape::kKeyTile);
        load_tile<Shape::kHeadDim, Shape::kKeys>(base + Shape::kK + stage * Shape::kKeyTile, &maps.k[set],
                                                 base + Shape::kKFull + 8 * stage, item.head / p.group,
                                                 tile * Shape::kKeys, item.sequence);
        barrier_wait(base + Shape::kVEmpty + 8 * stage, parity);
        barrier_expect(base + Shape::kVFull + 8 * stage, Shape::kKeyTile);
        load_tile<Shape::kHeadDim, Shape::kKeys>(base + Shape::kV + stage * Shape::kKeyTile, &maps.v[set],
                                                 base + Shape::kVFull + 8 * stage, item.head / p.group,
                                                 tile * Shape::kKeys, item.sequence);
      }
    }
    number = next;
  }
}

// One warpgroup that computes.
template <class Shape>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Problem& p, char* smem)
      : p_(p), smem_(smem), base_(smem_address(smem)) {}

  __device__ __forceinline__ void run(const HopperSchedule& schedule) {
    Ring<2> items;
    if (group() == Shape::kWarpgroups - 1) pass_turn();
    for (;; ++items.steps) {
      barrier_wait(base_ + Shape::kItemFull + 8 * items.stage(), items.parity());
      const int number = reinterpret_cast<const int*>(smem_ + Shape::kItem)[items.stage()];
      warp_arrive(base_ + Shape::kItemEmpty + 8 * items.stage());
      if (number >= schedule.items) break;
      const Item item = find_item<Shape>(p_, schedule, number);
      const int32_t* starts = p_.document_start + int64_t(item.sequence) * p_.length;
      const int first = item.i0 + 64 * group(), last = min(first + 64, p_.length) - 1;
      softmax_ = Softmax();
#pragma unroll
      for (int e = 0; e < kOut; ++e) o_[e] = 0;
      barrier_wait(base_ + Shape::kQFull, items.steps & 1);
      for (int set = 0; set < p_.sets; ++set) {
        const DeviceBand band = p_.queries[item.stream].band[set];
        const TileRange range = tile_range(p_, band, QueryRange(starts, item.i0, item.i1));
        for (int tile = range.last - 1; tile >= range.all_last; --tile)
          edge_tile(tile, band, first, last, starts);
        inner_tiles(range.all_last - range.all_first);
        for (int tile = range.all_first - 1; tile >= range.first; --tile)
          edge_tile(tile, band, first, last, starts);
      }
      warp_arrive(base_ + Shape::kQEmpty);
      store(item);
    }
  }

 private:
  static constexpr int kOut = Shape::kHeadDim / 2;

  static __device__ __forceinline__ int group() {
    return int(threadIdx.x) / kWarpgroupThreads - 1;
  }
  static __device__ __forceinline__ int lane() {
    return int(threadIdx.x) % 32;
  }
  // First of the warp's 16 rows of the tile.
  static __device__ __forceinline__ int warp_row() {
    return 16 * (int(threadIdx.x) / 32 - 4);
  }

  // Warpgroups issue their products in turns, so that each one's exponentials run beside another's products.
  __device__ __forceinline__ void await_turn() {
    named_sync(1 + group(), 2 * kWarpgroupThreads);
  }
  __device__ __forceinline__ void pass_turn() {
    named_arrive(2 - group(), 2 * kWarpgroupThreads);
  }

  __device__ __forceinline__ uint32_t k_full() const {
    return base_ + Shape::kKFull + 8 * ring_.stage();
  }
  __device__ __forceinline__ uint32_t k_empty() const {
    return base_ + Shape::kKEmpty + 8 * ring_.stage();
  }
  __device__ __forceinline__ uint32_t v_full() const {
    return base_ + Shape::kVFull + 8 * ring_.stage();
  }
  __device__ __forceinline__ uint32_t v_empty() const {
    return base_ + Shape::kVEmpty + 8 * ring_.stage();
  }

  // Scores of kKeys keys from `row` of the stage; the product is under way when it returns.
  template <int kKeys>
  __device__ __forceinline__ void multiply_scores(float (&s)[kKeys / 2], int row) {
    products_begin();
    multiply_rows<Shape::kHeadDim, kKeys, Shape::kQueryChunk, Shape::kKeyChunk>(
        s, base_ + Shape::kQ + group() * 64 * kChunkRowBytes,
        base_ + Shape::kK + ring_.stage() * Shape::kKeyTile + row * kChunkRowBytes);
    products_commit();
  }
  template <int kKeys>
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[kKeys / 4], int row) {
    products_begin();
    add_columns<kKeys, Shape::kHeadDim, Shape::kKeyChunk>(
        o_, weights, base_ + Shape::kV + ring_.stage() * Shape::kKeyTile + row * kChunkRowBytes);
    products_commit();
  }

  __device__ __forceinline__ void inner_tiles(int count) {
    if (count <= 0) return;
    float s[Shape::kKeys / 2], keep[2];
    uint32_t weights[Shape::kKeys / 4];
    barrier_wait(k_full(), ring_.parity());
    await_turn();
    multiply_scores<Shape::kKeys>(s, 0);
    pass_turn();
    products_wait<0>();
    pin(s);
    warp_arrive(k_empty());
    softmax_.step(s, keep, p_.scale_log2);
    scale_rows(o_, keep);
    pack_operand(s, weights);
#pragma unroll 1
    for (int n = 1; n < count; ++n) {
      ++ring_.steps;
      barrier_wait(k_full(), ring_.parity());
      await_turn();
      multiply_scores<Shape::kKeys>(s, 0);
      --ring_.steps;
      barrier_wait(v_full(), ring_.parity());
      add_values<Shape::kKeys>(weights, 0);
      pass_turn();
      ++ring_.steps;
      products_wait<1>();
      pin(s);
      warp_arrive(k_empty());
      softmax_.step(s, keep, p_.scale_log2);
      pin(s);
      --ring_.steps;
      barrier_wait(v_full(),
                   ring_.parity());  // long complete; without it the compiler waits for o_ before the step
      products_wait<0>();
      pin(o_);
      warp_arrive(v_empty());
      ++ring_.steps;
      scale_rows(o_, keep);
      pack_operand(s, weights);
    }
    barrier_wait(v_full(), ring_.parity());
    add_values<Shape::kKeys>(weights, 0);
    products_wait<0>();
    pin(o_);
    warp_arrive(v_empty());
    ++ring_.steps;
  }

  // first .. last: the warpgroup's queries.
  __device__ __forceinline__ void edge_tile(int tile, DeviceBand band, int first, int last,
                                            const int32_t* starts) {
    barrier_wait(k_full(), ring_.parity());
    barrier_wait(v_full(), ring_.parity());
    TileKeys own{{0, 0}, {0, 0}};
    if (first <= last) own = QueryRange(starts, first, last).keys(band);
#pragma unroll 1
    for (int half = 1; half >= 0; --half) {
      const int j = tile * Shape::kKeys + half * Shape::kHalf;
      if (p_.skip_tiles && !own.any.touches(j, Shape::kHalf)) continue;
      float s[Shape::kHalf / 2], keep[2];
      uint32_t weights[Shape::kHalf / 4];
      multiply_scores<Shape::kHalf>(s, half * Shape::kHalf);
      products_wait<0>();
      pin(s);
      if (!own.all.covers(j, Shape::kHalf)) mask(s, j, first, band, last - first + 1, starts + first);
      softmax_.step(s, keep, p_.scale_log2);
      scale_rows(o_, keep);
      pack_operand(s, weights);
      add_values<Shape::kHalf>(weights, half * Shape::kHalf);
      products_wait<0>();
      pin(o_);
    }
    warp_arrive(k_empty());
    warp_arrive(v_empty());
    ++ring_.steps;
  }

  // Scores of keys that a row does not see become -inf.
  __device__ __forceinline__ void mask(float (&s)[Shape::kHalf / 2], int j0, int first, DeviceBand band,
                                       int queries, const int32_t* starts) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row() - 64 * group() + lane() / 4 + 8 * r;
      Interval keys{0, 0};
      if (row < queries) keys = visible_keys(band, first + row, starts[row]);
      const int from = keys.begin - j0 - 2 * (lane() % 4);  // in columns of the thread's first
      const unsigned count = max(keys.end - keys.begin, 0);
#pragma unroll
      for (int e = 0; e < Shape::kHalf / 2; e += 4) {
        if (unsigned(2 * e - from) >= count) s[e + 2 * r] = -INFINITY;
        if (unsigned(2 * e + 1 - from) >= count) s[e + 2 * r + 1] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void store(const Item& item) {
    const DeviceQueries& queries = p_.queries[item.stream];
    const int i0 = item.i0 + warp_row(), rows = min(16, p_.length - i0);
    const int64_t first = int64_t(item.sequence) * p_.length + i0;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane() / 4 + 8 * r;
      float sum = softmax_.sum[r];
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
      factor[r] = sum == 0 ? 0 : 1 / sum;
      if (lane() % 4 == 0 && row < rows)
        static_cast<float*>(queries.lse.data)[(first + row) * queries.lse.stride + item.head] =
            sum == 0 ? -INFINITY : (softmax_.top[r] * p_.scale_log2 + __log2f(sum)) * 0.693147181F;
    }
    scale_rows(o_, factor);
    store_block<Shape::kHeadDim, 0>(smem_ + Shape::kOut + (int(threadIdx.x) / 32 - 4) * Shape::kOutWarp, o_,
                                    queries.o, first, item.head * Shape::kHeadDim, rows, Shape::kHeadDim,
                                    false);
    if (__any_sync(0xFFFFFFFF, not_finite(o_, rows)))
      for (int i = i0; i < i0 + rows; ++i)
        row_of_o<Shape::kHeadDim>(p_, item.stream, item.sequence, item.head, i,
                                  QueryRange(p_.document_start + first - i0, item.i0, item.i1));
  }

  const Problem& p_;
  char* smem_;
  uint32_t base_;
  Ring<Shape::kStages> ring_;
  Softmax softmax_;
  float o_[kOut];
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardMaps maps, const __grid_constant__ Problem p,
                   const __grid_constant__ HopperSchedule schedule) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  char* smem = memory + (1024 - smem_address(memory) % 1024) % 1024;
  if (threadIdx.x == 0) {
    const uint32_t base = smem_address(smem);
    barrier_init(base + Shape::kQFull, 1), barrier_init(base + Shape::kQEmpty, kWarpArrivals * Shape::kWarps);
    for (int s = 0; s < 2; ++s) {
      barrier_init(base + Shape::kItemFull + 8 * s, 1);
      barrier_init(base + Shape::kItemEmpty + 8 * s, kWarpArrivals * Shape::kWarps);
    }
    for (int s = 0; s < Shape::kStages; ++s) {
      barrier_init(base + Shape::kKFull + 8 * s, 1);
      barrier_init(base + Shape::kVFull + 8 * s, 1);
      barrier_init(base + Shape::kKEmpty + 8 * s, kWarpArrivals * Shape::kWarps);
      barrier_init(base + Shape::kVEmpty + 8 * s, kWarpArrivals * Shape::kWarps);
    }
    barrier_init_fence();
    for (int s = 0; s < p.streams; ++s) prefetch_map(&maps.q[s]);
    for (int s = 0; s < p.sets; ++s) prefetch_map(&maps.k[s]), prefetch_map(&maps.v[s]);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroupThreads) {
    give_registers<Shape::kLoadRegisters>();
    if (threadIdx.x == 0) produce<Shape>(maps, p, schedule, smem);
  } else {
    take_registers<Shape::kRegisters>();
    Consumer<Shape>(p, smem).run(schedule);
  }
#endif
}

template <class Shape>
void launch(const Exec& ex, const Problem& p) {
  ForwardMaps maps{};
  for (int s = 0; s < p.streams; ++s) maps.q[s] = tile_map(p, p.queries[s].q, p.heads, Shape::kQueries);
  for (int s = 0; s < p.sets; ++s) {
    maps.k[s] = tile_map(p, p.keys[s].k, p.kv_heads, Shape::kKeys);
    maps.v[s] = tile_map(p, p.keys[s].v, p.kv_heads, Shape::kKeys);
  }
  auto* counter = reinterpret_cast<int32_t*>(device_scratch(ex, DeviceSlot::workspace, sizeof(int32_t)));
  SPS_CUDA(cudaMemsetAsync(counter, 0, sizeof(int32_t), stream_of(ex)));
  const HopperSchedule schedule =
      make_schedule(p, (p.length + Shape::kQueries - 1) / Shape::kQueries, p.streams * p.group,
                    int64_t{4} * p.sets * p.head_dim, counter);
  SPS_CUDA(cudaFuncSetAttribute(forward_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Shape::kBytes));
  const int blocks = std::min(schedule.items, gpu_info().multiprocessors);
  forward_kernel<Shape><<<blocks, Shape::kThreads, Shape::kBytes, stream_of(ex)>>>(maps, p, schedule);
  SPS_LAUNCHED();
}

}  // namespace

void forward_hopper(const Exec& ex, const Problem& p) {
  if (p.batch == 0 || p.length == 0 || p.streams == 0) return;
  if (p.head_dim == 64) return launch<ForwardShape<64, 4>>(ex, p);
  if (p.head_dim == 96) return launch<ForwardShape<96, 2>>(ex, p);
  launch<ForwardShape<128, 2>>(ex, p);
}

}  // namespace sps::ops::attention
