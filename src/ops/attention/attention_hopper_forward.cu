// Forward attention on Hopper. A block works through query tiles, heaviest first. One thread of it feeds
// rings of key and value tiles through the copy engine; each of the other warpgroups owns 64 queries of the
// tile and keeps their scores, probabilities and sums in registers. Where both streams see about the same
// keys, a tile is the same 64 positions of both.
//
// Keys go by 128: the scores of the next 128 are multiplied out while the values of the last are added, and
// one warpgroup's exponentials run beside another's products. Tiles at the edge of a band or a document are
// masked, where the warpgroup's own queries do not see all of them.
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
  static constexpr int kQueries = 64 * kWarpgroups, kKeys = kTileKeys;
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

// What the kernel needs besides the problem.
struct ForwardWork {
  HopperSchedule schedule;
  bool paired = false;  // a query tile is of both streams
};

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One query tile of one head: 64 queries for each warpgroup.
struct Item {
  int sequence, head, stream;
  int i0, i1;   // all its queries
  bool paired;  // of both streams, else of one

  // A warpgroup's stream and first query.
  __device__ __forceinline__ int stream_of(int group) const { return paired ? group : stream; }
  __device__ __forceinline__ int first(int group) const { return paired ? i0 : i0 + 64 * group; }
};
template <class Shape>
__device__ __forceinline__ Item find_item(const Problem& p, const ForwardWork& work, int number) {
  const auto [tile, at] = work.schedule.find(number);
  int head = at;
  Item item;
  const int in_group = head % p.group;
  head /= p.group;
  item.paired = work.paired;
  const int streams = work.paired ? 1 : p.streams;
  item.stream = head % streams;
  head /= streams;
  item.head = head % p.kv_heads * p.group + in_group;
  item.sequence = head / p.kv_heads;
  const int queries = work.paired ? Shape::kQueries / 2 : Shape::kQueries;
  item.i0 = tile * queries;
  item.i1 = min(item.i0 + queries, p.length) - 1;
  return item;
}
__device__ __forceinline__ TileWalk walk_of(const Problem& p, const Item& item) {
  const int32_t* starts = p.document_start + int64_t(item.sequence) * p.length;
  return TileWalk(p, QueryRange(starts, item.i0, item.i1), item.stream_of(0), item.stream_of(1));
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
__device__ __forceinline__ void produce(const ForwardMaps& maps, const Problem& p, const ForwardWork& work,
                                        char* smem) {
  const uint32_t base = smem_address(smem);
  Ring<Shape::kStages> ring;
  Ring<2> items;
  for (int number = blockIdx.x;; ++items.steps) {
    barrier_wait(base + Shape::kItemEmpty + 8 * items.stage(), items.parity() ^ 1);
    reinterpret_cast<int*>(smem + Shape::kItem)[items.stage()] = number;
    barrier_arrive(base + Shape::kItemFull + 8 * items.stage());
    if (number >= work.schedule.items) break;
    const int next = gridDim.x + atomicAdd(work.schedule.counter, 1);
    const Item item = find_item<Shape>(p, work, number);
    barrier_wait(base + Shape::kQEmpty, (items.steps & 1) ^ 1);
    barrier_expect(base + Shape::kQFull, Shape::kQueryTile);
#pragma unroll
    for (int group = 0; group < Shape::kWarpgroups; ++group)
      load_tile<Shape::kHeadDim, 64, Shape::kQueries>(base + Shape::kQ + group * 64 * kChunkRowBytes,
                                                      &maps.q[item.stream_of(group)], base + Shape::kQFull,
                                                      item.head, item.first(group), item.sequence);
#pragma unroll 1
    for (TileWalk walk = walk_of(p, item); walk.more(); walk.next(), ++ring.steps) {
      const uint32_t stage = ring.stage(), parity = ring.parity() ^ 1;
      barrier_wait(base + Shape::kKEmpty + 8 * stage, parity);
      barrier_expect(base + Shape::kKFull + 8 * stage, Shape::kKeyTile);
      load_tile<Shape::kHeadDim, Shape::kKeys>(base + Shape::kK + stage * Shape::kKeyTile,
                                               &maps.k[walk.set()], base + Shape::kKFull + 8 * stage,
                                               item.head / p.group, walk.key(), item.sequence);
      barrier_wait(base + Shape::kVEmpty + 8 * stage, parity);
      barrier_expect(base + Shape::kVFull + 8 * stage, Shape::kKeyTile);
      load_tile<Shape::kHeadDim, Shape::kKeys>(base + Shape::kV + stage * Shape::kKeyTile,
                                               &maps.v[walk.set()], base + Shape::kVFull + 8 * stage,
                                               item.head / p.group, walk.key(), item.sequence);
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

  __device__ __forceinline__ void run(const ForwardWork& work) {
    Ring<2> items;
    if (group() == Shape::kWarpgroups - 1) pass_turn();
    for (;; ++items.steps) {
      barrier_wait(base_ + Shape::kItemFull + 8 * items.stage(), items.parity());
      const int number = reinterpret_cast<const int*>(smem_ + Shape::kItem)[items.stage()];
      warp_arrive(base_ + Shape::kItemEmpty + 8 * items.stage());
      if (number >= work.schedule.items) break;
      const Item item = find_item<Shape>(p_, work, number);
      softmax_ = Softmax();
#pragma unroll
      for (int e = 0; e < kOut; ++e) o_[e] = 0;
      barrier_wait(base_ + Shape::kQFull, items.steps & 1);
      attend(item);
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

  // Scores of the stage's keys; the product is under way when it returns.
  __device__ __forceinline__ void multiply_scores(float (&s)[Shape::kKeys / 2]) {
    products_begin();
    multiply_rows<Shape::kHeadDim, Shape::kKeys, Shape::kQueryChunk, Shape::kKeyChunk>(
        s, base_ + Shape::kQ + group() * 64 * kChunkRowBytes,
        base_ + Shape::kK + ring_.stage() * Shape::kKeyTile);
    products_commit();
  }
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[Shape::kKeys / 4]) {
    products_begin();
    add_columns<Shape::kKeys, Shape::kHeadDim, Shape::kKeyChunk>(
        o_, weights, base_ + Shape::kV + ring_.stage() * Shape::kKeyTile);
    products_commit();
  }

  // All tiles of keys that the item's queries see.
  __device__ __forceinline__ void attend(const Item& item) {
    TileWalk walk = walk_of(p_, item);
    if (!walk.more()) return warp_arrive(base_ + Shape::kQEmpty);
    const int32_t* starts = p_.document_start + int64_t(item.sequence) * p_.length;
    const int first = item.first(group()), last = min(first + 64, p_.length) - 1;
    const QueryRange own(starts, min(first, p_.length - 1), max(last, 0));
    const DeviceQueries& queries = p_.queries[item.stream_of(group())];
    float s[Shape::kKeys / 2], keep[2];
    uint32_t weights[Shape::kKeys / 4];
    const auto mask_tile = [&] {
      mask(s, walk.key(), first, queries.band[walk.set()], last - first + 1, starts + first);
    };
    barrier_wait(k_full(), ring_.parity());
    await_turn();
    multiply_scores(s);
    pass_turn();
    products_wait<0>();
    pin(s);
    warp_arrive(k_empty());
    if (walk.whole(own.keys(queries.band[walk.set()]).all) == 0) mask_tile();
    softmax_.step(s, keep, p_.scale_log2);
    pack_operand(s, weights);
    walk.next();
#pragma unroll 1
    while (walk.more()) {
      const int whole = walk.whole(own.keys(queries.band[walk.set()]).all);
      if (whole == 0) step(s, weights, mask_tile);
#pragma unroll 1
      for (int n = 0; n < whole; ++n) step(s, weights, [] {});
      walk.next(max(whole, 1));
    }
    warp_arrive(base_ + Shape::kQEmpty);
    barrier_wait(v_full(), ring_.parity());
    add_values(weights);
    products_wait<0>();
    pin(o_);
    warp_arrive(v_empty());
    ++ring_.steps;
  }

  // One tile of keys, behind one whose weights are there and whose values are still to be added.
  template <class Mask>
  __device__ __forceinline__ void step(float (&s)[Shape::kKeys / 2], uint32_t (&weights)[Shape::kKeys / 4],
                                       Mask&& mask_tile) {
    float keep[2];
    ++ring_.steps;
    barrier_wait(k_full(), ring_.parity());
    await_turn();
    multiply_scores(s);
    --ring_.steps;
    barrier_wait(v_full(), ring_.parity());
    add_values(weights);
    pass_turn();
    ++ring_.steps;
    products_wait<1>();
    pin(s);
    warp_arrive(k_empty());
    mask_tile();
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

  // Scores of keys that a row does not see become -inf.
  __device__ __forceinline__ void mask(float (&s)[Shape::kKeys / 2], int j0, int first, DeviceBand band,
                                       int queries, const int32_t* starts) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row() - 64 * group() + lane() / 4 + 8 * r;
      Interval keys{0, 0};
      if (row < queries) keys = visible_keys(band, first + row, starts[row]);
      const int from = keys.begin - j0 - 2 * (lane() % 4);  // in columns of the thread's first
      const unsigned count = max(keys.end - keys.begin, 0);
#pragma unroll
      for (int e = 0; e < Shape::kKeys / 2; e += 4) {
        if (unsigned(2 * e - from) >= count) s[e + 2 * r] = -INFINITY;
        if (unsigned(2 * e + 1 - from) >= count) s[e + 2 * r + 1] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ void store(const Item& item) {
    const int stream = item.stream_of(group());
    const DeviceQueries& queries = p_.queries[stream];
    const int i0 = item.first(group()) + warp_row() - 64 * group(), rows = min(16, p_.length - i0);
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
        row_of_o<Shape::kHeadDim>(p_, stream, item.sequence, item.head, i, walk_of(p_, item));
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
                   const __grid_constant__ ForwardWork work) {
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
    if (threadIdx.x == 0) produce<Shape>(maps, p, work, smem);
  } else {
    take_registers<Shape::kRegisters>();
    Consumer<Shape>(p, smem).run(work);
  }
#endif
}

template <class Shape>
void launch(const Exec& ex, const Problem& p) {
  ForwardMaps maps{};
  for (int s = 0; s < p.streams; ++s) maps.q[s] = tile_map(p, p.queries[s].q, p.heads, 64);
  for (int s = 0; s < p.sets; ++s) {
    maps.k[s] = tile_map(p, p.keys[s].k, p.kv_heads, Shape::kKeys);
    maps.v[s] = tile_map(p, p.keys[s].v, p.kv_heads, Shape::kKeys);
  }
  auto* counter = reinterpret_cast<int32_t*>(device_scratch(ex, DeviceSlot::workspace, sizeof(int32_t)));
  SPS_CUDA(cudaMemsetAsync(counter, 0, sizeof(int32_t), stream_of(ex)));
  ForwardWork work;
  work.paired = p.streams == 2;
  for (int set = 0; set < p.sets; ++set) work.paired = work.paired && seen_alike(p, set);
  const int queries = work.paired ? Shape::kQueries / 2 : Shape::kQueries,
            streams = work.paired ? 1 : p.streams;
  work.schedule = make_schedule(p, (p.length + queries - 1) / queries, streams * p.group,
                                int64_t{4} * p.sets * p.head_dim, counter);
  SPS_CUDA(cudaFuncSetAttribute(forward_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Shape::kBytes));
  const int blocks = std::min(work.schedule.items, gpu_info().multiprocessors);
  forward_kernel<Shape><<<blocks, Shape::kThreads, Shape::kBytes, stream_of(ex)>>>(maps, p, work);
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
