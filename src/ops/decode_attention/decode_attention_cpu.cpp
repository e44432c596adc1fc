// Decoding is bound by the bytes of the keys, so a piece of work is one key head of a few neighbouring
// positions of a sequence: their queries (both streams, all heads of the group) take every key while it is in
// cache. Keys are visited in blocks of 64 positions, counted from the sequence's first one whatever the step
// begins with, and blocks in segments of 1024: a segment has a softmax of its own, and segments are joined in
// order. So the bits do not depend on how the work is cut, and few long sequences can be spread over many
// threads.
#include <cmath>
#include <tuple>
#include <vector>

#include "base/threads.h"
#include "ops/decode_attention/decode_attention_kernels.h"
#include "ops/dot_lanes.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops {

namespace {

constexpr int64_t kBlock = 64, kSegment = 1024;
constexpr int64_t kTileQueries = 32;  // of a piece of work, unless one position has more
constexpr int64_t kPieces = 64;       // with fewer pieces than this, segments are pieces of their own

int64_t pad(int64_t n) {
  return (n + kFloats - 1) / kFloats * kFloats;
}

// A query, and the softmax over the keys that it has seen so far.
struct Query {
  size_t stream;
  int64_t row, head, position, document_start;
};
struct Softmax {
  float top, sum;
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

// out[n][j] = q[n] . k[j] for a <= j < b; q is padded with zeros, out has room for kFloats more.
template <class T, int N>
void scores(const float* q, int64_t q_stride, int64_t hd, const T* const* k, int64_t a, int64_t b, float* out,
            int64_t out_stride) {
  const int64_t whole = hd / kFloats * kFloats;
  Floats sums[N][kFloats];
  for (int64_t from = a; from < b; from += kFloats) {
    const int64_t count = std::min<int64_t>(kFloats, b - from);
    for (int64_t j = 0; j < kFloats; ++j) {
      Floats sum[N] = {};
      if (j < count) {
        const T* key = k[from + j];
        for (int64_t d = 0; d < whole; d += kFloats) {
          const Floats v = load_floats(key + d);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sum[n] += v * load_floats(q + n * q_stride + d);
        }
        if (whole < hd) {
          const Floats v = load_floats(key + whole, hd - whole);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sum[n] += v * load_floats(q + n * q_stride + whole);
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n][j] = sum[n];
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_floats(out + n * out_stride + from, sums_of_vectors(sums[n]));
  }
}

// o[n] += sum over a <= j < b of p[n][j] v[j], Chunks vectors of columns at a time.
template <class T, int N, int Chunks>
[[gnu::always_inline]] inline void add_columns(const float* p, int64_t p_stride, const T* const* v, int64_t a,
                                               int64_t b, int64_t d, int64_t cols, float* o,
                                               int64_t o_stride) {
  Floats sum[N][Chunks];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c) sum[n][c] = load_floats(o + n * o_stride + d + c * kFloats);
  for (int64_t j = a; j < b; ++j) {
    Floats value[Chunks];
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c)
      value[c] = cols < kFloats ? load_floats(v[j] + d, cols) : load_floats(v[j] + d + c * kFloats);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
      for (int c = 0; c < Chunks; ++c) sum[n][c] += value[c] * p[n * p_stride + j];
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c) store_floats(o + n * o_stride + d + c * kFloats, sum[n][c]);
}
template <class T, int N>
void add_values(const float* p, int64_t p_stride, const T* const* v, int64_t a, int64_t b, int64_t hd,
                float* o, int64_t o_stride) {
  int64_t d = 0;
  for (; d + 4 * kFloats <= hd; d += 4 * kFloats)
    add_columns<T, N, 4>(p, p_stride, v, a, b, d, kFloats, o, o_stride);
  for (; d < hd; d += kFloats)
    add_columns<T, N, 1>(p, p_stride, v, a, b, d, std::min<int64_t>(kFloats, hd - d), o, o_stride);
}

[[gnu::noinline]] void scale_row(float* o, int64_t n, float factor) {
  for (int64_t d = 0; d < n; ++d) o[d] *= factor;
}
// total = total * old + part * fresh
[[gnu::noinline]] void join_rows(float* total, const float* part, int64_t n, float old, float fresh) {
  for (int64_t d = 0; d < n; ++d) total[d] = std::fma(part[d], fresh, total[d] * old);
}

float sum_of_block(const float* p) {
  Floats sum = load_floats(p);
  for (int64_t j = kFloats; j < kBlock; j += kFloats) sum += load_floats(p + j);
  for (int half = kFloats / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  return sum[0];
}

// Memory of a piece of work.
struct Workspace {
  float *q, *part, *total, *p;  // [queries, padded head_dim] each; p [kMost, kBlock + kFloats]
  Softmax *part_state, *total_state;
};

template <class T>
class Decode {
 public:
  Decode(const DecodeShape& shape, const DecodeStep& step, const DecodeQuerySet& queries,
         const DecodeKeySets& keys)
      : shape_(shape),
        step_(step),
        queries_(queries),
        keys_(keys),
        group_(shape.heads / shape.kv_heads),
        width_(pad(shape.head_dim)) {
    const int64_t positions = std::max<int64_t>(1, kTileQueries / (kMaxQueryStreams * group_));
    most_ = positions * kMaxQueryStreams * group_;
    for (size_t run = 0; run < size_t(step.runs); ++run) {
      int64_t begin = 0, end = 0;
      for (size_t s = 0; s < queries.size(); ++s) {
        if (!queries[s].q || step.stream[s].count[run] == 0) continue;
        const int64_t first = step.stream[s].begin[run], last = first + step.stream[s].count[run];
        begin = end == 0 ? first : std::min(begin, first), end = std::max(end, last);
      }
      for (int64_t at = begin; at < end; at += positions)
        for (int64_t head = 0; head < shape.kv_heads; ++head)
          tiles_.push_back({run, at, std::min(at + positions, end), head});
    }
  }

  void run() const {
    if (int64_t(tiles_.size()) >= kPieces) {
      parallel_for(int64_t(tiles_.size()), [&](int64_t i) {
        const Tile& tile = tiles_[size_t(i)];
        const std::vector<Query> queries = queries_of(tile);
        const Workspace w = workspace(thread_scratch(ScratchSlot::kernel, workspace_bytes()));
        load_queries(queries, w.q);
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
      load_queries(queries, w.q);
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
  size_t workspace_bytes() const {
    const auto rows = size_t(most_);
    return (3 * rows * size_t(width_) + 4 * size_t(kBlock + kFloats)) * sizeof(float) +
           2 * rows * sizeof(Softmax);
  }
  Workspace workspace(std::byte* memory) const {
    Workspace w{};
    const int64_t rows = most_ * width_;
    w.q = reinterpret_cast<float*>(memory);
    w.part = w.q + rows, w.total = w.part + rows, w.p = w.total + rows;
    w.part_state = reinterpret_cast<Softmax*>(w.p + 4 * (kBlock + kFloats));
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
  void load_queries(const std::vector<Query>& queries, float* to) const {
    for (const Query& q : queries) {
      const T* from = queries_[q.stream].q.template row<T>(q.row) + q.head * shape_.head_dim;
      for (int64_t d = 0; d < width_; ++d)
        to[d] = d < shape_.head_dim ? shape_.scale * to_f32(from[d]) : 0.0F;
      to += width_;
    }
  }

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
    bool which = false;
    if (begin < end) find(begin / kBlock * kBlock, which);
    for (int64_t block = begin / kBlock * kBlock; block < end; block += kBlock, which = !which) {
      // Memory brings the values while the scores are computed, and the next keys while the values are added
      // up.
      const T *const *k = keys[which], *const *v = values[which];
      ask_for(block, v);
      if (block + kBlock < end) find(block + kBlock, !which), ask_for(block + kBlock, keys[!which]);
      for (size_t n = 0; n < queries.size();) {
        const auto inside = [&](size_t i) {
          return KeyInterval{std::max(seen[i].begin, block) - block,
                             std::min(seen[i].end, block + kBlock) - block};
        };
        const KeyInterval at = inside(n);
        size_t same = 1;
        while (same < 4 && n + same < queries.size() && inside(n + same).begin == at.begin &&
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
    constexpr int64_t stride = kBlock + kFloats;
    scores<T, N>(w.q + int64_t(n) * width_, width_, shape_.head_dim, k, at.begin, at.end, w.p, stride);
    for (int i = 0; i < N; ++i) {
      float* p = w.p + i * stride;
      Softmax& state = w.part_state[n + size_t(i)];
      float top = state.top;
      for (int64_t j = at.begin; j < at.end; ++j) top = std::max(top, p[j]);
      for (int64_t j = 0; j < kBlock; ++j)
        if (j < at.begin || j >= at.end) p[j] = -INFINITY;
      // Where every score is -inf there is nothing to subtract; a NaN comes out as one either way.
      const float base = top == -INFINITY ? 0.0F : top;
      for_lanes(kBlock, [&](int64_t j, auto mask) {
        store_lanes(p + j, fast_exp(load_lanes(p + j, mask) - base), mask);
      });
      const float old = state.top == -INFINITY ? 0.0F : fast_exp(state.top - base);
      state = {top, std::fma(state.sum, old, sum_of_block(p))};
      scale_row(w.part + (int64_t(n) + i) * width_, width_, old);
    }
    add_values<T, N>(w.p, stride, v, at.begin, at.end, shape_.head_dim, w.part + int64_t(n) * width_, width_);
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
      const float sum = w.total_state[n].sum, factor = sum == 0 ? 0.0F : 1 / sum;
      for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] = from_f32<T>(from[d] * factor);
    }
  }

  const DecodeShape& shape_;
  const DecodeStep& step_;
  const DecodeQuerySet& queries_;
  const DecodeKeySets& keys_;
  const int64_t group_, width_;
  int64_t most_ = 0;  // queries of a tile
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
  with_type(act, [&](auto zero) { Decode<decltype(zero)>(shape, step, queries, keys).run(); });
}

void keep_keys_cpu(int64_t head_dim, const DecodeStep& step, const DecodeKeys& keys) {
  if (keys.k.dtype == DType::f64) return keep_rows<double>(head_dim, step, keys);
  with_type(keys.k.dtype, [&](auto zero) { keep_rows<decltype(zero)>(head_dim, step, keys); });
}

}  // namespace sps::ops
