// Runs of one position, as a warp of any kernel works on them: it takes its share of the items, and the one
// that brings a tile's last chunk joins them all, in order, and writes the rows.
#pragma once

#include "ops/decode_attention/decode_attention_items.cuh"

namespace sps::ops::decode {

// Of one warp.
template <int D>
struct WarpShared {
  static constexpr int kQueryRow = D + 8;  // apart by a number of banks
  alignas(128) char k[attention::tile_bytes<D>(kChunk)];
  alignas(128) char v[attention::tile_bytes<D>(kChunk)];
  alignas(16) bf16 query[kQueryTile * kQueryRow];  // turned
  alignas(16) bf16 own[kMaxKeySets][2][D];         // this step's keys, turned, and values
  RunInfo run;                                     // that is worked on
};

// Lives in the registers of a warp, whose lanes are together in every call. p may lie in any memory.
//   SplitWarp warp(p, partials, shared);
//   warp.start(share);           // asks for the first keys; reads nothing that this step writes
//   done = warp.finish(ready);   // the rest
// ready(run, key_head) is called before rows of queries, keys and values of that run and head are read, for
// each at least once. finish() returns how many tiles this warp has completed: over all warps, each of them
// once. Global writes are issued then, without a fence. Between the two calls the thread must leave groups of
// cp.async alone.
//
// Where warps meet otherwise than by what they have written to memory before they count themselves (`ready`
// has a look()), a number that has not come is one that no sum is:
//   read(wanted, from, x)       16 bytes, or x as it was
//   read_pair(n, end, from, x)  8, or x as it was: if n < end
//   look(most, x), have_come(most), rows_have_come(most)
//                        what has been read, taken together from most = 0 on, and whether all of it was
//                        there; watch(): what counts looks
//   put(wanted, to, x)   two numbers of the result
//   send(wanted, to, x)  a chunk's partial sums; who joins a query's waits for all of them, and says
//                        forget(n, end, from) when they are there
//   beside(to)           memory of this warp's own for sums that are not complete
//   before_keys()        is called before keys are handed on
// The warps that have a tile's last chunks share out its queries then, to join them, each from the last chunk
// on, and finish() returns the number of queries that fell to this warp, of Partials::queries of every tile.
template <int D, bool kTurns>
class SplitWarp {
 public:
  using Shared = WarpShared<D>;

  __device__ SplitWarp(const Problem& p, const Partials& partials, Shared& shared)
      : p_(p), partials_(partials), shared_(shared), lane_(int(threadIdx.x) & 31) {}

  // Returns how many items there are for this warp.
  __device__ int start(Share share, const Schedule& schedule = {}) {
    const bool leaves = schedule.records != nullptr;
    uint4* const place = static_cast<uint4*>(schedule.records) + share.warp() * 32 + lane_;
    uint32_t number = 0;
    bool found = false;
    if (leaves) {
      number = uint32_t(__ldcg(schedule.number));
      const uint4 record = __ldcg(place);
      found = __all_sync(~0U, int(record.w == number)) != 0;
      if (found) count_ = cursor_.take(record, shared_.run);
    }
    if (!found) {
      count_ = cursor_.start(p_, partials_, share);
      if (count_ > 0) cursor_.enter(p_, shared_.run);
    }
    if (count_ > 0) ask_item<kTurns ? From::cached_or_zero : From::cached>();
    if (leaves && !found) *place = cursor_.record(shared_.run, count_, number);
    return count_;
  }

  // Under way are always two groups: keys, and the values behind them, of the item that is worked on; or its
  // values and the next one's keys.
  template <class Ready>
  __device__ int finish(Ready&& ready) {
    constexpr From kFrom = kTurns ? From::cached_or_zero : From::both;
    constexpr int kHalves = kMails<Ready> ? 2 : 1;  // of an item, that have code of their own
    int done = 0;
    uint32_t q[1][D / 16][2];
#pragma unroll 1
    for (bool first = true; count_ > 0; first = false) {
      item_ = cursor_.item(p_, partials_);
      meet_tile();
      const int nth = item_.nth, of_tile = min(count_, item_.items - nth),
                joins = item_.items - nth - of_tile;  // the first query of those
      JoinPlace join;
      if constexpr (kMails<Ready>)
        if (joins < live_) join = join_place(joins);
      ItemView seen = view();
      prepare(ready, q[0]);
      if (!kTurns && first) ask_for_step_rows();
#pragma unroll 1
      for (int left = of_tile - 1; left >= 0; --left) {
        if (left != of_tile - 1) {
          item_.nth = cursor_.nth(), item_.set = cursor_.at().set, item_.chunk = cursor_.at().chunk;
          seen = view();
        }
        Chunk chunk;
#pragma unroll(kHalves)
        for (int half = 0; half < 2; ++half) {
          const bool values = half != 0;
          copy_async_wait_groups<1>();
          __syncwarp();
          if (item_.set >= 0) {
            if constexpr (kTurns) place_own(seen.own, values);
            values ? add_up(ready, seen, chunk) : weigh(seen, q, chunk);
          }
          __syncwarp();  // they have been read
          if (left > 0) {
            if (!values) cursor_.next(shared_.run), find_keys();
            ask<kFrom>(values);
          }
          copy_async_group();
        }
      }
      done += end_tile(ready, nth, of_tile, join);
      count_ -= of_tile;
      if (count_ == 0) break;
      __syncwarp();  // what the tile left in shared memory has been read
      if (!cursor_.next_tile(p_, partials_, shared_.run)) cursor_.enter(p_, shared_.run);
      ask_item<kFrom>();
    }
    return done;
  }

 private:
  template <class Ready>
  static constexpr bool kMails = requires(const Ready& ready) {
    ready.watch();
  };

  // Of the item that is worked on: largest scores, and weights below 1.
  struct Chunk {
    float top[1][2];
    uint32_t w[kKeyTiles][1][2];
  };

  __device__ const RunInfo& run() const {
    return shared_.run;
  }

  // Where the keys are that the cursor stands at.
  __device__ void find_keys() {
    const Item at = cursor_.at();
    if (at.set < 0) return;
    const DeviceKeys& keys = p_.set[at.set];
    const int key_head = cursor_.key_head(partials_),
              first_row = keys.whole_chunks ? cursor_.chunk_row(p_, run()) + key_head * keys.rows : 0;
    copy_.set(p_, run(), at, key_head, first_row, kTurns);
  }
  // Those keys, or their values.
  template <From kFrom>
  __device__ void ask(bool values) {
    const int set = cursor_.at().set, key_head = cursor_.key_head(partials_);
    if (set < 0) return;
    const auto rows = values ? values_of<uint16_t>(p_, set, key_head) : keys_of<uint16_t>(p_, set, key_head);
    copy_.template issue<kFrom>(rows, values ? shared_.v : shared_.k);
  }
  // Both, in two groups.
  template <From kFrom>
  __device__ void ask_item() {
    find_keys();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      ask<kFrom>(half != 0);
      copy_async_group();
    }
  }
  // For what start() asked for.
  __device__ void ask_for_step_rows() {
    if (cursor_.at().set < 0 || !copy_.any_of_step()) return;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) ask<From::step>(half != 0);
    copy_async_wait();
  }

  struct QueryPlace {
    int stream, head;
    int64_t row;
  };
  __device__ QueryPlace query(int n) const {  // n < live, in the tile
    const int of_run = item_.first + n, stream = run().stream_of(p_, of_run);
    // The first stream's queries, if it asks, are one for each head of the group.
    const int in_group = stream == 0 || run().first_asks == 0 ? of_run : of_run - p_.group;
    return {stream, item_.key_head * p_.group + in_group, run().row[stream]};
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
    const int t = 2 * (lane_ & 3);
    live_ = max(min(run().queries - item_.first, kQueryTile), 0);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      stream_[e] = t + e < live_ ? run().stream_of(p_, item_.first + t + e) : -1;
    }
    softmax_ = reinterpret_cast<float2*>(partials_.softmax(item_.tile, t));
    sums_ = partials_.sums(item_.tile, t) + lane_ / 4;
  }
  // What the tile's query n sees of a set; nothing if there is no such query.
  __device__ Interval seen(int set, int n) const {
    return n < live_ ? run().seen[set][run().stream_of(p_, item_.first + n)] : Interval{0, 0};
  }

  // The tile's queries as operands; turned, with this step's keys and values beside them, where that is to be
  // done.
  template <class Ready>
  __device__ void prepare(Ready&& ready, uint32_t (&q)[D / 16][2]) {
    const int n = lane_ / 4;
    const bool there = n < live_;
    if constexpr (kTurns) {
      const int head_dim = p_.head_dim;
      turn_rows(ready);
      __syncwarp();
      load_query<D, false>(shared_.query + n * Shared::kQueryRow, there, head_dim, q);
    } else {
      ready(run().run, item_.key_head);
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
    const RowSource<bf16> rows =
        values ? values_of<bf16>(p_, set, item_.key_head) : keys_of<bf16>(p_, set, item_.key_head);
    return rows.row(~run().row[p_.set[set].stream]);
  }

  // Calls some(load), whose load(to, live, from) reads 16 bytes of this step's rows, until they have come.
  template <class Ready, class Some>
  __device__ __forceinline__ void fetch(const Ready& ready, Some&& some) const {
    if constexpr (kMails<Ready>) {
      // All are asked for before the first one is looked at.
      const auto clear = [](uint4& to, bool, const bf16*) { to = make_uint4(0, 0, 0, 0); };
      const auto ask = [&](uint4& to, bool live, const bf16* from) { ready.read(live, from, to); };
      uint32_t most;
      const auto look = [&](uint4& to, bool, const bf16*) { most = ready.look(most, to); };
      auto watch = ready.watch();
      some(clear);
      do {
        some(ask);
        most = 0;
        some(look);
        watch.look();
      } while (__any_sync(~0U, int(!ready.rows_have_come(most))) != 0);
    } else {
      some([](uint4& to, bool live, const bf16* from) { to = load_fresh(live, from); });
    }
  }

  // decode_attention_turn.cuh
  template <class Ready>
  __device__ void turn_rows(Ready&& ready);

  // What the lists say of the item that is worked on.
  struct ItemView {
    int own = -1;        // the row of this step's key, if it is in the chunk and somebody sees it
    bool mixed = false;  // not all queries see the same of its keys
    bool all = false;    // all queries see all keys
  };
  __device__ ItemView view() const {
    ItemView view;
    if (item_.set < 0) return view;
    const SetKeys& keys = run().sets[item_.set];
    const int position = run().begin[p_.set[item_.set].stream];
    if ((run().own >> item_.set & 1) != 0 && keys.within(item_.chunk).has(position))
      view.own = position % kChunk;
    view.mixed = keys.mixed(item_.chunk), view.all = keys.all.covers(item_.chunk * kChunk, kChunk);
    return view;
  }
  // Puts this step's key, or value, into its row of the chunk.
  __device__ void place_own(int row, bool values) {
    if (row < 0) return;
    if (lane_ < D / 8)
      *reinterpret_cast<uint4*>((values ? shared_.v : shared_.k) + attention::chunk_offset<D>(row, lane_)) =
          *reinterpret_cast<const uint4*>(&shared_.own[item_.set][int(values)][8 * lane_]);
    __syncwarp();
  }

  // What this lane's queries of the tile see of a set.
  __device__ void seen_by_lane(int set, Interval (&seen)[1][2]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) seen[0][e] = stream_[e] >= 0 ? run().seen[set][stream_[e]] : Interval{0, 0};
  }
  // What the keys are worth to the queries.
  __device__ void weigh(const ItemView& view, const uint32_t (&q)[1][D / 16][2], Chunk& c) const {
    const float scale = p_.scale_log2;
    float s[kKeyTiles][1][4];
    dot_products<D>(shared_.k, 0, q, s);
    if (view.all) {
      scale_scores(s, scale);  // columns without a query give what nobody reads
    } else {
      Interval seen[1][2];
      seen_by_lane(item_.set, seen);
      mask_and_scale(s, scale, seen, item_.chunk * kChunk);
    }
    tops_of(s, c.top);
    const float base[2] = {base_of(c.top[0][0]), base_of(c.top[0][1])};
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) weights_of(s[m][0], base, c.w[m][0]);
  }
  // Softmax and sums of the chunk: its part of the tile's partials.
  template <class Ready>
  __device__ void add_up(const Ready& ready, const ItemView& view, const Chunk& c) {
    const int nth = item_.nth, set = item_.set, head_dim = p_.head_dim, items = partials_.items;
    float sum[1][4];
    const bool dirty = view.mixed && has_nonfinite(shared_.v);
    if (dirty) clean(shared_.v);
    sums_of_weights(c.w, sum);
    float* sums[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool wanted = lane_ < 4 && stream_[e] >= 0;
      float2* const to = &softmax_[nth + e * items];
      const float2 x = make_float2(c.top[0][e], sum[0][e]);
      if constexpr (kMails<Ready>)
        ready.send(wanted, to, x);
      else if (wanted)
        *to = x;
      sums[e] = sums_ + (nth + e * items) * D;
    }
    const auto at_v = MatrixAddress<D>::b(shared_.v);
    // Mail is sent when all sums are made: its instructions keep their places.
    constexpr int kBlocks = D / 16, kAtOnce = kMails<Ready> ? kBlocks : 1;
    float all[kAtOnce][1][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      weighted_values<D>(at_v, block, c.w, all[block % kAtOnce]);
      if ((block + 1) % kAtOnce != 0) continue;
      const auto each = [&](auto&& f) {
#pragma unroll
        for (int i = 0; i < 4 * kAtOnce; ++i) {
          const int d = 16 * (block + 1 - kAtOnce) + 8 * (i / 2), e = i % 2;
          f(stream_[e] >= 0 && d < head_dim, sums[e] + d, all[i / 4][0][i % 4]);
        }
      };
      const auto put = [](bool wanted, float* to, float x) {
        if (wanted) *to = x;
      };
      if constexpr (!kMails<Ready>)
        each(put);
      else if (dirty)
        each([&](bool wanted, float* to, float x) { put(wanted, ready.beside(to), x); });
      else
        each([&](bool wanted, float* to, float x) { ready.send(wanted, to, x); });
    }
    if (!dirty) return;
    if constexpr (kMails<Ready>) {
      float* beside[2] = {ready.beside(sums[0]), ready.beside(sums[1])};
      add_taken_out(set, beside);
#pragma unroll 1
      for (int d = 0; d < p_.head_dim; d += 8)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (stream_[e] >= 0) ready.send(true, sums[e] + d, beside[e][d]);
    } else {
      add_taken_out(set, sums);
    }
  }
  // To the sums, which each lane finds as it has left them.
  __device__ void add_taken_out(int set, float* const (&sums)[2]) const {
    const int first_key = item_.chunk * kChunk;
    const Interval keys = run().sets[set].within(item_.chunk);
    Interval seen[1][2];
    seen_by_lane(set, seen);
    const auto where = [&](int key) {
      const int position = first_key + key;
      return keys.has(position) ? run().where(p_, set, item_.key_head, position) : kNowhere;
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
      add_nonfinite(values_of<bf16>(p_, set, item_.key_head), where, block, first_key, seen, sum);
      for_sums([](const float& here, float& there) { there = here; });
    }
  }

  // Where not all queries see all keys: whether some value is infinite or NaN; and those taken out.
  __device__ bool has_nonfinite(const char* tile) const {
    uint32_t found = 0;
#pragma unroll 4
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

  // decode_attention_join.cuh
  // Of a query, for this lane: what chunks leave, and where its row goes.
  struct JoinPlace {
    const float2* softmax = nullptr;
    const float* sums = nullptr;
    bf16* o = nullptr;
    bool sees = false;  // something of the first chunks' lane-th
  };
  template <class Ready>
  __device__ int end_tile(Ready& ready, int nth, int of_tile, JoinPlace& first);
  __device__ bool is_last(int in_tile) const;
  __device__ bool touches(int query, int first) const;
  __device__ JoinPlace join_place(int query) const;
  __device__ __forceinline__ float4 chunk_factors(Softmax& state, float2 fresh, bool touches) const;
  template <int kPairs>
  __device__ __forceinline__ static void add_chunk(const float4& of_chunk, const float2 (&x)[kPairs],
                                                   float& weights, float (&total)[kPairs][2]);
  __device__ __forceinline__ static uint32_t row_pair(const float (&total)[2], float share);
  template <class Ready>
  __device__ __forceinline__ void join_mail(const Ready& ready, const JoinPlace& at, int query);
  __device__ __forceinline__ void join_chunks(int query, int end);

  // Hands this step's keys on: turned to who reads them later in the step, and to their caches. When all of
  // the tile's chunks are done everybody has read what they overwrite in a ring.
  __device__ void hand_on_keys() const {
    const int set = lane_ >> 3;
    if ((run().own >> set & 1) == 0) return;
    const DeviceKeys& keys = p_.set[set];
    const int64_t row = run().row[keys.stream];
#pragma unroll
    for (int column = (lane_ & 7) * kPiece; column < D; column += 8 * kPiece) {
      if (column >= p_.head_dim) continue;
      const uint4 k = *reinterpret_cast<const uint4*>(&shared_.own[set][0][column]);
      if (keys.turned != nullptr)
        *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.turned) + row * keys.turned_stride +
                                  item_.key_head * p_.head_dim + column) = k;
      if (!keys.keep) continue;
      const int64_t at =
          (int64_t{run().kept[set]} + int64_t{item_.key_head} * keys.rows) * p_.head_dim + column;
      *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.cache_k) + at) = k;
      *reinterpret_cast<uint4*>(static_cast<bf16*>(keys.cache_v) + at) =
          *reinterpret_cast<const uint4*>(&shared_.own[set][1][column]);
    }
  }

  const Problem& p_;
  const Partials& partials_;
  Shared& shared_;
  const int lane_;
  int count_ = 0;              // items
  WorkItem item_;              // that is worked on
  ItemCursor<kTurns> cursor_;  // at the item whose keys were asked for last
  ChunkCopy<D> copy_;          // of its keys and values
  // Of the tile that is worked on; the stream is -1 where there is no query.
  int live_ = 0;
  int stream_[2];
  float2* softmax_;  // of the first of the two
  float* sums_;
};

}  // namespace sps::ops::decode

#include "ops/decode_attention/decode_attention_join.cuh"
#include "ops/decode_attention/decode_attention_turn.cuh"
