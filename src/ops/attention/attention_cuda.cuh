// Device code that all attention kernels share: which keys a query sees, and which tiles follow from that.
#pragma once

#include "ops/attention/attention_cuda.h"

namespace sps::ops::attention {

struct Interval {
  int begin, end;  // empty where end <= begin

  __device__ bool has(int i) const { return begin <= i && i < end; }
  __device__ bool covers(int first, int n) const { return begin <= first && first + n <= end; }
  __device__ bool touches(int first, int n) const { return begin < first + n && first < end; }
};

// Keys that query i sees.
__device__ inline Interval visible_keys(DeviceBand band, int i, int document_start) {
  return {max(document_start, i - band.hi), i - band.lo + 1};
}

// What the queries first .. last of a sequence see. Both ends of a query's interval grow with the query,
// hence: every key that one of them sees lies in `any`, and every key in `all` is seen by each of them.
struct TileKeys {
  Interval any, all;
};
__device__ inline TileKeys tile_keys(DeviceBand band, int first, int first_document_start, int last,
                                     int last_document_start) {
  const Interval a = visible_keys(band, first, first_document_start);
  const Interval b = visible_keys(band, last, last_document_start);
  return {{a.begin, b.end}, {b.begin, a.end}};
}

// Queries first .. last of a sequence, with the starts of their documents.
struct QueryRange {
  int first, last, first_start, last_start;

  __device__ QueryRange(const int32_t* document_start, int first, int last)
      : first(first), last(last), first_start(document_start[first]), last_start(document_start[last]) {}
  __device__ TileKeys keys(DeviceBand band) const {
    return tile_keys(band, first, first_start, last, last_start);
  }
};

// The tiles of kTile keys that a range of queries visits, set after set.
template <int kTile>
class KeyWalk {
 public:
  struct At {
    int set, first;  // first key of the tile
  };
  __device__ KeyWalk(const Problem& problem, const DeviceQueries& queries, const QueryRange& range)
      : problem_(problem), queries_(queries), range_(range) {}

  __device__ At begin() const { return first_from(0); }
  __device__ At next(At at) const {
    at.first += kTile;
    return at.first < keys_of(at.set).end ? at : first_from(at.set + 1);
  }
  __device__ bool at_end(At at) const { return at.set >= problem_.sets; }
  // Some query of the range does not see some key of the tile.
  __device__ bool masked(At at) const {
    return !range_.keys(queries_.band[at.set]).all.covers(at.first, kTile);
  }

 private:
  __device__ Interval keys_of(int set) const {
    return problem_.skip_tiles ? range_.keys(queries_.band[set]).any : Interval{0, problem_.length};
  }
  __device__ At first_from(int set) const {
    for (; set < problem_.sets; ++set) {
      const Interval keys = keys_of(set);
      const int first = keys.begin / kTile * kTile;
      if (first < keys.end) return {set, first};
    }
    return {set, 0};
  }
  const Problem& problem_;
  const DeviceQueries& queries_;
  const QueryRange range_;
};

// The number of this block, taken apart.
struct Digits {
  int rest;
  __device__ Digits() : rest(int(blockIdx.x)) {}
  __device__ int next(int base) {
    const int digit = rest % base;
    rest /= base;
    return digit;
  }
};

// The queries of a block. Streams and query heads that read the same keys are neighbours; within a key head
// the tile with the most keys, the last, comes first.
template <int kQueries>
struct QueryTile {
  int stream, in_group, key_head, head, sequence, first, last;
  int rest;  // number of the block beyond these: 0 with blocks() of them

  __device__ explicit QueryTile(const Problem& p) {
    const int tiles = (p.length + kQueries - 1) / kQueries;
    Digits block;
    stream = block.next(p.streams), in_group = block.next(p.group);
    first = (tiles - 1 - block.next(tiles)) * kQueries;
    last = min(first + kQueries, p.length) - 1;
    key_head = block.next(p.kv_heads), sequence = block.next(p.batch);
    head = key_head * p.group + in_group;
    rest = block.rest;
  }
  static int64_t blocks(const Problem& p) {
    return int64_t((p.length + kQueries - 1) / kQueries) * p.streams * p.heads * p.batch;
  }
};

// The keys of a block: a tile of a set whose gradients are wanted. Tiles of a key head are neighbours, since
// they read the same queries; the one that most queries see, the first, comes first.
template <int kKeys>
struct KeyTile {
  int set, key_head, sequence, first, last;
  int rest;

  __device__ explicit KeyTile(const Problem& p) {
    const int tiles = (p.length + kKeys - 1) / kKeys;
    Digits block;
    first = block.next(tiles) * kKeys;
    last = min(first + kKeys, p.length) - 1;
    int nth = block.next(wanted_sets(p));
    for (set = 0; !p.keys[set].wanted() || nth-- > 0;) ++set;
    key_head = block.next(p.kv_heads), sequence = block.next(p.batch);
    rest = block.rest;
  }
  __host__ __device__ static int wanted_sets(const Problem& p) {
    int n = 0;
    for (int s = 0; s < p.sets; ++s) n += int(p.keys[s].wanted());
    return n;
  }
  static int64_t blocks(const Problem& p) {
    return int64_t((p.length + kKeys - 1) / kKeys) * wanted_sets(p) * p.kv_heads * p.batch;
  }
};

// First query behind the document of key `key`.
__device__ inline int document_end(const int32_t* document_start, int key, int length) {
  int low = key + 1, high = length;  // the first query that starts later is in [low, high]
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int probe = min(low + (int(threadIdx.x) & 31) * step + step - 1, high - 1);
    const unsigned later = __ballot_sync(~0U, document_start[probe] > key);
    if (later == 0) return high;
    const int first = __ffs(int(later)) - 1;
    high = min(low + first * step + step - 1, high - 1);
    low += first * step;
  }
  return low;
}

// The tiles of kTile queries that may see one of a range of keys.
template <int kTile>
class QueryWalk {
 public:
  struct At {
    int stream, in_group, first;
  };
  __device__ QueryWalk(const Problem& problem, int set, int first_key, int last_key, int document_end)
      : problem_(problem),
        set_(set),
        first_key_(first_key),
        last_key_(last_key),
        document_end_(document_end) {}

  __device__ At begin() const { return first_from(0); }
  __device__ At next(At at) const {
    const Interval queries = queries_of(at.stream);
    at.first += kTile;
    if (at.first < queries.end) return at;
    if (++at.in_group < problem_.group) return {at.stream, at.in_group, queries.begin / kTile * kTile};
    return first_from(at.stream + 1);
  }
  __device__ bool at_end(At at) const { return at.stream >= problem_.streams; }

 private:
  __device__ Interval queries_of(int stream) const {
    if (!problem_.skip_tiles) return {0, problem_.length};
    const DeviceBand band = problem_.queries[stream].band[set_];
    return {first_key_ + band.lo, min(last_key_ + band.hi + 1, document_end_)};
  }
  __device__ At first_from(int stream) const {
    for (; stream < problem_.streams; ++stream) {
      const Interval queries = queries_of(stream);
      if (queries.begin < queries.end) return {stream, 0, queries.begin / kTile * kTile};
    }
    return {stream, 0, 0};
  }
  const Problem& problem_;
  const int set_, first_key_, last_key_, document_end_;
};

}  // namespace sps::ops::attention
