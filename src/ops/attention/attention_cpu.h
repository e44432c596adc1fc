// What the CPU forward and backward share: which pairs of a tile are visible, and packed tiles of keys.
//
// Tiles are kept transposed, keys down and queries across (S^T = K Q^T), so that each query is a vector lane
// and softmax needs no sums or maxima across lanes.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "base/threads.h"
#include "ops/attention/attention_engine.h"
#include "ops/attention/attention_kernels.h"
#include "tensor/arena.h"

namespace sps::ops::attention {

constexpr float kLog2e = 1.44269504F, kLn2 = 0.693147181F;

struct Range {
  int64_t begin = 0, end = 0;
  bool empty() const { return end <= begin; }
};

inline Range visible_keys(Band band, int64_t i, int64_t document_start) {
  if (band.empty()) return {0, 0};
  return {std::max(document_start, i - band.hi), i - band.lo + 1};  // i >= 0, so hi = kInf does not overflow
}

// The visible keys of up to kQueries queries in one key set; queries past the end of the sequence see none.
template <int64_t kQueries>
struct VisibleOf {
  alignas(64) int32_t begin[kQueries], end[kQueries];
  Range any;  // union over the queries

  void set(const AttentionShape& shape, int64_t sequence, Band band, int64_t first, int64_t queries) {
    if (band.empty()) queries = 0;
    const int32_t* start = shape.document_start.data() + sequence * shape.length + first;
    const auto lo = int32_t(std::min(band.lo, shape.length)), hi = int32_t(std::min(band.hi, shape.length));
    const auto at = int32_t(first);
    auto low = int32_t(shape.length), high = int32_t(0);
    for (int32_t i = 0; i < int32_t(queries); ++i) {
      const int32_t from = std::max(start[i], at + i - hi), to = at + i - lo + 1;
      const bool none = to <= from;
      begin[i] = none ? 0 : from;
      end[i] = none ? 0 : to;
      low = std::min(low, none ? low : from);
      high = std::max(high, none ? high : to);
    }
    for (int64_t i = queries; i < kQueries; ++i) begin[i] = end[i] = 0;
    any = low < high ? Range{low, high} : Range{0, 0};
  }
  bool at(int64_t query, int64_t key) const { return begin[query] <= key && key < end[query]; }
};
using Visible = VisibleOf<kTile>;

// All ones in the lanes of queries [i, i + kLanes) that see `key`.
inline IntVec lanes_that_see(const Visible& visible, int64_t i, int64_t key) {
  const IntVec j = IntVec{} + int32_t(key);
  return (load(visible.begin + i) <= j) & (j < load(visible.end + i));
}

// A rectangle of a tile that has work: queries [q0, q1) and keys [k0, k1), multiples of kBlock, both counted
// from the start of the tile. Every query of it sees keys [all0, all1).
struct Run {
  int64_t q0, q1, k0, k1, all0, all1;
  bool masked() const { return all0 > k0 || all1 < k1; }
};

// Calls body(j, masked) for the keys j, j+1 of a run; `masked` is a compile-time constant, true where some
// query does not see one of the two.
template <class Body>
void for_key_pairs(const Run& run, Body&& body) {
  int64_t j = run.k0;
  const int64_t first = std::min(round_up(std::max(run.all0, run.k0), 2), run.k1);
  for (; j < first; j += 2) body(j, std::true_type());
  for (; j + 2 <= run.all1; j += 2) body(j, std::false_type());
  for (; j < run.k1; j += 2) body(j, std::true_type());
}

// The rectangles of the tile that holds `keys` (padded) keys from first_key on, at most one per block of
// queries. Blocks that would give equal rectangles become one.
inline int find_runs(const Visible& visible, int64_t queries, int64_t first_key, int64_t keys, bool skip,
                     Run (&runs)[kTile / kBlock]) {
  int count = 0;
  for (int64_t q = 0; q < queries; q += kBlock) {
    int64_t low = keys, high = 0, all0 = 0, all1 = keys;
    for (int64_t i = q; i < q + kBlock; ++i) {
      const int64_t begin = std::max<int64_t>(visible.begin[i] - first_key, 0);
      const int64_t end = std::min<int64_t>(visible.end[i] - first_key, keys);
      if (begin < end) low = std::min(low, begin), high = std::max(high, end);
      all0 = std::max(all0, begin), all1 = std::min(all1, end);
    }
    if (!skip) low = 0, high = keys;
    if (low >= high) continue;
    Run run{q, q + kBlock, low / kBlock * kBlock, round_up(high, kBlock), all0, all1};
    if (all0 >= all1) run.all0 = run.all1 = run.k1;  // no key is seen by all: mask each
    Run* last = count > 0 ? &runs[count - 1] : nullptr;
    if (last != nullptr && last->q1 == q && last->k0 == run.k0 && last->k1 == run.k1 &&
        last->masked() == run.masked()) {
      last->q1 = run.q1;
      last->all0 = std::max(last->all0, run.all0);
      last->all1 = std::max(last->all0, std::min(last->all1, run.all1));
    } else {
      runs[count++] = run;
    }
  }
  return count;
}

// Memory of a piece, cut from the thread's scratch: described twice, first to add up the bytes.
class Carver {
 public:
  explicit Carver(std::byte* memory = nullptr) : memory_(memory) {}
  template <class T>
  T* take(int64_t n) {
    std::byte* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += size_t(round_up(n * int64_t(sizeof(T)), 64));
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

// Runs body(carver) twice: to plan, and on the memory.
template <class Plan>
auto carve(Plan&& plan) {
  Carver sizes;
  plan(sizes);
  Carver memory(thread_scratch(ScratchSlot::kernel, sizes.used()));
  return plan(memory);
}

// Which tiles of the sequence to work on, one head of keys at a time.
struct Piece {
  int64_t sequence, key_head;
  Range queries, keys;  // borders are multiples of kTile or the length
};

inline int64_t tiles_of(int64_t n) {
  return (n + kTile - 1) / kTile;
}

// Cuts [0, length) into at least `parts` ranges of whole tiles, as far as there are tiles.
inline std::vector<Range> cut(int64_t length, int64_t parts) {
  const int64_t tiles = tiles_of(length),
                size = std::max<int64_t>(tiles / std::max<int64_t>(parts, 1), 1) * kTile;
  std::vector<Range> ranges;
  for (int64_t at = 0; at < length; at += size) ranges.push_back({at, std::min(at + size, length)});
  return ranges;
}

// Keys of set s that some query of the piece sees, as whole tiles within piece.keys.
inline Range keys_to_visit(const AttentionShape& shape, const QueryStreams& queries, const Piece& piece,
                           size_t s) {
  Range any{shape.length, 0};
  if (piece.queries.empty()) return {};
  for (const QueryStream& stream : queries) {
    if (!stream.q || stream.band[s].empty()) continue;
    const int64_t first = piece.queries.begin, last = piece.queries.end - 1;
    const size_t base = size_t(piece.sequence * shape.length);
    any.begin = std::min(
        any.begin, visible_keys(stream.band[s], first, shape.document_start[base + size_t(first)]).begin);
    any.end = std::max(any.end, last - stream.band[s].lo + 1);
    if (!shape.skip_tiles) any = {0, shape.length};
  }
  any = {std::max(any.begin, piece.keys.begin) / kTile * kTile,
         std::min(round_up(any.end, kTile), piece.keys.end)};
  return any.empty() ? Range{} : any;
}

inline std::array<Range, kMaxKeySets> keys_of_piece(const AttentionShape& shape, const QueryStreams& queries,
                                                    const KeySets& keys, const Piece& piece) {
  std::array<Range, kMaxKeySets> used;
  for (size_t s = 0; s < keys.size(); ++s)
    if (keys[s].k) used[s] = keys_to_visit(shape, queries, piece, s);
  return used;
}

// Brings rows into the cache a few at a time while something else is computed: those that the next head reads
// and those that this one will write. Rows of one head are short and far apart, which the hardware does not
// foresee.
class RowsAhead {
 public:
  // Columns [col, col + cols) of rows [row, row + rows); nothing for an empty tensor.
  void add(const Tensor& t, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    if (!t || count_ == kMost) return;
    const auto size = int64_t(dtype_size(t.dtype));
    blocks_[count_++] = {static_cast<const std::byte*>(t.data) + (row * t.stride + col) * size,
                         t.stride * size, cols * size, rows};
    left_ += rows;
  }
  // Drops everything if it is more than fits beside the work at hand.
  void limit() {
    int64_t bytes = 0;
    for (int i = 0; i < count_; ++i) bytes += blocks_[i].rows * blocks_[i].bytes;
    if (bytes > kMostBytes) left_ = 0;
  }
  void fetch(int64_t rows) {
    for (rows = std::min(rows, left_), left_ -= rows; rows > 0; --rows) {
      while (blocks_[at_].rows == 0) ++at_;
      Block& block = blocks_[at_];
      for (int64_t i = 0; i < block.bytes; i += 64) __builtin_prefetch(block.from + i, 0, 2);
      block.from += block.stride;
      --block.rows;
    }
  }

 private:
  static constexpr int kMost = 24;
  static constexpr int64_t kMostBytes = 1 << 19;
  struct Block {
    const std::byte* from;
    int64_t stride, bytes, rows;
  };
  std::array<Block, kMost> blocks_;
  int count_ = 0, at_ = 0;
  int64_t left_ = 0;
};

// Calls body(head, next) for all heads of keys of all sequences, neighbouring heads of a sequence one after
// the other on the same thread where there is enough work for all threads besides; `next`: the one after it
// follows.
template <class Body>
void for_head_groups(const AttentionShape& shape, Body&& body) {
  constexpr int64_t kEnough = 32;
  const int64_t heads = shape.kv_heads, apart = std::min(heads, (kEnough + shape.batch - 1) / shape.batch);
  const int64_t size = (heads + apart - 1) / apart, groups = (heads + size - 1) / size;
  parallel_for(shape.batch * groups, [&](int64_t i) {
    const int64_t first = i % groups * size, last = std::min(first + size, heads);
    for (int64_t h = first; h < last; ++h) body(i / groups * heads + h, h + 1 < last);
  });
}

template <class T>
void write_row(T* to, const float* src, int64_t cols, float scale) {
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes) round_to(to + c, load(src + c) * scale);
  for (; c < cols; ++c) to[c] = from_f32<T>(src[c] * scale);
}

// Writes (or adds) src [rows, cols] * scale to t at (row, col).
inline void write_rows(const Tensor& t, int64_t row, int64_t rows, int64_t col, int64_t cols,
                       const float* src, int64_t stride, float scale, bool add = false) {
  for (int64_t r = row; r < row + rows; ++r, src += stride) {
    if (t.dtype == DType::bf16) {
      write_row(t.row<bf16>(r) + col, src, cols, scale);
    } else if (!add) {
      write_row(t.row<float>(r) + col, src, cols, scale);
    } else {
      float* to = t.row<float>(r) + col;
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) to[c] += src[c] * scale;
    }
  }
}

// Rows of x^T, for x [cols, kTile].
inline void transpose_back(const float* x, float* rows, int64_t stride, int64_t cols) {
  transpose(reinterpret_cast<const uint32_t*>(x), kTile, reinterpret_cast<uint32_t*>(rows), stride, cols,
            kTile);
}

// Calls body(engine, element) with the engine for this dtype and machine.
template <class Body>
void with_engine(DType dtype, Body&& body) {
  if (dtype == DType::f32) return body(F32Engine(), float());
#ifdef SPS_AMX
  if (amx_permitted()) return body(AmxEngine(), bf16());
#endif
  body(F32Engine(), bf16());
}

// Any present query stream's dtype.
inline DType act_dtype(const QueryStreams& queries) {
  for (const QueryStream& s : queries)
    if (s.q) return s.q.dtype;
  return DType::f32;
}

}  // namespace sps::ops::attention
