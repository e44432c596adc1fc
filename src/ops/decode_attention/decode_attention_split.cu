// Runs of one position: what is read is the keys, once for the queries of both streams and of all heads of a
// group. A text's chunks are spread over blocks, as many as keep the GPU full; the last block of a text and
// head to be done joins what the chunks gave, in order.
//
// Within a chunk a warp makes the scores of 32 keys, and then the sums of every fourth 16 columns over all
// keys; keys and values of the next chunk arrive meanwhile.
#include <algorithm>

#include "ops/decode_attention/decode_attention_tiles.cuh"

namespace sps::ops::decode {

namespace {

constexpr int kWarpTiles = kKeyTiles / kWarps;

template <int D>
struct SplitShared {
  ChunkTiles<D> tiles;
  uint2 weights[kKeyTiles][32];
  float top[kWarps][kQueryTile];
  Interval seen[kMaxKeySets][kQueryTile];
  SetKeys sets[kMaxKeySets];
  bool last;
};

// What chunks left for a tile of queries, one after the other: the state of every query, then its sums.
struct Partials {
  float* data;
  unsigned* done;  // by tile: blocks that have ended, 0 between kernels
  int queries;     // room for so many

  static int64_t floats(int64_t queries, int64_t head_dim) { return queries * (2 + head_dim); }
  __device__ float* of(const Problem& p, int tile, int item) const {
    return data + (int64_t(tile) * p.most_items + item) * queries * (2 + p.head_dim);
  }
};

// All queries of the tile by all threads: joins the chunks and writes the rows.
template <int D>
__device__ void join_chunks(const Problem& p, const SplitShared<D>& shared, const Partials& partials,
                            int tile, int items, int run, int key_head, int first, int live) {
  constexpr int kAhead = 8;
  for (int e = int(threadIdx.x); e < live * p.head_dim; e += kThreads) {
    const int n = e / p.head_dim, d = e % p.head_dim;
    Softmax state;
    float total = 0;
    for (int from = 0; from < items; from += kAhead) {
      float2 fresh[kAhead];
      float sum[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const float* part = partials.of(p, tile, min(from + i, items - 1));
        fresh[i] = __ldcg(reinterpret_cast<const float2*>(part) + n);
        sum[i] = __ldcg(part + 2 * partials.queries + e);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (from + i >= items) break;
        const Item item = item_of(shared.sets, from + i);
        if (!shared.seen[item.set][n].touches(item.chunk * kChunk, kChunk)) continue;
        total = join(state, {fresh[i].x, fresh[i].y}).join(total, sum[i]);
      }
    }
    Query(p, run, key_head, first + n).template o<bf16>(p)[d] =
        from_float<bf16>(__fmul_rn(total, share_of(state.sum)));
  }
}

// As many blocks beside each other as shared memory holds.
template <int D>
__global__ void __launch_bounds__(kThreads, D == 64   ? 6
                                            : D == 96 ? 4
                                                      : 3)
    split_kernel(const __grid_constant__ Problem p, const __grid_constant__ Partials partials, int tiles) {
  let_next_start();
  extern __shared__ __align__(128) char memory[];
  SplitShared<D>& shared = *reinterpret_cast<SplitShared<D>*>(memory);
  const int tile = int(blockIdx.x), key_head = tile / tiles % p.kv_heads, run = tile / tiles / p.kv_heads,
            first = tile % tiles * kQueryTile, me = int(threadIdx.x), warp = me / 32, lane = me % 32;
  // Lists are older than the first kernel of the step, and so are the rows of the cache: both may be read
  // before the kernel before this one has ended.
  const int live = longest_of(p, run) > 1 ? 0 : min(queries_of(p, run) - first, kQueryTile);
  if (live <= 0) return wait_for_previous();

  if (me < kMaxKeySets) shared.sets[me].clear();
  __syncthreads();
  if (me < kQueryTile * kMaxKeySets) {
    const int n = me % kQueryTile, set = me / kQueryTile;
    const Interval seen = Query(p, run, key_head, n < live ? first + n : INT_MAX).keys(p, run, set);
    shared.seen[set][n] = seen;
    if (n < live) shared.sets[set].add_atomically(seen);
  }
  __syncthreads();
  const int items = items_of(shared.sets), working = max(1, min(items, int(gridDim.y)));
  int n = int(blockIdx.y);
  if (n >= working) return wait_for_previous();

  // What is copied is counted in groups: keys, values, and the rows of this step in the first chunk.
  Item item = item_of(shared.sets, n);
  bool fresh = false;
  if (n < items) {
    const SetKeys& keys = shared.sets[item.set];
    fresh = keys.within(item.chunk).end > p.stream[p.set[item.set].stream].begin[run];
    find_key(p, keys, item, run, key_head, shared.tiles.where[0]);
  }
  __syncthreads();
  const auto copy = [&](bool values, From from, Item which, const int* where) {
    if (values)
      copy_chunk<D>(values_of<uint16_t>(p, which.set, key_head), where, from, shared.tiles.v);
    else
      copy_chunk<D>(keys_of<uint16_t>(p, which.set, key_head), where, from, shared.tiles.k);
    attention::copy_async_close();
  };
  if (n < items) {
    copy(false, From::cache, item, shared.tiles.where[0]);
    copy(true, From::cache, item, shared.tiles.where[0]);
  }
  wait_for_previous();
  if (fresh) {
    copy_chunk<D>(keys_of<uint16_t>(p, item.set, key_head), shared.tiles.where[0], From::step,
                  shared.tiles.k);
    copy_chunk<D>(values_of<uint16_t>(p, item.set, key_head), shared.tiles.where[0], From::step,
                  shared.tiles.v);
  }
  attention::copy_async_close();
  uint32_t q[1][D / 16][2];
  {
    const bool there = lane / 4 < live;
    const Query query(p, run, key_head, first + (there ? lane / 4 : 0));
    load_query<D>(query.q<uint16_t>(p), there, p.head_dim, q[0]);
  }

  for (int turn = 0; n < items; turn ^= 1) {
    const int next = n + int(gridDim.y), first_key = item.chunk * kChunk;
    const int* where = shared.tiles.where[turn];
    const Item following = item_of(shared.sets, next);
    if (next < items)
      find_key(p, shared.sets[following.set], following, run, key_head, shared.tiles.where[turn ^ 1]);
    fresh ? attention::copy_async_wait_but<0>() : attention::copy_async_wait_but<2>();
    __syncthreads();  // keys are there
    float s[kWarpTiles][1][4], top[1][2];
    const int own = warp * kWarpTiles * 16;
    dot_products<D>(shared.tiles.k, own, q, s);
    const Interval seen[1][2] = {
        {shared.seen[item.set][2 * (lane & 3)], shared.seen[item.set][2 * (lane & 3) + 1]}};
    mask_and_scale(s, p.scale_log2, seen, first_key + own);
    tops_of(s, top);
    if (lane < 4) shared.top[warp][2 * lane] = top[0][0], shared.top[warp][2 * lane + 1] = top[0][1];
    __syncthreads();  // keys have been read, the warps' tops are there
    if (next < items)
      copy(false, From::both, following, shared.tiles.where[turn ^ 1]);
    else
      attention::copy_async_close();
    float base[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top[0][e] = fmaxf(top[0][e], shared.top[w][2 * (lane & 3) + e]);
      base[e] = base_of(top[0][e]);
    }
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m) {
      uint32_t w[2];
      weights_of(s[m][0], base, w);
      shared.weights[warp * kWarpTiles + m][lane] = make_uint2(w[0], w[1]);
    }
    attention::copy_async_wait_but<2>();
    const bool mixed = shared.sets[item.set].mixed(item.chunk);
    const bool dirty =
        attention::barrier_or(mixed, mixed && attention::has_nonfinite<D, kChunk>(shared.tiles.v));
    if (dirty) {
      attention::clean_tile<D, kChunk>(shared.tiles.v);
      __syncthreads();
    }
    uint32_t w[kKeyTiles][1][2];
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
      const uint2 both = shared.weights[k][lane];
      w[k][0][0] = both.x, w[k][0][1] = both.y;
    }
    float* const part = partials.of(p, tile, n);
    if (warp == 0) {
      float sum[1][4];
      sums_of_weights(w, sum);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (lane < 4 && 2 * lane + e < partials.queries)
          *reinterpret_cast<float2*>(part + 2 * (2 * lane + e)) = make_float2(top[0][e], sum[0][e]);
    }
    const auto at_v = MatrixAddress<D>::b(shared.tiles.v);
    float* const sums = part + 2 * partials.queries;
#pragma unroll
    for (int block = warp; block < D / 16; block += kWarps) {
      float sum[1][4];
      weighted_values<D>(at_v, block, w, sum);
      if (dirty) add_nonfinite(values_of<bf16>(p, item.set, key_head), where, block, first_key, seen, sum);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int query = 2 * (lane & 3) + i % 2, d = 16 * block + 8 * (i / 2) + lane / 4;
        if (query < live && d < p.head_dim) sums[query * p.head_dim + d] = sum[0][i];
      }
    }
    __syncthreads();  // values have been read
    if (next < items)
      copy(true, From::both, following, shared.tiles.where[turn ^ 1]);
    else
      attention::copy_async_close();
    attention::copy_async_close();
    n = next, item = following, fresh = false;
  }

  __threadfence();
  __syncthreads();
  if (me == 0) shared.last = atomicInc(&partials.done[tile], unsigned(working) - 1) == unsigned(working) - 1;
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  join_chunks(p, shared, partials, tile, items, run, key_head, first, live);
}

template <int D>
void launch(const Exec& ex, const Problem& p) {
  const int of_position = p.streams * p.group, tiles = (of_position + kQueryTile - 1) / kQueryTile;
  const int64_t all = int64_t{p.runs} * p.kv_heads * tiles;
  Partials partials{};
  partials.queries = std::min(of_position, kQueryTile);
  // States are read as pairs, so that a part's size is even.
  const int64_t floats = all * p.most_items * Partials::floats(partials.queries, p.head_dim);
  partials.data =
      reinterpret_cast<float*>(device_scratch(ex, DeviceSlot::partial, size_t(floats) * sizeof(float)));
  partials.done =
      reinterpret_cast<unsigned*>(device_scratch(ex, DeviceSlot::counters, size_t(all) * sizeof(unsigned)));
  // Enough blocks to fill every multiprocessor twice; more would each have less than a chunk.
  const int64_t fill = ceil_div(int64_t{12} * gpu_info().multiprocessors, all);
  const auto spread = unsigned(std::clamp<int64_t>(fill, 1, std::min(p.most_items, 65535)));
  SPS_CHECK(all < INT32_MAX);
  launch_behind(ex, {dim3(unsigned(all), spread), dim3(kThreads), sizeof(SplitShared<D>)}, split_kernel<D>, p,
                partials, tiles);
}

}  // namespace

void attend_split(const Exec& ex, const Problem& p) {
  if (p.head_dim <= 64) return launch<64>(ex, p);
  if (p.head_dim <= 96) return launch<96>(ex, p);
  launch<128>(ex, p);
}

}  // namespace sps::ops::decode
