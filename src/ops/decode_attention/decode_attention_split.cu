// Runs of one position: what is read is the keys, once for the queries of both streams and of all heads of a
// group. A text's chunks are spread over blocks, as many as keep the GPU full; the last block of a text and
// head to be done joins what the chunks gave, in order.
//
// Within a chunk a warp makes the scores of 32 keys, and then the sums of every fourth 16 columns over all
// keys; keys and values of the next chunk arrive meanwhile.
#include <algorithm>

#include "ops/decode_attention/decode_attention_tiles.cuh"
#include "ops/rope/rope_units.cuh"

namespace sps::ops::decode {

namespace {

constexpr int kWarpTiles = kKeyTiles / kWarps;

template <int D>
struct SplitShared {
  ChunkTiles<D> tiles;
  // First the turned queries, then the weights of a chunk. Rows of queries are apart by a number of banks.
  static constexpr int kWeights = kKeyTiles * 32 * int(sizeof(uint2)),
                       kQueryRow = (D + 8) * int(sizeof(bf16));
  alignas(16) char exchange[kWeights > kQueryTile* kQueryRow ? kWeights : kQueryTile* kQueryRow];
  float top[kWarps][kQueryTile];
  Interval seen[kMaxKeySets][kQueryTile];
  SetKeys sets[kMaxKeySets];
  bool last;
  alignas(16) bf16 own[kMaxKeySets][D];  // this step's turned keys

  __device__ bf16* q(int n) { return reinterpret_cast<bf16*>(exchange + n * kQueryRow); }
  __device__ uint2& weights(int tile, int lane) {
    return reinterpret_cast<uint2*>(exchange)[tile * 32 + lane];
  }
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

// 8 numbers that an earlier kernel of the step has written.
__device__ inline void load_fresh(bool live, const bf16* from, float (&to)[kPiece]) {
  uint4 x = make_uint4(0, 0, 0, 0);
  if (live) x = __ldcg(reinterpret_cast<const uint4*>(from));
  const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    to[i] = __uint_as_float(i % 2 == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xFFFF0000U);
}

// The step's own key of a set: whether there is one in this run.
__device__ inline bool has_own(const Problem& p, int set, int run) {
  return p.set[set].k != nullptr && p.stream[p.set[set].stream].count[run] > 0;
}

// Turns the queries and this step's keys, eight lanes to a row, as rope.cu does.
template <int D>
__device__ void turn_rows(const Problem& p, SplitShared<D>& shared, int run, int key_head, int first,
                          int live) {
  constexpr int kLog = 3;
  static_assert(D <= (2 * kPiece << kLog) && (kQueryTile + kMaxKeySets) << kLog <= kThreads);
  const int vector = int(threadIdx.x) >> kLog, lane = int(threadIdx.x) & ((1 << kLog) - 1),
            set = vector - kQueryTile;
  const bf16* from = nullptr;
  bf16* to = nullptr;
  const float* gain = nullptr;
  int position = 0;
  if (vector < live) {
    const Query query(p, run, key_head, first + vector);
    from = query.q<bf16>(p), to = shared.q(vector), gain = p.stream[query.stream].gain;
    position = query.position;
  } else if (set >= 0 && set < kMaxKeySets && p.set[set].turned != nullptr && has_own(p, set, run)) {
    const DeviceStream& stream = p.stream[p.set[set].stream];
    from = keys_of<bf16>(p, set, key_head).row(~stream.row[run]), to = shared.own[set];
    gain = p.set[set].gain;
    position = stream.begin[run];
  }
  const Rotation& r = p.rotation;
  const rope::Unit<kPiece> unit({0, p.heads, p.head_dim, r.pairs, r.adjacent}, lane);
  const bool on = from != nullptr && lane < r.units, second = on && unit.second < p.head_dim;
  const rope::Turn<kPiece> turn(Rows<const float>{r.cos, r.cos_stride},
                                Rows<const float>{r.sin, r.sin_stride}, 1, position, unit, on);
  float v[2][kPiece];
  load_fresh(on, from + unit.first, v[0]);
  load_fresh(second, from + unit.second, v[1]);
  if (r.norm) {
    float gains[2][kPiece];
    rope::load_unit(gain, unit, p.head_dim, on, gains);
    rope::scale_unit(v, rope::norm_factor(v, kLog, p.head_dim, r.eps), gains);
  }
  r.adjacent ? turn.template apply<false>(v) : turn.template apply<true>(v);
  if (on) rope::store_unit(to, unit, p.head_dim, v);
}

// Puts this step's turned key into its row of a chunk, if it is in that.
template <int D>
__device__ void place_own(const Problem& p, SplitShared<D>& shared, Item item, int run) {
  const int me = int(threadIdx.x), position = p.stream[p.set[item.set].stream].begin[run];
  if (!shared.sets[item.set].within(item.chunk).has(position) || me >= D / 8) return;
  uint4 x = make_uint4(0, 0, 0, 0);
  if (8 * me < p.head_dim) x = *reinterpret_cast<const uint4*>(&shared.own[item.set][8 * me]);
  *reinterpret_cast<uint4*>(shared.tiles.k + attention::chunk_offset<D>(position % kChunk, me)) = x;
}

// Hands this step's keys on: turned to who reads them later in the step, and to their caches. By the last
// block, when everybody has read what they overwrite in a ring.
template <int D>
__device__ void hand_on_keys(const Problem& p, const SplitShared<D>& shared, int run, int key_head) {
  const int pieces = p.head_dim / 8;
  for (int i = int(threadIdx.x); i < kMaxKeySets * pieces; i += kThreads) {
    const int set = i / pieces, column = i % pieces * 8;
    if (!has_own(p, set, run)) continue;
    const DeviceKeys& keys = p.set[set];
    const DeviceStream& stream = p.stream[keys.stream];
    const int row = stream.row[run];
    const bf16* given = keys_of<bf16>(p, set, key_head).row(~row);
    const uint4 k = keys.turned != nullptr ? *reinterpret_cast<const uint4*>(&shared.own[set][column])
                                           : __ldcg(reinterpret_cast<const uint4*>(given + column));
    if (keys.turned != nullptr)
      *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.turned) + row * keys.turned_stride +
                                key_head * p.head_dim + column) = k;
    if (!keys.keep) continue;
    const int slot = p.slot[run];
    const int64_t at = int64_t(cache_row(keys, p.kv_heads, p.pages + int64_t(slot) * p.per_slot, slot,
                                         key_head, stream.begin[run])) *
                           p.head_dim +
                       column;
    const bf16* v = values_of<bf16>(p, set, key_head).row(~row) + column;
    *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.cache_k) + at) = k;
    *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.cache_v) + at) =
        __ldcg(reinterpret_cast<const uint4*>(v));
  }
}

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
template <int D, bool kTurns>
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
  // Where keys are turned and kept, the first block does so for a run that asks nothing, too.
  if (live <= 0 && !(kTurns && blockIdx.y == 0)) return wait_for_previous();

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
  const auto turned = [&](Item which) { return kTurns && p.set[which.set].turned != nullptr; };
  const auto copy = [&](bool values, From from, Item which, const int* where) {
    if (values)
      copy_chunk<D>(values_of<uint16_t>(p, which.set, key_head), where, from, shared.tiles.v);
    else
      copy_chunk<D>(keys_of<uint16_t>(p, which.set, key_head), where, turned(which) ? From::cache : from,
                    shared.tiles.k);
    copy_async_group();
  };
  if (n < items) {
    copy(false, From::cache, item, shared.tiles.where[0]);
    copy(true, From::cache, item, shared.tiles.where[0]);
  }
  wait_for_previous();
  if (fresh) {
    if (!turned(item))
      copy_chunk<D>(keys_of<uint16_t>(p, item.set, key_head), shared.tiles.where[0], From::step,
                    shared.tiles.k);
    copy_chunk<D>(values_of<uint16_t>(p, item.set, key_head), shared.tiles.where[0], From::step,
                  shared.tiles.v);
  }
  copy_async_group();
  if constexpr (kTurns) {
    turn_rows(p, shared, run, key_head, first, live);
    __syncthreads();
    if (fresh && turned(item)) place_own(p, shared, item, run);
  }
  uint32_t q[1][D / 16][2];
  {
    const bool there = lane / 4 < live;
    const Query query(p, run, key_head, first + (there ? lane / 4 : 0));
    if constexpr (kTurns)
      load_query<D, false>(shared.q(lane / 4), there, p.head_dim, q[0]);
    else
      load_query<D, true>(query.q<bf16>(p), there, p.head_dim, q[0]);
  }

  for (int turn = 0; n < items; turn ^= 1) {
    const int next = n + int(gridDim.y), first_key = item.chunk * kChunk;
    const int* where = shared.tiles.where[turn];
    const Item following = item_of(shared.sets, next);
    if (next < items)
      find_key(p, shared.sets[following.set], following, run, key_head, shared.tiles.where[turn ^ 1]);
    fresh ? copy_async_wait_groups<0>() : copy_async_wait_groups<2>();
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
    if (next < items) {
      copy(false, From::both, following, shared.tiles.where[turn ^ 1]);
      if (turned(following)) place_own(p, shared, following, run);
    } else {
      copy_async_group();
    }
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
      shared.weights(warp * kWarpTiles + m, lane) = make_uint2(w[0], w[1]);
    }
    copy_async_wait_groups<2>();
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
      const uint2 both = shared.weights(k, lane);
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
      copy_async_group();
    copy_async_group();
    n = next, item = following, fresh = false;
  }

  __threadfence();
  __syncthreads();
  if (me == 0) shared.last = atomicInc(&partials.done[tile], unsigned(working) - 1) == unsigned(working) - 1;
  __syncthreads();
  if (!shared.last) return;
  __threadfence();
  join_chunks(p, shared, partials, tile, items, run, key_head, first, live);
  if constexpr (kTurns) hand_on_keys(p, shared, run, key_head);
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
  const LaunchShape shape{dim3(unsigned(all), spread), dim3(kThreads), sizeof(SplitShared<D>)};
  launch_behind(ex, shape, p.turns ? split_kernel<D, true> : split_kernel<D, false>, p, partials, tiles);
}

}  // namespace

void attend_split(const Exec& ex, const Problem& p) {
  if (p.head_dim <= 64) return launch<64>(ex, p);
  if (p.head_dim <= 96) return launch<96>(ex, p);
  launch<128>(ex, p);
}

}  // namespace sps::ops::decode
