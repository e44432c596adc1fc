// Runs of one position as warps take them. An item is a chunk of the keys that the queries of a run and key
// head see; a warp has it to itself, from the copy to the sums, so that nothing wider than a warp ever waits.
//
// Items are numbered run by run, tile of queries by tile, set by set, chunk by chunk, and dealt evenly. A
// stage of a warp's shared memory holds an item's keys and values and all that is known of it.
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
      if (!asks[s]) continue;
      if (seen[s].end > seen[s].begin)
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
    for (int set = 0; set < kMaxKeySets; ++set) chunks += keys({seen(p, set, 0), seen(p, set, 1)}).chunks();
    return max(chunks, 1);
  }
};

// What a warp knows of a run, in shared memory.
struct RunInfo {
  int run, slot, queries;
  int row[kMaxQueryStreams], begin[kMaxQueryStreams];
  int first_asks;  // stream 0 has a query
  int own;         // bit by set: the run has a key of this step
  Interval seen[kMaxKeySets][kMaxQueryStreams];
  SetKeys sets[kMaxKeySets];
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
};

struct WorkItem {
  RunInfo run;
  int key_head, first, live;  // the tile's queries: `live` from `first` on
  int tile, items;            // its number in the whole call; its items
  int nth;                    // of those
  int set, chunk;             // set is -1 where nothing is seen

  // By a warp, which knows the same of both.
  __device__ void take(const WorkItem& from) {
    constexpr int kWords = sizeof(WorkItem) / sizeof(int);
    static_assert(kWords * sizeof(int) == sizeof(WorkItem) && kWords <= 64);
    const int lane = int(threadIdx.x) & 31;
    const auto* const words = reinterpret_cast<const int*>(&from);
    const int low = words[lane], high = lane + 32 < kWords ? words[lane + 32] : 0;
    reinterpret_cast<int*>(this)[lane] = low;
    if (lane + 32 < kWords) reinterpret_cast<int*>(this)[lane + 32] = high;
    __syncwarp();
  }
};

// Which of all items a warp takes: they are shared out over `parts` (multiprocessors), then over `subs` warps
// of each, so that parts differ by one item at most.
struct Share {
  int part, parts, sub, subs;

  // [begin, end) of `total` items.
  __device__ Interval of(int total) const {
    const Interval mine = piece(total, part, parts);
    const Interval in_part = piece(mine.end - mine.begin, sub, subs);
    return {mine.begin + in_part.begin, mine.begin + in_part.end};
  }

 private:
  static __device__ Interval piece(int n, int which, int of) {
    const int each = n / of, more = n - each * of, begin = which * each + min(which, more);
    return {begin, begin + each + int(which < more)};
  }
};

// Walks over a range of items; a warp's lanes all hold the same. Its code comes once where it can: a warp
// runs through most of it once, and what is not in the instruction cache costs more than what it computes.
template <bool kTurns>
class ItemCursor {
 public:
  // Goes to the first item of a share; returns how many there are.
  __device__ int start(const Problem& p, const Partials& partials, Share share) {
    const int lane = int(threadIdx.x) & 31, of_run = p.kv_heads * partials.tiles;
    int n = 0, count = 0, here = 0, end = 0;  // of 32 runs: each one's items, and those up to it
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // counts, then finds
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
        if (pass == 0) {
          n += all;
        } else if (n >= all) {
          n -= all;
        } else {
          const int who = __ffs(int(__ballot_sync(~0U, int(n < end * of_run)))) - 1;
          items_ = __shfl_sync(~0U, here, who);
          n -= (__shfl_sync(~0U, end, who) - items_) * of_run;
          run_ = base + who, tile_ = int(unsigned(n) / unsigned(items_)), nth_ = n - tile_ * items_;
          return count;
        }
      }
      const Interval mine = share.of(n);
      count = mine.end - mine.begin, n = mine.begin;
      if (count == 0) break;
    }
    return count;
  }
  // To the next item, of which `run` tells. False: it is another run's, which enter() is to find.
  __device__ bool next(const Problem& p, const Partials& partials, const RunInfo& run) {
    if (++nth_ < items_) {
      if (--left_ > 0)
        ++at_.chunk;
      else
        locate(run);
      return true;
    }
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
#pragma unroll 1
    for (;; ++run_) {
      const RunLists lists(p, run_);
      if (items_ == 0) items_ = lists.template items<kTurns>(p);
      if (items_ == 0) continue;
      run.template fill<kTurns>(p, lists);
      return locate(run);
    }
  }
  // By a warp: all of `item` but for what it knows of the run.
  __device__ void fill(const Problem& p, const Partials& partials, WorkItem& item) const {
    if ((int(threadIdx.x) & 31) == 0) {
      const int key_head = partials.tiles == 1 ? tile_ : tile_ / partials.tiles,
                first = (tile_ - key_head * partials.tiles) * kQueryTile;
      item.key_head = key_head, item.first = first;
      item.live = max(min(item.run.queries - first, kQueryTile), 0);
      item.tile = run_ * p.kv_heads * partials.tiles + tile_, item.items = items_, item.nth = nth_;
      item.set = at_.set, item.chunk = at_.chunk;
    }
    __syncwarp();
  }

 private:
  __device__ void locate(const RunInfo& run) {
    at_ = {-1, 0};
    if (nth_ >= run.all_chunks()) return;
    at_ = run.item(nth_);
    left_ = run.first_chunk[at_.set] + run.chunks[at_.set] - at_.chunk;
  }

  int run_ = 0, tile_ = 0, nth_ = 0, items_ = 0;
  int left_ = 0;  // chunks of the set, this one and those behind it
  Item at_{-1, 0};
};

// Which keys are copied. Those of earlier steps may be before the kernels of this one have ended; in their
// rows of a chunk lie zeros after `cached_or_zero`, nothing is written after `cached`.
enum class From : uint8_t { cached, step, both, cached_or_zero };

// Issues the copy of an item's keys and values by a warp; zeros for keys that nobody sees.
template <int D, From kFrom>
__device__ inline void copy_item(const Problem& p, const WorkItem& item, char* k_tile, char* v_tile) {
  constexpr int kWide = D % 64 == 0 ? D / 8 : 4, kAcross = D / 8 / kWide, kRowsOfPass = 32 / kWide;
  static_assert(kChunk == 64 && 32 % kRowsOfPass == 0);  // rows 32 apart are permuted alike
  const int lane = int(threadIdx.x) & 31, first_key = item.chunk * kChunk;
  const int row_of_pass = lane / kWide, chunk_of_row = lane % kWide, column = 8 * chunk_of_row;
  const Interval keys = item.run.sets[item.set].within(item.chunk);
  const DeviceKeys& set = p.set[item.set];
  // Most chunks lie in one piece of a page, and all of their keys are seen: addresses differ by constants.
  if (kFrom != From::step && set.whole_chunks && p.head_dim == D && keys.end - keys.begin == kChunk &&
      keys.end <= item.run.begin[set.stream]) {
    const int64_t at =
        int64_t{item.run.where(p, item.set, item.key_head, first_key) + row_of_pass} * D + column;
    const uint16_t *const k_from = static_cast<const uint16_t*>(set.cache_k) + at,
                          *const v_from = static_cast<const uint16_t*>(set.cache_v) + at;
    const int swizzled = chunk_of_row ^ attention::swizzle<D>(row_of_pass);
#pragma unroll
    for (int down = 0; down < kChunk; down += kRowsOfPass)
#pragma unroll
      for (int across = 0; across < kAcross; ++across) {
        const int chunk = across * kWide, from = down * D + 8 * chunk,
                  to = (down + row_of_pass) * D * 2 + ((swizzled ^ attention::swizzle<D>(down)) + chunk) * 16;
        copy_async_16(k_tile + to, k_from + from, true);
        copy_async_16(v_tile + to, v_from + from, true);
      }
    return;
  }
  int where[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = first_key + 32 * half + lane;
    where[half] = keys.has(position) ? item.run.where(p, item.set, item.key_head, position) : kNowhere;
  }
  const auto k = keys_of<uint16_t>(p, item.set, item.key_head),
             v = values_of<uint16_t>(p, item.set, item.key_head);
  // Where nothing is read an address is still to be one.
  const bool cached_keys = k.cache != nullptr;
  const uint16_t* const k_cache = (cached_keys ? k.cache : k.step) + column;
  const uint16_t* const v_cache = (cached_keys ? v.cache : v.step) + column;
#pragma unroll 1
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int down = 0; down < kChunk / 2; down += kRowsOfPass) {
      const int row = down + row_of_pass, at = __shfl_sync(~0U, half == 0 ? where[0] : where[1], row);
      const bool of_step = at < 0 && at != kNowhere;
      if (kFrom == From::cached && of_step) continue;
      if (kFrom == From::step && !of_step) continue;
      const int64_t in_cache = int64_t{max(at, 0)} * p.head_dim;
      const uint16_t *k_row = k_cache + in_cache, *v_row = v_cache + in_cache;
      bool there = at >= 0;
      if constexpr (kFrom == From::step || kFrom == From::both) {
        if (of_step) k_row = k.row(at) + column, v_row = v.row(at) + column, there = true;
      }
      const int offset = half * (kChunk / 2) * D * 2;
#pragma unroll
      for (int across = 0; across < kAcross; ++across) {
        const int chunk = across * kWide, to = offset + attention::chunk_offset<D>(row, chunk_of_row + chunk);
        const bool valid = there && column + 8 * chunk < p.head_dim;
        copy_async_16(k_tile + to, k_row + 8 * chunk, valid);
        copy_async_16(v_tile + to, v_row + 8 * chunk, valid);
      }
    }
}

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

}  // namespace sps::ops::decode
