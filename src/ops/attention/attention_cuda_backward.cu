// Backward on tensor cores: one kernel for the gradients of queries, one for those of keys and values. Both
// compute probabilities again from the statistics of the rows, and each sums in its own registers in a fixed
// order, so that nothing is added through memory and the same call gives the same bits.
#include "ops/attention/attention_tensor_cores.cuh"
#include "ops/cuda.cuh"
#include "tensor/cuda.h"

namespace sps::ops::attention {

namespace {

// Gradients of queries: a block owns 128 queries of one head of one stream, 32 to a warp, and walks over the
// keys as the forward pass does.
template <int D>
struct QueryKernel {
  static constexpr int kQueries = 128, kTiles = kQueries / kWarps / 16;
  static constexpr int kKeys = D <= 64 ? 64 : 32;  // as many as registers hold scores
  static constexpr int kShared = tile_bytes<D>(2 * kQueries + 2 * 2 * kKeys) + kQueries * int(sizeof(int));
};

// Gradients of keys and values: a block owns kKeys keys of one set and walks over the queries that see them:
// stream after stream, head after head. Here keys are the rows of scores and queries the columns.
template <int D>
struct KeyKernel {
  // Tiles of 16 keys in a warp: as many as registers hold both gradients of.
  static constexpr int kTiles = D <= 64 ? 2 : 1;
  static constexpr int kKeys = kWarps * 16 * kTiles;
  static constexpr int kQueries = D <= 64 ? 32 : 64;
  struct Stage {
    alignas(128) char q[tile_bytes<D>(kQueries)];
    char d_o[tile_bytes<D>(kQueries)];
    float lse2[kQueries], delta[kQueries];
    int32_t start[kQueries];
  };
  struct Shared {
    alignas(128) char k[tile_bytes<D>(kKeys)];
    char v[tile_bytes<D>(kKeys)];
    Stage stage[2];
  };
};

// Two neighbouring elements of a gradient.
template <class T>
__device__ inline void put_pair(T* to, float x, float y, bool accumulate) {
  if (accumulate) x += to_float(to[0]), y += to_float(to[1]);
  if (reinterpret_cast<uintptr_t>(to) % (2 * sizeof(T)) == 0) {
    const float pair[2] = {x, y};
    store(to, pair);
  } else {
    to[0] = from_float<T>(x), to[1] = from_float<T>(y);
  }
}

// Writes scale * acc for this warp's rows, which begin at row `first` of a sequence; none from `length` on.
// The product is rounded before anything is added to it.
template <int D, int kTiles>
__device__ inline void write_gradient(const Problem& p, const DeviceRows& to,
                                      const float (&acc)[kTiles][D / 8][4], int sequence, int first, int head,
                                      float scale, bool accumulate) {
  const int lane = int(threadIdx.x) & 31;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * m + 8 * half + lane / 4;
      if (row >= p.length) continue;
      const int64_t at =
          (int64_t(sequence) * p.length + row) * to.stride + head * p.head_dim + 2 * (lane & 3);
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        if (n * 8 >= p.head_dim) continue;
        const float x = __fmul_rn(acc[m][n][2 * half], scale), y = __fmul_rn(acc[m][n][2 * half + 1], scale);
        if (to.dtype == DType::bf16)
          put_pair(static_cast<bf16*>(to.data) + at + n * 8, x, y, false);
        else
          put_pair(static_cast<float*>(to.data) + at + n * 8, x, y, accumulate);
      }
    }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 2) query_kernel(const __grid_constant__ Problem p) {
  using K = QueryKernel<D>;
  constexpr int kTiles = K::kTiles, kKeys = K::kKeys;
  extern __shared__ __align__(128) char shared[];
  char* const q_tile = shared;
  char* const d_o_tile = q_tile + tile_bytes<D>(K::kQueries);
  char* const stages = d_o_tile + tile_bytes<D>(K::kQueries);

  const QueryTile<K::kQueries> tile(p);
  const DeviceQueries& queries = p.queries[tile.stream];
  load_tile<D, K::kQueries>(q_tile, HeadRows(p, queries.q, tile.sequence, tile.head), tile.first, p.length);
  load_tile<D, K::kQueries>(d_o_tile, HeadRows(p, queries.d_o, tile.sequence, tile.head), tile.first,
                            p.length);

  const int32_t* const document_start = p.document_start + int64_t(tile.sequence) * p.length;
  const KeyWalk<kKeys> walk(p, queries, QueryRange(document_start, tile.first, tile.last));
  const auto key_rows = [&](const DeviceRows& from) {
    return HeadRows(p, from, tile.sequence, tile.key_head);
  };
  const auto k_tile = [&](int stage) { return stages + tile_bytes<D>(2 * kKeys * stage); };
  const auto v_tile = [&](int stage) { return k_tile(stage) + tile_bytes<D>(kKeys); };
  const auto load_keys = [&](int stage, int set, int first) {
    load_tile<D, kKeys>(k_tile(stage), key_rows(p.keys[set].k), first, p.length);
    load_tile<D, kKeys>(v_tile(stage), key_rows(p.keys[set].v), first, p.length);
  };
  auto at = walk.begin();
  if (!walk.at_end(at)) load_keys(0, at.set, at.first);

  const WarpQueries<kTiles> mine(document_start, tile.first, tile.last,
                                 reinterpret_cast<int*>(stages + tile_bytes<D>(2 * 2 * kKeys)));
  float lse2[kTiles][2], delta[kTiles][2], dq[kTiles][D / 8][4];
  const int64_t statistics = p.statistics_of(tile.stream, tile.sequence, tile.head);
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lse2[m][half] = p.statistics.lse2[statistics + mine.query(m, half)];
      delta[m][half] = p.statistics.delta[statistics + mine.query(m, half)];
    }
  clear(dq);
  for (int stage = 0; !walk.at_end(at); stage ^= 1) {
    const auto [set, first] = at;
    const DeviceBand band = queries.band[set];
    copy_async_wait();
    const bool masked = walk.masked(at), found = masked && has_nonfinite<D, kKeys>(k_tile(stage));
    const bool unclean = barrier_or(masked, found);  // the stage is there, nobody reads the other one
    at = walk.next(at);
    if (!walk.at_end(at)) load_keys(stage ^ 1, at.set, at.first);

    const auto seen = mine.range.keys(band);
    const bool work = mine.any && (!p.skip_tiles || seen.any.touches(first, kKeys));
    float s[kTiles][kKeys / 8][4], ds[kTiles][kKeys / 8][4];
    if (work) {
      multiply_rows<D, kTiles, kKeys>(s, q_tile, mine.row, k_tile(stage));
      multiply_rows<D, kTiles, kKeys>(ds, d_o_tile, mine.row, v_tile(stage));
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            ds[m][n][e] =
                fast_exp2(s[m][n][e] * p.scale_log2 - lse2[m][e / 2]) * (ds[m][n][e] - delta[m][e / 2]);
      if (!seen.all.covers(first, kKeys))
        mine.template for_pairs<kKeys>(band, first, [&](int m, int n, int e, bool visible) {
          ds[m][n][e] = visible ? ds[m][n][e] : 0.0F;
        });
    }
    if (unclean) {  // scores had to see k as it is
      __syncthreads();
      clean_tile<D, kKeys>(k_tile(stage));
      __syncthreads();
    }
    if (!work) continue;
    multiply_weights<D, kTiles, kKeys>(dq, ds, k_tile(stage));
    if (unclean)
      add_nonfinite<D, kTiles>(dq, key_rows(p.keys[set].k), first, min(first + kKeys, p.length), 0,
                               mine.sees(band));
  }
  copy_async_wait();  // where no key is seen
  write_gradient<D, kTiles>(p, queries.dq, dq, tile.sequence, tile.first + mine.row, tile.head, p.scale,
                            false);
}

template <int D>
__global__ void __launch_bounds__(kThreads, 2) key_kernel(const __grid_constant__ Problem p) {
  using K = KeyKernel<D>;
  constexpr int kTiles = K::kTiles, kQueries = K::kQueries;
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<typename K::Shared*>(memory);

  const KeyTile<K::kKeys> tile(p);
  const DeviceKeys& keys = p.keys[tile.set];
  load_tile<D, K::kKeys>(shared.k, HeadRows(p, keys.k, tile.sequence, tile.key_head), tile.first, p.length);
  load_tile<D, K::kKeys>(shared.v, HeadRows(p, keys.v, tile.sequence, tile.key_head), tile.first, p.length);

  const int32_t* const document_start = p.document_start + int64_t(tile.sequence) * p.length;
  const QueryWalk<kQueries> walk(p, tile.set, tile.first, tile.last,
                                 document_end(document_start, tile.last, p.length));
  using At = typename QueryWalk<kQueries>::At;
  const auto last_of = [&](int first) { return min(first + kQueries, p.length) - 1; };
  const auto query_rows = [&](const DeviceRows& from, const At& at) {
    return HeadRows(p, from, tile.sequence, tile.key_head * p.group + at.in_group);
  };
  const auto load_queries = [&](typename K::Stage& stage, const At& at) {
    load_tile<D, kQueries>(stage.q, query_rows(p.queries[at.stream].q, at), at.first, p.length);
    load_tile<D, kQueries>(stage.d_o, query_rows(p.queries[at.stream].d_o, at), at.first, p.length);
    const int64_t statistics =
        p.statistics_of(at.stream, tile.sequence, tile.key_head * p.group + at.in_group) + at.first;
    static_assert(kQueries / 2 + kQueries <= kThreads);
    const int i = int(threadIdx.x);
    if (i < kQueries / 4) {
      copy_async_16(stage.lse2 + 4 * i, p.statistics.lse2 + statistics + 4 * i, true);
    } else if (i < kQueries / 2) {
      const int j = i - kQueries / 4;
      copy_async_16(stage.delta + 4 * j, p.statistics.delta + statistics + 4 * j, true);
    } else if (i < kQueries / 2 + kQueries) {
      const int j = i - kQueries / 2;
      copy_async_4(stage.start + j, document_start + min(at.first + j, p.length - 1), true);
    }
    return QueryRange(document_start, at.first, last_of(at.first));
  };

  At at = walk.begin();
  QueryRange range(document_start, 0, 0);
  if (!walk.at_end(at)) range = load_queries(shared.stage[0], at);

  const int lane = int(threadIdx.x) & 31, warp_row = int(threadIdx.x) / 32 * 16 * kTiles;
  const int warp_key = tile.first + warp_row;
  const auto key_of = [&](int m, int half) { return warp_key + 16 * m + 8 * half + lane / 4; };
  float dk[kTiles][D / 8][4], dv[kTiles][D / 8][4];
  clear(dk);
  clear(dv);
  for (int number = 0; !walk.at_end(at); number ^= 1) {
    auto& stage = shared.stage[number];
    const At now = at;
    const DeviceBand band = p.queries[now.stream].band[tile.set];
    const int last = last_of(now.first);
    const bool whole = now.first + kQueries <= p.length;
    const auto seen = range.keys(band);
    const bool masked = !whole || !seen.all.covers(tile.first, K::kKeys);
    copy_async_wait();
    const bool found =
        masked && (has_nonfinite<D, kQueries>(stage.q) || has_nonfinite<D, kQueries>(stage.d_o));
    const bool unclean =
        __syncthreads_or(int(found)) != 0;  // the stage is there, and nobody reads the other one
    at = walk.next(at);
    if (!walk.at_end(at)) range = load_queries(shared.stage[number ^ 1], at);

    const bool work = !p.skip_tiles || seen.any.touches(warp_key, 16 * kTiles);
    float s[kTiles][kQueries / 8][4], ds[kTiles][kQueries / 8][4];
    if (work) {
      multiply_rows<D, kTiles, kQueries>(s, shared.k, warp_row, stage.q);
      multiply_rows<D, kTiles, kQueries>(ds, shared.v, warp_row, stage.d_o);
      const bool warp_masked = !whole || !seen.all.covers(warp_key, 16 * kTiles);
#pragma unroll
      for (int n = 0; n < kQueries / 8; ++n) {
        const int column = 8 * n + 2 * (lane & 3);
        const float2 lse2 = *reinterpret_cast<const float2*>(stage.lse2 + column);
        const float2 delta = *reinterpret_cast<const float2*>(stage.delta + column);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float row_delta = e % 2 == 0 ? delta.x : delta.y;
            s[m][n][e] = fast_exp2(s[m][n][e] * p.scale_log2 - (e % 2 == 0 ? lse2.x : lse2.y));
            ds[m][n][e] = s[m][n][e] * (ds[m][n][e] - row_delta);
          }
      }
      if (warp_masked) {
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + 2 * (lane & 3) + e, query = now.first + column;
            const Interval visible = visible_keys(band, query, query <= last ? stage.start[column] : INT_MAX);
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const bool sees = visible.has(key_of(m, half));
                s[m][n][2 * half + e] = sees ? s[m][n][2 * half + e] : 0.0F;
                ds[m][n][2 * half + e] = sees ? ds[m][n][2 * half + e] : 0.0F;
              }
          }
      }
    }
    if (unclean) {  // scores had to see the rows as they are
      __syncthreads();
      clean_tile<D, kQueries>(stage.q);
      clean_tile<D, kQueries>(stage.d_o);
      __syncthreads();
    }
    if (!work) continue;
    multiply_weights<D, kTiles, kQueries>(dv, s, stage.d_o);
    multiply_weights<D, kTiles, kQueries>(dk, ds, stage.q);
    if (unclean) {
      const auto sees = [&](int m, int half, int query) {
        return visible_keys(band, query, document_start[query]).has(key_of(m, half));
      };
      add_nonfinite<D, kTiles>(dv, query_rows(p.queries[now.stream].d_o, now), now.first, last + 1, 1, sees);
      add_nonfinite<D, kTiles>(dk, query_rows(p.queries[now.stream].q, now), now.first, last + 1, 0, sees);
    }
  }
  copy_async_wait();  // where no query sees the keys
  write_gradient<D, kTiles>(p, keys.dk, dk, tile.sequence, warp_key, tile.key_head, p.scale, keys.accumulate);
  write_gradient<D, kTiles>(p, keys.dv, dv, tile.sequence, warp_key, tile.key_head, 1, keys.accumulate);
}

template <int D>
void launch(const Exec& ex, const Problem& p) {
  using Q = QueryKernel<D>;
  if (p.streams > 0) {
    SPS_CUDA(cudaFuncSetAttribute(query_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, Q::kShared));
    query_kernel<D><<<unsigned(QueryTile<Q::kQueries>::blocks(p)), kThreads, Q::kShared, stream_of(ex)>>>(p);
    SPS_LAUNCHED();
  }
  using K = KeyKernel<D>;
  const int64_t blocks = KeyTile<K::kKeys>::blocks(p);
  if (blocks == 0) return;
  constexpr int kShared = int(sizeof(typename K::Shared));
  SPS_CUDA(cudaFuncSetAttribute(key_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  key_kernel<D><<<unsigned(blocks), kThreads, kShared, stream_of(ex)>>>(p);
  SPS_LAUNCHED();
}

}  // namespace

void backward_tensor_cores(const Exec& ex, const Problem& p) {
  if (p.head_dim <= 64) return launch<64>(ex, p);
  if (p.head_dim <= 96) return launch<96>(ex, p);
  launch<128>(ex, p);
}

}  // namespace sps::ops::attention
