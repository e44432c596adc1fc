// Runs of several positions: pieces of prompts. A block takes 64 queries over all keys that they see, chunk
// by chunk, a warp 16 of them; keys and values of the next chunk arrive meanwhile. A chunk is what it is to
// the runs of one position, so the bits are the same.
#include "ops/decode_attention/decode_attention_tiles.cuh"

namespace sps::ops::decode {

namespace {

using attention::kThreads, attention::kWarps;

constexpr int kWarpQueries = 2, kQueries = kWarps * kWarpQueries * kQueryTile;  // tiles of a warp, of a block

constexpr int kStages = 2, kFound = kStages + 1;

template <int D>
struct WalkShared {
  struct Stage {
    alignas(128) char k[attention::tile_bytes<D>(kChunk)];
    alignas(128) char v[attention::tile_bytes<D>(kChunk)];
  };
  Stage stage[kStages];
  int where[kFound][kChunk];  // rows of the keys, in turns: of this chunk and of those that are asked for
  Interval seen[kMaxKeySets][kQueries];
  SetKeys sets[kMaxKeySets];
};

// A warp's queries: their softmaxes and sums of values so far. Of a lane, with t = 2 (lane % 4): queries t
// and t + 1 of each tile.
template <int D>
struct WarpSums {
  Softmax state[kWarpQueries][2];
  float total[D / 16][kWarpQueries][4];

  __device__ WarpSums() {
#pragma unroll
    for (int block = 0; block < D / 16; ++block)
#pragma unroll
      for (int n = 0; n < kWarpQueries; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[block][n][i] = 0;
  }
  // Factors that join a chunk's softmaxes; where a query does not see the chunk, nothing is joined.
  __device__ void join_states(const float (&top)[kWarpQueries][2], const float (&sum)[kWarpQueries][4],
                              const bool (&sees)[kWarpQueries][2], Factors (&factors)[kWarpQueries][2]) {
#pragma unroll
    for (int n = 0; n < kWarpQueries; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (sees[n][e]) factors[n][e] = join(state[n][e], {top[n][e], sum[n][e]});
  }
  __device__ void join_values(int block, const float (&sum)[kWarpQueries][4],
                              const bool (&sees)[kWarpQueries][2],
                              const Factors (&factors)[kWarpQueries][2]) {
#pragma unroll
    for (int n = 0; n < kWarpQueries; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (sees[n][i % 2]) total[block][n][i] = factors[n][i % 2].join(total[block][n][i], sum[n][i]);
  }
};

template <int D>
__global__ void __launch_bounds__(kThreads, D == 64 ? 3 : 2) walk_kernel(const __grid_constant__ Problem p) {
  let_next_start();
  wait_for_previous();
  extern __shared__ __align__(128) char memory[];
  WalkShared<D>& shared = *reinterpret_cast<WalkShared<D>*>(memory);
  const int run = int(blockIdx.z), key_head = int(blockIdx.y), me = int(threadIdx.x), warp = me / 32,
            lane = me % 32;
  if (longest_of(p, run) <= 1) return;
  // The last queries see the most keys: they come first.
  const int all = queries_of(p, run), tile = (all + kQueries - 1) / kQueries - 1 - int(blockIdx.x);
  if (tile < 0) return;
  const int first = tile * kQueries, live = min(all - first, kQueries);

  if (me < kMaxKeySets) shared.sets[me].clear();
  __syncthreads();
  if (me < kQueries) {
    const Query query(p, run, key_head, me < live ? first + me : INT_MAX);
    for (int set = 0; set < kMaxKeySets; ++set) {
      const Interval seen = query.keys(p, run, set);
      shared.seen[set][me] = seen;
      if (me < live) shared.sets[set].add_atomically(seen);
    }
  }
  __syncthreads();
  const int items = items_of(shared.sets);
  uint32_t q[kWarpQueries][D / 16][2];
#pragma unroll
  for (int n = 0; n < kWarpQueries; ++n) {
    const int in_tile = (warp * kWarpQueries + n) * kQueryTile + lane / 4;
    const bool there = in_tile < live;
    const Query query(p, run, key_head, first + (there ? in_tile : 0));
    load_query<D, true>(query.q<bf16>(p), there, p.head_dim, q[n]);
  }

  // Finds the keys of an item, and asks for them: zeros for keys that nobody sees.
  const auto find = [&](int n) {
    if (n >= items || me >= kChunk) return;
    const Item item = item_of(shared.sets, n);
    const int position = item.chunk * kChunk + me;
    shared.where[n % kFound][me] = shared.sets[item.set].within(item.chunk).has(position)
                                       ? locate(p, item.set, run, key_head, position)
                                       : kNowhere;
  };
  const auto ask = [&](int n) {
    if (n < items) {
      const int set = item_of(shared.sets, n).set;
      const auto k = keys_of<uint16_t>(p, set, key_head), v = values_of<uint16_t>(p, set, key_head);
      auto& stage = shared.stage[n % kStages];
      attention::Chunks<D>().template for_each<kChunk>([&](int row, int column, int offset) {
        const int at = shared.where[n % kFound][row];
        const bool valid = at != kNowhere && column < p.head_dim;
        copy_async_16(stage.k + offset, valid ? k.row(at) + column : k.step, valid);
        copy_async_16(stage.v + offset, valid ? v.row(at) + column : v.step, valid);
      });
    }
    copy_async_group();
  };
  for (int n = 0; n < kStages; ++n) find(n);
  __syncthreads();
  for (int n = 0; n < kStages; ++n) ask(n);

  WarpSums<D> sums;
  for (int item_number = 0; item_number < items; ++item_number) {
    const Item item = item_of(shared.sets, item_number);
    const int first_key = item.chunk * kChunk;
    auto& stage = shared.stage[item_number % kStages];
    find(item_number + kStages);
    Interval seen[kWarpQueries][2];
    bool sees[kWarpQueries][2], some = false;
#pragma unroll
    for (int n = 0; n < kWarpQueries; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        seen[n][e] = shared.seen[item.set][(warp * kWarpQueries + n) * kQueryTile + 2 * (lane & 3) + e];
        sees[n][e] = seen[n][e].touches(first_key, kChunk);
        some |= sees[n][e];
      }
    const bool active = __any_sync(~0U, some);
    copy_async_wait_groups<kStages - 1>();
    __syncthreads();  // keys and values are there
    const bool dirty = shared.sets[item.set].mixed(item.chunk) &&
                       attention::barrier_or(true, attention::has_nonfinite<D, kChunk>(stage.v));
    if (dirty) {
      attention::clean_tile<D, kChunk>(stage.v);
      __syncthreads();
    }
    if (active) {
      uint32_t w[kKeyTiles][kWarpQueries][2];
      float s[kKeyTiles][kWarpQueries][4], top[kWarpQueries][2], sum[kWarpQueries][4];
      dot_products<D>(MatrixAddress<D>::a(stage.k), 0, q, s);
      mask_and_scale(s, p.scale_log2, seen, first_key);
      tops_of(s, top);
#pragma unroll
      for (int n = 0; n < kWarpQueries; ++n) {
        const float base[2] = {base_of(top[n][0]), base_of(top[n][1])};
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) weights_of(s[m][n], base, w[m][n]);
      }
      Factors factors[kWarpQueries][2];
      sums_of_weights(w, sum);
      sums.join_states(top, sum, sees, factors);
      const auto at_v = MatrixAddress<D>::b(stage.v);
#pragma unroll
      for (int block = 0; block < D / 16; ++block) {
        weighted_values<D>(at_v, block, w, sum);
        if (dirty)
          add_nonfinite(
              values_of<bf16>(p, item.set, key_head),
              [&](int key) { return shared.where[item_number % kFound][key]; }, block, first_key, seen, sum);
        sums.join_values(block, sum, sees, factors);
      }
    }
    __syncthreads();  // the stage has been read
    ask(item_number + kStages);
  }

#pragma unroll
  for (int n = 0; n < kWarpQueries; ++n) {
    const float share[2] = {share_of(sums.state[n][0].sum), share_of(sums.state[n][1].sum)};
    const int in_tile = (warp * kWarpQueries + n) * kQueryTile + lane / 4;
    const bool there = in_tile < live;
    const Query query(p, run, key_head, first + (there ? in_tile : 0));
    uint16_t* const o = query.o<uint16_t>(p);
#pragma unroll
    for (int block = 0; block < D / 16; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* total = sums.total[block][n] + 2 * half;
        const uint32_t two =
            transpose_matrix(pack_bf16(__fmul_rn(total[0], share[0]), __fmul_rn(total[1], share[1])));
        const int d = 16 * block + 8 * half + 2 * (lane & 3);
        if (there && d < p.head_dim) *reinterpret_cast<uint32_t*>(o + d) = two;
      }
  }
}

template <int D>
void launch(const Exec& ex, const Problem& p) {
  const int64_t most = int64_t{p.longest} * p.streams * p.group;
  SPS_CHECK(p.kv_heads <= 65535 && p.runs <= 65535 && most < INT32_MAX);
  launch_behind(ex,
                {dim3(unsigned(ceil_div(most, kQueries)), unsigned(p.kv_heads), unsigned(p.runs)),
                 dim3(kThreads), sizeof(WalkShared<D>)},
                walk_kernel<D>, p);
}

}  // namespace

void attend_walk(const Exec& ex, const Problem& p) {
  if (p.head_dim <= 64) return launch<64>(ex, p);
  if (p.head_dim <= 96) return launch<96>(ex, p);
  launch<128>(ex, p);
}

}  // namespace sps::ops::decode
