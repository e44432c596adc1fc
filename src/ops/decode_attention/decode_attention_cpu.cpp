// Decoding is bound by the bytes of the keys, so a piece of work is one key head of a few neighbouring
// positions of a sequence: their queries (both streams, all heads of the group) take every key while it is in
// cache. Keys are visited in blocks of 64 positions, counted from the sequence's first one whatever the step
// begins with, and blocks in segments of 1024: a segment has a softmax of its own, and segments are joined in
// order. So the bits do not depend on how the work is cut, and few long sequences can be spread over many
// threads.
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/threads.h"
#include "ops/decode_attention/decode_attention_blocks.h"

namespace sps::ops {

namespace {

using namespace decode_blocks;

constexpr int64_t kSegment = 1024;
constexpr int64_t kTileQueries = 32;  // of a piece of work, unless one position has more
constexpr int64_t kPieces = 64;       // with fewer pieces than this, segments are pieces of their own

struct Query {
  size_t stream;
  int64_t row, head, position, document_start;
};

// One key head of `positions` neighbouring positions of a run.
struct Tile {
  size_t run;
  int64_t begin, end;  // positions
  int64_t head;
};
// A segment of a key set that a tile reads.
struct Part {
  size_t set;
  int64_t segment;
};

// total = total * old + part * fresh
[[gnu::noinline]] void join_rows(float* total, const float* part, int64_t n, float old, float fresh) {
  for (int64_t d = 0; d < n; ++d) total[d] = std::fma(part[d], fresh, total[d] * old);
}

// Memory of a piece of work.
struct Workspace {
  float *q, *part, *total;  // [queries, padded head_dim] each; q on tiles in their layout
  std::byte* block;         // scores and what else a block of keys takes
  Softmax *part_state, *total_state;
};

// In vectors, or on tiles.
template <class T, bool kTiles>
class Decode {
 public:
  Decode(const DecodeShape& shape, const DecodeStep& step, const DecodeQuerySet& queries,
         const DecodeKeySets& keys)
      : shape_(shape),
        step_(step),
        queries_(queries),
        keys_(keys),
        group_(shape.heads / shape.kv_heads),
        width_(attention::round_up(shape.head_dim, kTiles ? 32 : kFloats)),
        most_(attention::round_up(std::max(kTileQueries, int64_t(kMaxQueryStreams) * group_), 32)) {
    for (size_t run = 0; run < size_t(step.runs); ++run) cut(run);
  }

  void run() const {
    if (int64_t(tiles_.size()) >= kPieces) {
      parallel_for(int64_t(tiles_.size()), [&](int64_t i) {
        const Tile& tile = tiles_[size_t(i)];
        const std::vector<Query> queries = queries_of(tile);
        const Workspace w = workspace(thread_scratch(ScratchSlot::kernel, workspace_bytes()));
        load_queries(queries, w);
        for (size_t n = 0; n < queries.size(); ++n) clear(w.total_state[n], w.total + int64_t(n) * width_);
        for (const Part& part : parts_of(tile, queries)) {
          attend(tile, queries, part, w);
          for (size_t n = 0; n < queries.size(); ++n) join(w, w.part_state, w.part, n);
        }
        write(queries, w);
      });
      return;
    }
    // Every segment for itself, then the segments of each tile in order.
    struct Piece {
      size_t tile;
      Part part;
    };
    std::vector<Piece> pieces;
    std::vector<size_t> first;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      first.push_back(pieces.size());
      for (const Part& part : parts_of(tiles_[i], queries_of(tiles_[i]))) pieces.push_back({i, part});
    }
    first.push_back(pieces.size());
    const size_t rows = size_t(most_), bytes = rows * size_t(width_ + 2) * sizeof(float);
    std::byte* parts = thread_scratch(ScratchSlot::gemm, pieces.size() * bytes);
    const auto part_of = [&](size_t i) {
      auto* state = reinterpret_cast<Softmax*>(parts + i * bytes);
      return std::pair{state, reinterpret_cast<float*>(state + rows)};
    };
    parallel_for(int64_t(pieces.size()), [&](int64_t i) {
      const Tile& tile = tiles_[pieces[size_t(i)].tile];
      const std::vector<Query> queries = queries_of(tile);
      Workspace w = workspace(thread_scratch(ScratchSlot::kernel, workspace_bytes()));
      std::tie(w.part_state, w.part) = part_of(size_t(i));
      load_queries(queries, w);
      attend(tile, queries, pieces[size_t(i)].part, w);
    });
    parallel_for(int64_t(tiles_.size()), [&](int64_t i) {
      const std::vector<Query> queries = queries_of(tiles_[size_t(i)]);
      const Workspace w = workspace(thread_scratch(ScratchSlot::kernel, workspace_bytes()));
      for (size_t n = 0; n < queries.size(); ++n) clear(w.total_state[n], w.total + int64_t(n) * width_);
      for (size_t piece = first[size_t(i)]; piece < first[size_t(i) + 1]; ++piece) {
        const auto [state, part] = part_of(piece);
        for (size_t n = 0; n < queries.size(); ++n) join(w, state, part, n);
      }
      write(queries, w);
    });
  }

 private:
  static constexpr int64_t kScoreStride = kBlock + kFloats;

  // A run's positions, so that a tile has about kTileQueries queries. All streams' rows end together, at each
  // position there are those of the streams that have begun.
  void cut(size_t run) {
    int64_t at = INT64_MAX, end = 0;
    const auto first = [&](size_t s) { return int64_t(step_.stream[s].begin[run]); };
    const auto there = [&](size_t s) { return queries_[s].q && step_.stream[s].count[run] > 0; };
    for (size_t s = 0; s < queries_.size(); ++s)
      if (there(s)) at = std::min(at, first(s)), end = first(s) + step_.stream[s].count[run];
    while (at < end) {
      int64_t streams = 0, stop = end;
      for (size_t s = 0; s < queries_.size(); ++s) {
        if (!there(s)) continue;
        if (first(s) <= at)
          ++streams;
        else
          stop = std::min(stop, first(s));
      }
      stop = std::min(stop, at + std::max<int64_t>(1, kTileQueries / (streams * group_)));
      for (int64_t head = 0; head < shape_.kv_heads; ++head) tiles_.push_back({run, at, stop, head});
      at = stop;
    }
  }

  size_t block_bytes() const {
#ifdef SPS_AMX
    if constexpr (kTiles) return Tiles::bytes(width_);
#endif
    return 4 * size_t(kScoreStride) * sizeof(float);
  }
  size_t workspace_bytes() const {
    const auto rows = size_t(most_);
    return 3 * rows * size_t(width_) * sizeof(float) + block_bytes() + 2 * rows * sizeof(Softmax);
  }
  Workspace workspace(std::byte* memory) const {
    Workspace w{};
    const int64_t rows = most_ * width_;
    w.q = reinterpret_cast<float*>(memory);
    w.part = w.q + rows, w.total = w.part + rows;
    w.block = reinterpret_cast<std::byte*>(w.total + rows);
    w.part_state = reinterpret_cast<Softmax*>(w.block + block_bytes());
    w.total_state = w.part_state + most_;
    return w;
  }
  void clear(Softmax& state, float* o) const {
    state = {-INFINITY, 0};
    std::fill(o, o + width_, 0.0F);
  }

  // Stream by stream and position by position, so that neighbours mostly see the same keys.
  std::vector<Query> queries_of(const Tile& tile) const {
    std::vector<Query> list;
    for (int64_t position = tile.begin; position < tile.end; ++position)
      for (size_t s = 0; s < queries_.size(); ++s) {
        if (!queries_[s].q) continue;
        const StepRows& rows = step_.stream[s];
        const int64_t t = position - rows.begin[tile.run], row = rows.row[tile.run] + t;
        if (t < 0 || t >= rows.count[tile.run]) continue;
        for (int64_t h = tile.head * group_; h < (tile.head + 1) * group_; ++h)
          list.push_back({s, row, h, position, rows.document_start[size_t(row)]});
      }
    return list;
  }
  KeyInterval interval(const Tile& tile, const Query& q, size_t set) const {
    const int64_t first = step_.stream[size_t(keys_[set].stream)].first[tile.run];
    return visible_keys(queries_[q.stream].band[set], q.position, q.document_start, first);
  }
  std::vector<Part> parts_of(const Tile& tile, const std::vector<Query>& queries) const {
    std::vector<Part> parts;
    for (size_t set = 0; set < keys_.size(); ++set) {
      int64_t begin = INT64_MAX, end = 0;
      for (const Query& q : queries) {
        const KeyInterval seen = interval(tile, q, set);
        if (seen.begin < seen.end) begin = std::min(begin, seen.begin), end = std::max(end, seen.end);
      }
      for (int64_t at = begin / kSegment; begin < end && at * kSegment < end; ++at)
        parts.push_back({set, at});
    }
    return parts;
  }
  void load_queries(const std::vector<Query>& queries, const Workspace& w) const {
    const auto numbers = [&](size_t n) {
      const Query& q = queries[n];
      return queries_[q.stream].q.template row<T>(q.row) + q.head * shape_.head_dim;
    };
#ifdef SPS_AMX
    if constexpr (kTiles) {
      Tiles tiles(w.block, shape_.head_dim, width_, int64_t(queries.size()));
      for (size_t n = 0; n < queries.size(); n += Tiles::kQueries)
        tiles.load_queries(std::min(Tiles::kQueries, int64_t(queries.size() - n)), tile_queries(w, n),
                           [&](int64_t i) { return numbers(n + size_t(i)); });
      return;
    }
#endif
    float* to = w.q;
    for (size_t n = 0; n < queries.size(); ++n, to += width_)
      for (int64_t d = 0; d < width_; ++d)
        to[d] = d < shape_.head_dim ? shape_.scale * to_f32(numbers(n)[d]) : 0.0F;
  }
#ifdef SPS_AMX
  bf16* tile_queries(const Workspace& w, size_t n) const {
    return reinterpret_cast<bf16*>(w.q) + Tiles::query_numbers(int64_t(n), width_);
  }
#endif

  // The softmax of the tile's queries over one segment, into w.part.
  void attend(const Tile& tile, const std::vector<Query>& queries, const Part& part,
              const Workspace& w) const {
    for (size_t n = 0; n < queries.size(); ++n) clear(w.part_state[n], w.part + int64_t(n) * width_);
    std::vector<KeyInterval> seen;
    int64_t begin = INT64_MAX, end = 0;
    for (const Query& q : queries) {
      KeyInterval s = interval(tile, q, part.set);
      s.begin = std::max(s.begin, part.segment * kSegment),
      s.end = std::min(s.end, (part.segment + 1) * kSegment);
      if (s.begin < s.end) begin = std::min(begin, s.begin), end = std::max(end, s.end);
      seen.push_back(s);
    }
    const T *keys[2][kBlock], *values[2][kBlock];
    const auto find = [&](int64_t block, bool which) {
      find_keys(tile, part.set, std::max(begin, block), std::min(end, block + kBlock), block, keys[which],
                values[which]);
    };
    const auto ask_for = [&](int64_t block, const T* const* rows) {
      for (int64_t j = std::max(begin, block); j < std::min(end, block + kBlock); ++j)
        prefetch(rows[j - block], shape_.head_dim);
    };
#ifdef SPS_AMX
    [[maybe_unused]] Tiles tiles(w.block, shape_.head_dim, width_, int64_t(queries.size()));
    std::optional<TileSession> session;
    if constexpr (kTiles) session.emplace(tiles.shapes());
#endif
    bool which = false;
    if (begin < end) find(begin / kBlock * kBlock, which);
    for (int64_t block = begin / kBlock * kBlock; block < end; block += kBlock, which = !which) {
      // Memory brings the values while the scores are computed, and the next keys while the values are added
      // up.
      const T *const *k = keys[which], *const *v = values[which];
      ask_for(block, v);
      if (block + kBlock < end) find(block + kBlock, !which), ask_for(block + kBlock, keys[!which]);
      const auto inside = [&](size_t i) {
        return KeyInterval{std::max(seen[i].begin, block) - block,
                           std::min(seen[i].end, block + kBlock) - block};
      };
#ifdef SPS_AMX
      if constexpr (kTiles) {
        tiles.load_keys(std::max(begin, block) - block, std::min(end, block + kBlock) - block, k, v);
        for (size_t n = 0; n < queries.size(); n += Tiles::kQueries)
          tiles.attend(
              std::min(Tiles::kQueries, int64_t(queries.size() - n)), tile_queries(w, n), shape_.scale,
              [&](int64_t i) { return inside(n + size_t(i)); }, w.part_state + n,
              w.part + int64_t(n) * width_);
        continue;
      }
#endif
      in_vectors(queries.size(), inside, k, v, w);
    }
  }
  template <class Inside>
  void in_vectors(size_t queries, Inside&& inside, const T* const* k, const T* const* v,
                  const Workspace& w) const {
    for (size_t n = 0; n < queries;) {
      const KeyInterval at = inside(n);
      size_t same = 1;
      while (same < 4 && n + same < queries && inside(n + same).begin == at.begin &&
             inside(n + same).end == at.end)
        ++same;
      if (same == 3) same = 2;
      if (at.begin < at.end) {
        if (same == 4)
          block_of<4>(n, at, k, v, w);
        else if (same == 2)
          block_of<2>(n, at, k, v, w);
        else
          block_of<1>(n, at, k, v, w);
      }
      n += same;
    }
  }

  // Where the keys of positions [begin, end) lie; k[0] is position `block`.
  void find_keys(const Tile& tile, size_t set, int64_t begin, int64_t end, int64_t block, const T** k,
                 const T** v) const {
    const DecodeKeys& keys = keys_[set];
    const StepRows& rows = step_.stream[size_t(keys.stream)];
    const int64_t own = rows.begin[tile.run], slot = step_.slot[tile.run], hd = shape_.head_dim;
    const auto stretch = [&](int64_t from, int64_t to, const Tensor& keys_of, const Tensor& values_of,
                             int64_t row, int64_t col) {
      const T *key = keys_of.row<T>(row) + col, *value = values_of.row<T>(row) + col;
      for (int64_t j = from; j < to; ++j, key += keys_of.stride, value += values_of.stride)
        k[j - block] = key, v[j - block] = value;
    };
    int64_t j = begin;
    while (j < std::min(own, end)) {  // as far as a block of the cache goes
      const int64_t stop = std::min({end, own, j + keys.cache.rows - j % keys.cache.rows});
      const int64_t at = cache_row(keys.cache, step_.table, shape_.kv_heads, slot, tile.head, j);
      stretch(j, stop, keys.cache.k, keys.cache.v, at, 0);
      j = stop;
    }
    if (j < end) stretch(j, end, keys.k, keys.v, rows.row[tile.run] + j - own, tile.head * hd);
  }

  // Queries n .. n + N - 1 see keys [at.begin, at.end) of the block.
  template <int N>
  void block_of(size_t n, KeyInterval at, const T* const* k, const T* const* v, const Workspace& w) const {
    auto* const p = reinterpret_cast<float*>(w.block);
    scores<T, N>(w.q + int64_t(n) * width_, width_, shape_.head_dim, k, at.begin, at.end, p, kScoreStride);
    for (int i = 0; i < N; ++i)
      scale_row(w.part + (int64_t(n) + i) * width_, width_,
                weights_of_block(p + i * kScoreStride, at, w.part_state[n + size_t(i)]));
    add_values<T, N>(p, kScoreStride, v, at.begin, at.end, shape_.head_dim, w.part + int64_t(n) * width_,
                     width_);
  }

  void join(const Workspace& w, const Softmax* part_state, const float* part, size_t n) const {
    const Softmax fresh = part_state[n];
    Softmax& total = w.total_state[n];
    if (fresh.sum == 0) return;
    const float top = std::max(total.top, fresh.top);
    const float old = total.top == -INFINITY ? 0.0F : fast_exp(total.top - top),
                now = fast_exp(fresh.top - top);
    join_rows(w.total + int64_t(n) * width_, part + int64_t(n) * width_, width_, old, now);
    total = {top, std::fma(fresh.sum, now, total.sum * old)};
  }

  void write(const std::vector<Query>& queries, const Workspace& w) const {
    for (size_t n = 0; n < queries.size(); ++n) {
      const Query& q = queries[n];
      T* to = queries_[q.stream].o.template row<T>(q.row) + q.head * shape_.head_dim;
      const float* from = w.total + int64_t(n) * width_;
#ifdef SPS_AMX
      if constexpr (kTiles) Tiles::in_order(std::exchange(from, w.q), width_, w.q);
#endif
      const float sum = w.total_state[n].sum, factor = sum == 0 ? 0.0F : 1 / sum;
      // Tiles leave zeros of either sign, which depends on the query's neighbours.
      for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] = from_f32<T>(from[d] * factor + 0.0F);
    }
  }

  const DecodeShape& shape_;
  const DecodeStep& step_;
  const DecodeQuerySet& queries_;
  const DecodeKeySets& keys_;
  const int64_t group_, width_;
  const int64_t most_;  // queries of a tile, in whole 32
  std::vector<Tile> tiles_;
};

template <class T>
void keep_rows(int64_t hd, const DecodeStep& step, const DecodeKeys& keys) {
  const int64_t kv_heads = keys.k.cols / hd;
  const StepRows& rows = step.stream[size_t(keys.stream)];
  parallel_for(step.runs, [&](int64_t run) {
    for_kept_rows(rows, keys.cache, size_t(run), [&](int64_t row, int64_t position) {
      for (int64_t head = 0; head < kv_heads; ++head) {
        const int64_t at =
            cache_row(keys.cache, step.table, kv_heads, step.slot[size_t(run)], head, position);
        std::copy_n(keys.k.row<T>(row) + head * hd, hd, keys.cache.k.row<T>(at));
        std::copy_n(keys.v.row<T>(row) + head * hd, hd, keys.cache.v.row<T>(at));
      }
    });
  });
}

}  // namespace

void decode_attention_cpu(const DecodeShape& shape, const DecodeStep& step, const DecodeQuerySet& queries,
                          const DecodeKeySets& keys) {
  const DType act = queries[0].q ? queries[0].q.dtype : queries[1].q.dtype;
#ifdef SPS_AMX
  if (act == DType::bf16 && amx_permitted()) return Decode<bf16, true>(shape, step, queries, keys).run();
#endif
  with_type(act, [&](auto zero) { Decode<decltype(zero), false>(shape, step, queries, keys).run(); });
}

void keep_keys_cpu(int64_t head_dim, const DecodeStep& step, const DecodeKeys& keys) {
  if (keys.k.dtype == DType::f64) return keep_rows<double>(head_dim, step, keys);
  with_type(keys.k.dtype, [&](auto zero) { keep_rows<decltype(zero)>(head_dim, step, keys); });
}

}  // namespace sps::ops
