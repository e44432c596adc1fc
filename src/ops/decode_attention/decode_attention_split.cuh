// Runs of one position, as a warp of any kernel works on them: it takes its share of the items, and the one
// that brings a tile's last chunk joins them all, in order, and writes the rows.
#pragma once

#include "ops/decode_attention/decode_attention_items.cuh"

namespace sps::ops::decode {

// Of one warp. With two stages an item's keys arrive while the one before is worked on.
template <int D, int kStages>
struct WarpShared {
  struct Stage {
    alignas(128) char k[attention::tile_bytes<D>(kChunk)];
    alignas(128) char v[attention::tile_bytes<D>(kChunk)];
  };
  static constexpr int kQueryRow = D + 8;  // apart by a number of banks
  Stage stage[kStages];
  alignas(16) bf16 query[kQueryTile * kQueryRow];  // turned
  alignas(16) bf16 own[kMaxKeySets][2][D];         // this step's keys, turned, and values
  WorkItem item[kStages];
  WorkItem tile;  // an item of the tile that is worked on
};

// Lives in the registers of a warp, whose lanes are together in every call. p may lie in any memory.
//   SplitWarp warp(p, partials, shared);
//   warp.start(share);            // asks for the first keys; reads nothing that this step writes
//   tiles = warp.finish(ready);   // the rest
// ready(run, key_head) is called before rows of queries, keys and values of that run and head are read, for
// each at least once. finish() returns how many tiles this warp has completed: over all warps, each of them
// once. Global writes are issued then, without a fence. Between the two calls the thread must leave groups of
// cp.async alone.
template <int D, bool kTurns, int kStages>
class SplitWarp {
 public:
  using Shared = WarpShared<D, kStages>;

  __device__ SplitWarp(const Problem& p, const Partials& partials, Shared& shared)
      : p_(p), partials_(partials), shared_(shared), lane_(int(threadIdx.x) & 31) {}

  // Returns how many items there are for this warp.
  __device__ int start(Share share) {
    count_ = cursor_.start(p_, partials_, share);
    if (count_ == 0) return 0;
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) {
      ask<kTurns ? From::cached_or_zero : From::cached>(s);
      copy_async_group();
    }
    return count_;
  }

  template <class Ready>
  __device__ int finish(Ready&& ready) {
    int tiles = 0, in_tile = 0;
    bool late = false;
    uint32_t q[1][D / 16][2];
#pragma unroll 1
    for (int n = 0, s = 0; n < count_; ++n) {
      if (in_tile == 0) {
        shared_.tile.take(shared_.item[s]);
        meet_tile();
        prepare(ready, q[0]);
        if (!kTurns && n == 0) late = ask_for_step_rows();
      }
      if (late)
        copy_async_wait_groups<0>();
      else
        copy_async_wait_groups<kStages - 1>();
      late = false;
      __syncwarp();
      const int set = shared_.item[s].set, nth = shared_.item[s].nth, chunk = shared_.item[s].chunk;
      if (set >= 0) {
        if constexpr (kTurns) place_own(set, chunk, shared_.stage[s]);
        attend(set, chunk, nth, shared_.stage[s], q);
      }
      ++in_tile;
      __syncwarp();  // the stage and what stands with it have been read
      ask<kTurns ? From::cached_or_zero : From::both>(s);
      copy_async_group();
      s = s + 1 == kStages ? 0 : s + 1;
      if (n + 1 < count_ && shared_.item[s].tile == shared_.tile.tile) continue;
      if (is_last(in_tile)) {
        ++tiles;
        const int live = shared_.tile.live;
#pragma unroll 1
        for (int query = 0; query + 1 < live; query += 2) join_chunks<2>(query);
        if (live % 2 != 0) join_chunks<1>(live - 1);
        if constexpr (kTurns) hand_on_keys();
      }
      in_tile = 0;
      __syncwarp();  // what the tile left in shared memory has been read
    }
    copy_async_wait_groups<0>();
    return tiles;
  }

 private:
  // Asks for the keys of the next item that has not been asked for, if there is one.
  template <From kFrom>
  __device__ void ask(int s) {
    if (asked_ == count_) return;
    WorkItem& item = shared_.item[s];
    const WorkItem& before = shared_.item[s == 0 ? kStages - 1 : s - 1];
    if (asked_ > 0 && cursor_.next(p_, partials_, before.run)) {
      if (kStages > 1) item.take(before);
    } else {
      cursor_.enter(p_, item.run);
    }
    cursor_.fill(p_, partials_, item);
    ++asked_;
    if (item.set >= 0) copy_item<D, kFrom>(p_, item, shared_.stage[s].k, shared_.stage[s].v);
  }

  // For what start() asked for. True: something was.
  __device__ bool ask_for_step_rows() {
    bool any = false;
    for (int s = 0; s < asked_; ++s) {
      const WorkItem& item = shared_.item[s];
      if (item.set < 0) continue;
      const int begin = item.run.begin[p_.set[item.set].stream];
      if (item.run.sets[item.set].within(item.chunk).end <= begin) continue;
      copy_item<D, From::step>(p_, item, shared_.stage[s].k, shared_.stage[s].v);
      any = true;
    }
    if (any) copy_async_group();
    return any;
  }

  struct QueryPlace {
    int stream, head;
    int64_t row;
  };
  __device__ QueryPlace query(int n) const {  // n < live, in the tile
    const WorkItem& tile = shared_.tile;
    const int of_run = tile.first + n, stream = tile.run.stream_of(p_, of_run);
    return {stream, tile.key_head * p_.group + of_run % p_.group, tile.run.row[stream]};
  }
  __device__ const bf16* query_row(int n) const {
    const QueryPlace at = query(n);
    const DeviceStream& stream = p_.stream[at.stream];
    return static_cast<const bf16*>(stream.q) + at.row * stream.q_stride + at.head * p_.head_dim;
  }
  __device__ bf16* output_row(int n) const {
    const QueryPlace at = query(n);
    const DeviceStream& stream = p_.stream[at.stream];
    return static_cast<bf16*>(stream.o) + at.row * stream.o_stride + at.head * p_.head_dim;
  }
  // What this lane's queries of the tile, 2 (lane % 4) and the next, need with every chunk.
  __device__ void meet_tile() {
    const WorkItem& tile = shared_.tile;
    const int t = 2 * (lane_ & 3);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      stream_[e] = t + e < tile.live ? tile.run.stream_of(p_, tile.first + t + e) : -1;
      softmax_[e] = reinterpret_cast<float2*>(partials_.softmax(tile.tile, t + e));
      sums_[e] = partials_.sums(tile.tile, t + e) + lane_ / 4;
    }
  }
  // What the tile's query n sees of a set; nothing if there is no such query.
  __device__ Interval seen(int set, int n) const {
    const WorkItem& tile = shared_.tile;
    if (n >= tile.live) return {0, 0};
    return tile.run.seen[set][tile.run.stream_of(p_, tile.first + n)];
  }

  // The tile's queries as operands; turned, with this step's keys and values beside them, where that is to be
  // done.
  template <class Ready>
  __device__ void prepare(Ready&& ready, uint32_t (&q)[D / 16][2]) {
    const WorkItem& tile = shared_.tile;
    const int n = lane_ / 4;
    const bool there = n < tile.live;
    if constexpr (kTurns) {
      turn_rows(ready);
      __syncwarp();
      load_query<D, false>(shared_.query + n * Shared::kQueryRow, there, p_.head_dim, q);
    } else {
      ready(tile.run.run, tile.key_head);
      load_query<D, true>(query_row(there ? n : 0), there, p_.head_dim, q);
    }
  }

  // The set that is `nth` of those in a list of bits; -1 if there are fewer.
  static __device__ int nth_set(int bits, int nth) {
    int found = -1;
#pragma unroll
    for (int set = 0; set < kMaxKeySets; ++set) {
      if ((bits >> set & 1) == 0) continue;
      if (nth == 0) found = set;
      --nth;
    }
    return found;
  }
  // This step's row of keys, or values, of a set.
  __device__ const bf16* own_row(bool values, int set) const {
    const RowSource<bf16> rows = values ? values_of<bf16>(p_, set, shared_.tile.key_head)
                                        : keys_of<bf16>(p_, set, shared_.tile.key_head);
    return rows.row(~shared_.tile.run.row[p_.set[set].stream]);
  }

  // Turns the queries and this step's keys, eight lanes to a row, as rope.cu does. Angles and gains are no
  // one's results: they are asked for first.
  template <class Ready>
  __device__ void turn_rows(Ready&& ready) {
    constexpr int kLog = 3, kRows = 32 >> kLog;
    static_assert(D <= (2 * kPiece << kLog) && kMaxKeySets <= kRows);
    const WorkItem& tile = shared_.tile;
    const int lane = lane_ & ((1 << kLog) - 1), live = tile.live;
    int turning = 0;  // sets
#pragma unroll
    for (int set = 0; set < kMaxKeySets; ++set)
      if ((tile.run.own >> set & 1) != 0 && p_.set[set].turned != nullptr) turning |= 1 << set;
    const Rotation& r = p_.rotation;
    const rope::Unit<kPiece> unit({0, p_.heads, p_.head_dim, r.pairs, r.adjacent}, lane);
    // Rows that stay as they are: values, and keys that have been turned already.
    const int copied = lane_ >> kLog;
    const bool copies = (tile.run.own >> copied & 1) != 0,
               copies_keys = copies && (turning >> copied & 1) == 0;
    uint4 kept[2][2];
#pragma unroll 1
    for (int first = 0; first == 0 || first < live + __popc(turning); first += kRows) {
      const int vector = first + (lane_ >> kLog), set = vector < live ? -1 : nth_set(turning, vector - live);
      const bool is_query = vector < live, on = (is_query || set >= 0) && lane < r.units,
                 second = on && unit.second < p_.head_dim;
      const int stream = is_query ? query(vector).stream : set >= 0 ? p_.set[set].stream : 0;
      const rope::Turn<kPiece> turn(Rows<const float>{r.cos, r.cos_stride},
                                    Rows<const float>{r.sin, r.sin_stride}, 1, tile.run.begin[stream], unit,
                                    on);
      float gains[2][kPiece], v[2][kPiece];
      if (r.norm)
        rope::load_unit(is_query ? p_.stream[stream].gain : p_.set[max(set, 0)].gain, unit, p_.head_dim, on,
                        gains);
      const bf16* const from = !on ? nullptr : is_query ? query_row(vector) : own_row(false, set);
      if (first == 0) {
        const bf16* const own_keys = copies_keys ? own_row(false, copied) : nullptr;
        const bf16* const own_values = copies ? own_row(true, copied) : nullptr;
        ready(tile.run.run, tile.key_head);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = (lane + (half << kLog)) * kPiece;
          kept[0][half] = load_fresh(copies_keys && column < p_.head_dim, own_keys + column);
          kept[1][half] = load_fresh(copies && column < p_.head_dim, own_values + column);
        }
      }
      widen(load_fresh(on, from + unit.first), v[0]);
      widen(load_fresh(second, from + unit.second), v[1]);
      if (r.norm) rope::scale_unit(v, rope::norm_factor(v, kLog, p_.head_dim, r.eps), gains);
      r.adjacent ? turn.template apply<false>(v) : turn.template apply<true>(v);
      if (on)
        rope::store_unit(is_query ? shared_.query + vector * Shared::kQueryRow : shared_.own[set][0], unit,
                         p_.head_dim, v);
    }
    if (!copies) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = (lane + (half << kLog)) * kPiece;
      if (column >= D) continue;
      *reinterpret_cast<uint4*>(&shared_.own[copied][1][column]) = kept[1][half];
      if (copies_keys || column >= p_.head_dim)
        *reinterpret_cast<uint4*>(&shared_.own[copied][0][column]) = kept[0][half];
    }
  }

  // Puts this step's key and value into their rows of a chunk, if they are in it and somebody sees them.
  __device__ void place_own(int set, int chunk, typename Shared::Stage& stage) {
    const RunInfo& run = shared_.tile.run;
    const int position = run.begin[p_.set[set].stream], me = lane_ & 15, values = lane_ >> 4;
    if ((run.own >> set & 1) == 0 || !run.sets[set].within(chunk).has(position)) return;
    if (me < D / 8)
      *reinterpret_cast<uint4*>((values != 0 ? stage.v : stage.k) +
                                attention::chunk_offset<D>(position % kChunk, me)) =
          *reinterpret_cast<const uint4*>(&shared_.own[set][values][8 * me]);
    __syncwarp();
  }

  // Softmax and sums of a chunk: its part of the tile's partials.
  __device__ void attend(int set, int chunk, int nth, typename Shared::Stage& stage,
                         const uint32_t (&q)[1][D / 16][2]) {
    const WorkItem& tile = shared_.tile;
    const int first_key = chunk * kChunk;
    Interval seen_by[1][2];
#pragma unroll
    for (int e = 0; e < 2; ++e)
      seen_by[0][e] = stream_[e] >= 0 ? tile.run.seen[set][stream_[e]] : Interval{0, 0};
    float s[kKeyTiles][1][4], top[1][2], sum[1][4];
    uint32_t w[kKeyTiles][1][2];
    dot_products<D>(stage.k, 0, q, s);
    if (tile.run.sets[set].all.covers(first_key, kChunk))
      scale_scores(s, p_.scale_log2);  // columns without a query give what nobody reads
    else
      mask_and_scale(s, p_.scale_log2, seen_by, first_key);
    tops_of(s, top);
    const float base[2] = {base_of(top[0][0]), base_of(top[0][1])};
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) weights_of(s[m][0], base, w[m][0]);
    const bool dirty = tile.run.sets[set].mixed(chunk) && has_nonfinite(stage.v);
    if (dirty) clean(stage.v);
    sums_of_weights(w, sum);
    float* sums[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (lane_ < 4 && stream_[e] >= 0) softmax_[e][nth] = make_float2(top[0][e], sum[0][e]);
      sums[e] = sums_[e] + nth * D;
    }
    const auto at_v = MatrixAddress<D>::b(stage.v);
#pragma unroll
    for (int block = 0; block < D / 16; ++block) {
      weighted_values<D>(at_v, block, w, sum);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = 16 * block + 8 * (i / 2);
        if (stream_[i % 2] >= 0 && d < p_.head_dim) sums[i % 2][d] = sum[0][i];
      }
    }
    if (dirty) add_taken_out(set, chunk, seen_by, sums);
  }
  // To the sums, which each lane finds as it has left them.
  __device__ void add_taken_out(int set, int chunk, const Interval (&seen_by)[1][2],
                                float* const (&sums)[2]) const {
    const WorkItem& tile = shared_.tile;
    const int first_key = chunk * kChunk;
    const Interval keys = tile.run.sets[set].within(chunk);
    const auto where = [&](int key) {
      const int position = first_key + key;
      return keys.has(position) ? tile.run.where(p_, set, tile.key_head, position) : kNowhere;
    };
#pragma unroll 1
    for (int block = 0; block < D / 16; ++block) {
      float sum[1][4];
      const auto for_sums = [&](auto&& body) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int d = 16 * block + 8 * (i / 2);
          if (stream_[i % 2] >= 0 && d < p_.head_dim) body(sum[0][i], sums[i % 2][d]);
        }
      };
      for_sums([](float& here, const float& there) { here = there; });
      add_nonfinite(values_of<bf16>(p_, set, tile.key_head), where, block, first_key, seen_by, sum);
      for_sums([](const float& here, float& there) { there = here; });
    }
  }

  // Where not all queries see all keys: whether some value is infinite or NaN; and those taken out.
  __device__ bool has_nonfinite(const char* tile) const {
    uint32_t found = 0;
#pragma unroll 1
    for (int i = lane_; i < kChunk * D / 8; i += 32) {
      const uint4 x = reinterpret_cast<const uint4*>(tile)[i];
      found |= attention::nonfinite(x.x) | attention::nonfinite(x.y) | attention::nonfinite(x.z) |
               attention::nonfinite(x.w);
    }
    return __any_sync(~0U, int(found != 0)) != 0;
  }
  __device__ void clean(char* tile) const {
#pragma unroll 1
    for (int i = lane_; i < kChunk * D / 8; i += 32) {
      uint4& x = reinterpret_cast<uint4*>(tile)[i];
      x = make_uint4(attention::finite(x.x), attention::finite(x.y), attention::finite(x.z),
                     attention::finite(x.w));
    }
    __syncwarp();
  }

  // After `in_tile` of the tile's items, which this warp has worked on: whether all are there.
  __device__ bool is_last(int in_tile) const {
    const int items = shared_.tile.items;
    __syncwarp();
    if (in_tile == items) return true;
    int there = 0;
    if (lane_ == 0) {
      unsigned* const done = &partials_.done[shared_.tile.tile];
      there = in_tile + int(add_in_order(done, unsigned(in_tile)));
      if (there == items) *done = 0;
    }
    return __shfl_sync(~0U, there, 0) == items;
  }

  // Joins the chunks of some of the tile's queries, from `first` on, and writes their rows. A lane has every
  // 32nd column; a chunk's factors are made by one lane.
  template <int kJoined>
  __device__ void join_chunks(int first) const {
    constexpr int kColumns = D / 32, kAhead = chunks_ahead<D>() / kJoined;
    static_assert(32 % kAhead == 0);
    const WorkItem& tile = shared_.tile;
    const int chunks = tile.run.all_chunks();
    Softmax state[kJoined];
    float total[kJoined][kColumns] = {};
#pragma unroll 1
    for (int base = 0; base < chunks; base += 32) {
      const int here = min(chunks - base, 32), mine = base + min(lane_, here - 1);
      float2 fresh[kJoined];
      float old[kJoined], now[kJoined], sum[kAhead][kJoined][kColumns], next[kAhead][kJoined][kColumns];
      unsigned sees[kJoined];
#pragma unroll
      for (int e = 0; e < kJoined; ++e)
        fresh[e] = __ldcg(reinterpret_cast<const float2*>(partials_.softmax(tile.tile, first + e)) + mine);
#pragma unroll 1
      for (int from = -kAhead; from < here; from += kAhead) {
        if (from + kAhead < here)
#pragma unroll
          for (int e = 0; e < kJoined; ++e) {
            const float* const sums =
                partials_.sums(tile.tile, first + e) + (base + from + kAhead) * D + lane_;
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
#pragma unroll
              for (int c = 0; c < kColumns; ++c) next[i][e][c] = __ldcg(sums + i * D + 32 * c);
          }
        if (from < 0) {
          const Item item = tile.run.item(mine);
#pragma unroll
          for (int e = 0; e < kJoined; ++e) {
            const bool touches =
                lane_ < here && seen(item.set, first + e).touches(item.chunk * kChunk, kChunk);
            sees[e] = __ballot_sync(~0U, int(touches));
            float top = touches ? fresh[e].x : -INFINITY;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
              const float below = __shfl_up_sync(~0U, top, step);
              if (lane_ >= step) top = fmaxf(top, below);
            }
            top = fmaxf(state[e].top, top);
            const float above = __shfl_up_sync(~0U, top, 1), before = lane_ == 0 ? state[e].top : above;
            const Factors f = factors_of(before, fresh[e].x, top);
            old[e] = f.old, now[e] = f.now;
            state[e].top = __shfl_sync(~0U, top, 31);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kAhead; ++i)
#pragma unroll
            for (int e = 0; e < kJoined; ++e) {
              const int lane = from + i;  // none sees a chunk that is not there
              const Factors f{__shfl_sync(~0U, old[e], lane), __shfl_sync(~0U, now[e], lane)};
              const float of_chunk = __shfl_sync(~0U, fresh[e].y, lane);
              const bool seen_by = (sees[e] >> lane & 1) != 0;
              const float weights = f.join(state[e].sum, of_chunk);
              state[e].sum = seen_by ? weights : state[e].sum;
#pragma unroll
              for (int c = 0; c < kColumns; ++c) {
                const float joined = f.join(total[e][c], sum[i][e][c]);
                total[e][c] = seen_by ? joined : total[e][c];
              }
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
#pragma unroll
          for (int e = 0; e < kJoined; ++e)
#pragma unroll
            for (int c = 0; c < kColumns; ++c) sum[i][e][c] = next[i][e][c];
      }
    }
#pragma unroll
    for (int e = 0; e < kJoined; ++e) {
      bf16* const o = output_row(first + e);
      const float share = share_of(state[e].sum);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (lane_ + 32 * c < p_.head_dim) o[lane_ + 32 * c] = from_float<bf16>(__fmul_rn(total[e][c], share));
    }
  }

  // Hands this step's keys on: turned to who reads them later in the step, and to their caches. When all of
  // the tile's chunks are done everybody has read what they overwrite in a ring.
  __device__ void hand_on_keys() const {
    const WorkItem& tile = shared_.tile;
    const int set = lane_ >> 3;
    if ((tile.run.own >> set & 1) == 0) return;
    const DeviceKeys& keys = p_.set[set];
    const int64_t row = tile.run.row[keys.stream];
#pragma unroll
    for (int column = (lane_ & 7) * kPiece; column < D; column += 8 * kPiece) {
      if (column >= p_.head_dim) continue;
      const uint4 k = *reinterpret_cast<const uint4*>(&shared_.own[set][0][column]);
      if (keys.turned != nullptr)
        *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.turned) + row * keys.turned_stride +
                                  tile.key_head * p_.head_dim + column) = k;
      if (!keys.keep) continue;
      const int64_t at =
          (int64_t{tile.run.kept[set]} + int64_t{tile.key_head} * keys.rows) * p_.head_dim + column;
      *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.cache_k) + at) = k;
      *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.cache_v) + at) =
          *reinterpret_cast<const uint4*>(&shared_.own[set][1][column]);
    }
  }

  const Problem& p_;
  const Partials& partials_;
  Shared& shared_;
  const int lane_;
  int count_ = 0, asked_ = 0;  // items
  // Of the tile that is worked on; the stream is -1 where there is no query.
  int stream_[2];
  float2* softmax_[2];
  float* sums_[2];
  ItemCursor<kTurns> cursor_;
};

}  // namespace sps::ops::decode
