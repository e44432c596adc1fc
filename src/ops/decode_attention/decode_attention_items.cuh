// Runs of one position as warps take them. An item is a chunk of the keys that the queries of a run and key
// head see; a warp has it to itself, from the copy to the sums, so that nothing wider than a warp ever waits.
//
// Items are numbered run by run, tile of queries by tile, set by set, chunk by chunk, and dealt evenly. Keys
// of the tile's next item are asked for when those of the one before have been multiplied, values likewise.
#pragma once

#include "ops/decode_attention/decode_attention_tiles.cuh"
#include "ops/rope/rope_units.cuh"

namespace sps::ops::decode {

static_assert(kMaxQueryStreams == 2);

// The entries of the step's lists. They are older than the step's first kernel.
struct RunLists {
  int run, slot;
  int row[kMaxQueryStreams], count[kMaxQueryStreams], begin[kMaxQueryStreams], first[kMaxQueryStreams],
      start[kMaxQueryStreams];
  bool asks[kMaxQueryStreams];  // has one query here, or none
  bool longer;                  // some stream has several: not a run of one position

  // The same in all lanes, or of another run in each. Everything but the starts is loaded at once.
  __device__ RunLists(const Problem& p, int which) : run(which), slot(p.slot[which]), longer(false) {
#pragma unroll
    for (int s = 0; s < kMaxQueryStreams; ++s) {
      const DeviceStream& stream = p.stream[s];
      row[s] = stream.row[which], count[s] = stream.count[which];
      begin[s] = stream.begin[which], first[s] = stream.first[which];
    }
#pragma unroll
    for (int s = 0; s < kMaxQueryStreams; ++s) {
      asks[s] = p.stream[s].q != nullptr && count[s] > 0;
      longer |= asks[s] && count[s] > 1;
      start[s] = asks[s] ? p.stream[s].document_start[row[s]] : 0;
    }
  }
  __device__ int queries(const Problem& p) const {
    return (int(asks[0]) + int(asks[1])) * p.group;
  }
  // What a stream's query sees of a set; {0, 0} for nothing.
  __device__ Interval seen(const Problem& p, int set, int s) const {
    if (!asks[s]) return {0, 0};
    const int first_key = p.set[set].stream == 0 ? first[0] : first[1];
    const Interval keys = attention::visible_keys(p.stream[s].band[set], begin[s], max(start[s], first_key));
    return keys.begin < keys.end ? keys : Interval{0, 0};
  }
  __device__ SetKeys keys(const Interval (&seen)[kMaxQueryStreams]) const {
    SetKeys keys;
    keys.clear();
#pragma unroll
    for (int s = 0; s < kMaxQueryStreams; ++s) {
      if (!asks[s] || seen[s].end <= seen[s].begin) continue;
      keys.any = {min(keys.any.begin, seen[s].begin), max(keys.any.end, seen[s].end)};
      keys.all = {max(keys.all.begin, seen[s].begin), min(keys.all.end, seen[s].end)};
    }
    return keys;
  }
  // Items of each of this run's tiles. Where nothing is seen, one that stands for the tile: it is to be
  // written, and its keys handed on. None if another kernel has the run, or nobody asks and none are kept.
  template <bool kTurns>
  __device__ int items(const Problem& p) const {
    if (longer || (!kTurns && queries(p) == 0)) return 0;
    int chunks = 0;
#pragma unroll
    for (int set = 0; set < kMaxKeySets; ++set)
      if (p.set[set].k != nullptr) chunks += keys({seen(p, set, 0), seen(p, set, 1)}).chunks();
    return max(chunks, 1);
  }
};

// What a warp knows of a run, in shared memory.
struct alignas(16) RunInfo {
  SetKeys sets[kMaxKeySets];
  int run, slot, queries;
  int row[kMaxQueryStreams], begin[kMaxQueryStreams];
  int first_asks;  // stream 0 has a query
  int own;         // bit by set: the run has a key of this step
  Interval seen[kMaxKeySets][kMaxQueryStreams];
  int first_chunk[kMaxKeySets], chunks[kMaxKeySets];
  int kept[kMaxKeySets];  // where that key goes: the cache's row of key head 0

  // By all lanes of a warp.
  template <bool kTurns>
  __device__ void fill(const Problem& p, const RunLists& lists) {
    const int lane = int(threadIdx.x) & 31;
    if (lane < kMaxKeySets) {
      const Interval by_stream[kMaxQueryStreams] = {lists.seen(p, lane, 0), lists.seen(p, lane, 1)};
      seen[lane][0] = by_stream[0], seen[lane][1] = by_stream[1];
      sets[lane] = lists.keys(by_stream);
      first_chunk[lane] = sets[lane].first_chunk(), chunks[lane] = sets[lane].chunks();
    }
    if constexpr (kTurns) {
      const DeviceKeys& keys = p.set[lane < kMaxKeySets ? lane : 0];
      const int stream = keys.stream;
      const bool has =
          lane < kMaxKeySets && keys.k != nullptr && (stream == 0 ? lists.count[0] : lists.count[1]) > 0;
      const unsigned who = __ballot_sync(~0U, int(has));
      if (lane == 0) own = int(who);
      if (has && keys.keep)
        kept[lane] = cache_row(keys, p.kv_heads, p.pages + int64_t(lists.slot) * p.per_slot, lists.slot, 0,
                               stream == 0 ? lists.begin[0] : lists.begin[1]);
    } else if (lane == 0) {
      own = 0;
    }
    if (lane == 0) {
      run = lists.run, slot = lists.slot, queries = lists.queries(p), first_asks = int(lists.asks[0]);
#pragma unroll
      for (int s = 0; s < kMaxQueryStreams; ++s) row[s] = lists.row[s], begin[s] = lists.begin[s];
    }
    __syncwarp();
  }
  // Chunks of all sets, and the nth of them: set after set.
  __device__ int all_chunks() const {
    return chunks[0] + chunks[1] + chunks[2];
  }
  __device__ Item item(int n) const {
    static_assert(kMaxKeySets == 3);
    const int of_two = chunks[0] + chunks[1], set = int(n >= chunks[0]) + int(n >= of_two);
    return {set, first_chunk[set] + n - (set == 0 ? 0 : set == 1 ? chunks[0] : of_two)};
  }
  // Stream of query n, which is one of the run's.
  __device__ int stream_of(const Problem& p, int n) const {
    return first_asks != 0 && n < p.group ? 0 : 1;
  }
  // Where a position's key lies, as locate().
  __device__ int where(const Problem& p, int set, int head, int position) const {
    const DeviceKeys& keys = p.set[set];
    const int fresh = position - begin[keys.stream];
    if (fresh >= 0) return ~(row[keys.stream] + fresh);
    return cache_row(keys, p.kv_heads, p.pages + int64_t(slot) * p.per_slot, slot, head, position);
  }
  // Of a cache of whole chunks: where a chunk begins, for key head 0. One that nobody sees may lie behind the
  // table's end.
  __device__ int chunk_row(const Problem& p, int set, int chunk) const {
    const DeviceKeys& keys = p.set[set];
    const int position = chunk * kChunk, in = int(unsigned(position) / unsigned(keys.rows));
    const int block = keys.paged ? p.pages[int64_t(slot) * p.per_slot + min(in, p.per_slot - 1)] : slot;
    return block * p.kv_heads * keys.rows + position - in * keys.rows;
  }
};

// One item; a warp's lanes all hold the same.
struct WorkItem {
  int tile = 0, items = 0;  // the tile's number in the whole call; its items
  int nth = 0;              // of those
  int key_head = 0;         // of the tile
  int first = 0;            // its first query in the run
  int set = -1, chunk = 0;  // set is -1 where nothing is seen
};

// Which of all items a warp takes: they are shared out evenly over `parts` (multiprocessors), and over `subs`
// warps of each. But where a tile ends within two items of a share, the share ends there: going from tile to
// tile costs a warp as much.
struct Share {
  int part, parts, sub, subs;

  __device__ int warps() const { return parts * subs; }
  __device__ int warp() const { return part * subs + sub; }
};

// Walks over a range of items; a warp's lanes all hold the same, but for rows of chunks. Its code comes once
// where it can: a warp runs through most of it once, and what is not in the instruction cache costs more than
// what it computes.
template <bool kTurns>
class ItemCursor {
 public:
  // Goes to the first item of a share; returns how many there are.
  //
  // Share k of W begins where k W-ths of the items end, if tiles were of that size; the numbers of shares
  // that tiles take up to their ends are moved to whole ones that are near, and shares within a tile are
  // even.
  __device__ int start(const Problem& p, const Partials& partials, Share share) {
    constexpr int kShare = 16;  // parts of a share that are told apart
    const int lane = int(threadIdx.x) & 31, of_run = p.kv_heads * partials.tiles, warps = share.warps();
    const int k = share.warp() + (lane & 1);  // even lanes look for the beginning, odd ones for the end
    int n = 0, here = 0, end = 0;             // of 32 runs: each one's items of a tile, and those up to it
    int sought = 0, run = 0, items = 1, begin = 0;  // an item, and where it is
    int count = 0, shift = 0;                       // the products below stay within 32 bits
    unsigned all_units = 0;
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
      int before = 0;
#pragma unroll 1
      for (int base = 0; base < p.runs; base += 32) {
        if (pass == 0 || p.runs > 32) {
          here = base + lane < p.runs ? RunLists(p, base + lane).template items<kTurns>(p) : 0;
          end = here;
#pragma unroll
          for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(~0U, end, step);
            if (lane >= step) end += below;
          }
        }
        const int all = __shfl_sync(~0U, end, 31) * of_run;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const int at = __shfl_sync(~0U, sought, which) - before;
          if (pass == 0 || at < 0 || at >= all) continue;
          const int who = __ffs(int(__ballot_sync(~0U, int(at < end * of_run)))) - 1;
          const int of_tile = __shfl_sync(~0U, here, who),
                    first = before + (__shfl_sync(~0U, end, who) - of_tile) * of_run;
          if ((lane & 1) == which) run = base + who, items = of_tile, begin = first;
        }
        before += all;
      }
      if (pass == 0) {
        n = before;
        if (n == 0) return 0;
        shift = max(64 - __clz(n) - __clz(kShare * warps) - 31, 0), all_units = unsigned(n >> shift);
        sought = min(int(unsigned(k) * all_units / unsigned(warps) << shift), n - 1);
      } else if (pass == 1) {
        const unsigned near = min(2U * kShare * unsigned(warps) / unsigned(n), kShare / 2U);
        const auto taken = [&](int items) {  // shares up to there
          const unsigned exact = unsigned(items >> shift) * (kShare * unsigned(warps)) / all_units,
                         whole = (exact + kShare / 2) / kShare * kShare;
          return int(unsigned(abs(int(exact - whole))) <= near ? whole : exact);
        };
        const int from = begin + int(unsigned(sought - begin) / unsigned(items)) * items,
                  at_from = taken(from), over = taken(from + items) - at_from, to_go = k * kShare - at_from;
        sought =
            from + (to_go >= over ? items : int(unsigned(max(to_go, 0)) * unsigned(items) / unsigned(over)));
        if (k == 0) sought = 0;
        if (k == warps) sought = n;
        count = __shfl_sync(~0U, sought, 1) - __shfl_sync(~0U, sought, 0);
        if (count == 0) return 0;
      }
    }
    run_ = __shfl_sync(~0U, run, 0), items_ = __shfl_sync(~0U, items, 0);
    const int at = __shfl_sync(~0U, sought - begin, 0);
    tile_ = int(unsigned(at) / unsigned(items_)), nth_ = at - tile_ * items_;
    return count;
  }
  // What start(), which has found `count`, and enter() know, for the warp's record: an equal one's cursor and
  // run after take(), which returns the count.
  __device__ uint4 record(const RunInfo& run, int count, uint32_t number) const {
    const int lane = int(threadIdx.x) & 31;
    const auto* const words = reinterpret_cast<const uint32_t*>(&run);
    const int own[kOwnWords] = {count, run_, tile_, nth_, items_, rows_set_, rows_chunk_};
    uint4 x = make_uint4(uint32_t(rows_), 0, 0, number);
    if (count > 0) x.y = words[lane];
    if (count > 0 && 32 + lane < kRunWords) x.z = words[32 + lane];
#pragma unroll
    for (int i = 0; i < kOwnWords; ++i)
      if (lane == kFirstOwn + i) x.z = uint32_t(own[i]);
    return x;
  }
  __device__ int take(const uint4& record, RunInfo& run) {
    const int lane = int(threadIdx.x) & 31;
    auto* const words = reinterpret_cast<uint32_t*>(&run);
    words[lane] = record.y;
    if (32 + lane < kRunWords) words[32 + lane] = record.z;
    const auto own = [&](int i) { return int(__shfl_sync(~0U, record.z, kFirstOwn + i)); };
    const int count = own(0);
    run_ = own(1), tile_ = own(2), nth_ = own(3), items_ = own(4), rows_set_ = own(5), rows_chunk_ = own(6);
    rows_ = int(record.x);
    __syncwarp();
    if (count > 0) locate(run);
    return count;
  }
  // To the tile's next item, of those that `run` tells of.
  __device__ void next(const RunInfo& run) {
    ++nth_;
    if (--left_ > 0)
      ++at_.chunk;
    else
      locate(run);
  }
  // To the next tile. False: it is another run's, which enter() is to find.
  __device__ bool next_tile(const Problem& p, const Partials& partials, const RunInfo& run) {
    nth_ = 0;
    if (++tile_ < p.kv_heads * partials.tiles) {
      locate(run);
      return true;
    }
    tile_ = 0, items_ = 0, ++run_;
    return false;
  }
  // Reads what there is to know of the run; goes on to the first one that has items.
  __device__ void enter(const Problem& p, RunInfo& run) {
    rows_set_ = -1;
#pragma unroll 1
    for (;; ++run_) {
      const RunLists lists(p, run_);
      if (items_ == 0) items_ = lists.template items<kTurns>(p);
      if (items_ == 0) continue;
      run.template fill<kTurns>(p, lists);
      return locate(run);
    }
  }
  __device__ Item at() const {
    return at_;
  }
  __device__ int nth() const {
    return nth_;
  }
  __device__ int key_head(const Partials& partials) const {  // the tile's
    return partials.tiles == 1 ? tile_ : tile_ / partials.tiles;
  }
  __device__ WorkItem item(const Problem& p, const Partials& partials) const {
    WorkItem item;
    item.tile = run_ * p.kv_heads * partials.tiles + tile_, item.items = items_, item.nth = nth_;
    item.key_head = key_head(partials);
    item.first = (tile_ - item.key_head * partials.tiles) * kQueryTile;
    item.set = at_.set, item.chunk = at_.chunk;
    return item;
  }
  // RunInfo::chunk_row() of where it stands. A lane has that of one chunk of 32 in a row.
  __device__ int chunk_row(const Problem& p, const RunInfo& run) {
    if (at_.set != rows_set_ || unsigned(at_.chunk - rows_chunk_) >= 32) {
      rows_set_ = at_.set, rows_chunk_ = at_.chunk;
      if (at_.chunk < run.first_chunk[at_.set] + 32) rows_chunk_ = run.first_chunk[at_.set];
      rows_ = run.chunk_row(p, at_.set, rows_chunk_ + (int(threadIdx.x) & 31));
    }
    return __shfl_sync(~0U, rows_, at_.chunk - rows_chunk_);
  }

 private:
  // Of a record's 32 times three words besides its number: a lane's row of chunks, then the run's words, at
  // the end those of the cursor itself.
  static constexpr int kRunWords = int(sizeof(RunInfo) / 4), kOwnWords = 7, kFirstOwn = 32 - kOwnWords;
  static_assert(kRunWords >= 32 && kRunWords <= 32 + kFirstOwn);

  __device__ void locate(const RunInfo& run) {
    at_ = {-1, 0};
    if (nth_ >= run.all_chunks()) return;
    at_ = run.item(nth_);
    left_ = run.first_chunk[at_.set] + run.chunks[at_.set] - at_.chunk;
  }

  int run_ = 0, tile_ = 0, nth_ = 0, items_ = 0;
  int left_ = 0;  // chunks of the set, this one and those behind it
  Item at_{-1, 0};
  int rows_set_ = -1, rows_chunk_ = 0, rows_ = 0;
};

// Which keys are copied. Those of earlier steps may be before the kernels of this one have ended; in their
// rows of a chunk lie zeros after `cached_or_zero`, nothing is written after `cached`.
enum class From : uint8_t { cached, step, both, cached_or_zero };

// An item's keys and values as a warp copies them; zeros for keys that nobody sees.
template <int D>
class ChunkCopy {
 public:
  // first_row: where the chunk lies, if that is in one piece. `no_step`: rows of this step are not copied.
  __device__ void set(const Problem& p, const RunInfo& run, const Item& item, int key_head, int first_row,
                      bool no_step) {
    const DeviceKeys& set = p.set[item.set];
    const Interval keys = run.sets[item.set].within(item.chunk);
    const int first = item.chunk * kChunk, begin = run.begin[set.stream];
    piece_ = set.whole_chunks && p.head_dim == D && (no_step || keys.end <= begin);
    if (piece_) {
      first_row_ = first_row;
      first_ = keys.begin - first, count_ = max(min(keys.end, begin) - keys.begin, 0);
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in = 32 * half + (int(threadIdx.x) & 31), position = item.chunk * kChunk + in;
      if (!keys.has(position))
        where_[half] = kNowhere;
      else if (set.whole_chunks && position < begin)
        where_[half] = first_row + in;
      else
        where_[half] = run.where(p, item.set, key_head, position);
    }
  }
  // Issues the copy of keys, or of values, which `rows` says where to find.
  template <From kFrom>
  __device__ void issue(const RowSource<uint16_t>& rows, char* tile) const {
    const int lane = int(threadIdx.x) & 31, row_of_pass = lane / kWide, chunk_of_row = lane % kWide,
              column = 8 * chunk_of_row;
    if (kFrom != From::step && piece_) {  // addresses differ by constants
      const uint16_t* const from = rows.cache + int64_t{first_row_ + row_of_pass} * D + column;
      const int swizzled = chunk_of_row ^ attention::swizzle<D>(row_of_pass);
#pragma unroll
      for (int down = 0; down < kChunk; down += kRowsOfPass)
#pragma unroll
        for (int across = 0; across < kAcross; ++across) {
          const int chunk = across * kWide;
          const int to =
              (down + row_of_pass) * D * 2 + ((swizzled ^ attention::swizzle<D>(down)) + chunk) * 16;
          copy_async_16(tile + to, from + down * D + 8 * chunk,
                        unsigned(down + row_of_pass - first_) < unsigned(count_));
        }
      return;
    }
    // Where nothing is read an address is still to be one.
    const uint16_t* const cache = (rows.cache != nullptr ? rows.cache : rows.step) + column;
#pragma unroll 1
    for (int half = 0; half < 2; ++half)
#pragma unroll 1
      for (int down = 0; down < kChunk / 2; down += kRowsOfPass) {
        const int row = down + row_of_pass, at = __shfl_sync(~0U, half == 0 ? where_[0] : where_[1], row);
        const bool of_step = at < 0 && at != kNowhere;
        if (kFrom == From::cached && of_step) continue;
        if (kFrom == From::step && !of_step) continue;
        const uint16_t* from = cache + int64_t{max(at, 0)} * rows.head_dim;
        bool there = at >= 0;
        if constexpr (kFrom == From::step || kFrom == From::both)
          if (of_step) from = rows.row(at) + column, there = true;
        const int offset = half * (kChunk / 2) * D * 2;
#pragma unroll
        for (int across = 0; across < kAcross; ++across) {
          const int chunk = across * kWide;
          copy_async_16(tile + offset + attention::chunk_offset<D>(row, chunk_of_row + chunk),
                        from + 8 * chunk, there && column + 8 * chunk < rows.head_dim);
        }
      }
  }
  __device__ bool any_of_step() const {
    if (piece_) return false;
    const auto of_step = [](int where) { return where < 0 && where != kNowhere; };
    return __any_sync(~0U, int(of_step(where_[0]) || of_step(where_[1]))) != 0;
  }

 private:
  static constexpr int kWide = D % 64 == 0 ? D / 8 : 4, kAcross = D / 8 / kWide, kRowsOfPass = 32 / kWide;
  static_assert(kChunk == 64 && 32 % kRowsOfPass == 0);  // rows 32 apart are permuted alike

  bool piece_ = false;  // of the cache's rows, and which of the chunk's are copied
  int first_row_ = 0, first_ = 0, count_ = 0;
  int where_[2] = {kNowhere, kNowhere};  // else of the lane's keys
};

// 8 numbers that another block may have written in this step.
__device__ inline uint4 load_fresh(bool live, const bf16* from) {
  return live ? __ldcg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
}
__device__ inline void widen(const uint4& x, float (&to)[kPiece]) {
  const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    to[i] = __uint_as_float(i % 2 == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xFFFF0000U);
}

// And back to 16 bytes of shared memory, rounded.
__device__ inline void put_piece(bf16* to, const float (&x)[kPiece]) {
  static_assert(kPiece == 8);
  *reinterpret_cast<uint4*>(to) =
      make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

}  // namespace sps::ops::decode
