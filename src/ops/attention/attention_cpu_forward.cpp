// Forward: blocks of queries, each against all the keys it sees at once (a chunk of them, if there are many).
// Scores are rows of queries, so that each row has one maximum, one pass of exponentials and one sum, and the
// probabilities are an operand of the product with v as they are; only rows cut into chunks are rescaled.
#include <cmath>

#include "ops/attention/attention_cpu.h"

namespace sps::ops {

namespace attention {

namespace {

// Most keys of a chunk: longer rows are worked off in several, with an online softmax over the chunks.
constexpr int64_t kChunk = 512;
constexpr int kRows = 4;           // rows of scores that are worked on at once
constexpr int64_t kRowsAhead = 1;  // rows to fetch per row of scores

struct Segment {  // keys of one set, at `column` of the chunk
  size_t set;
  Range keys;  // multiples of kBlock
  int64_t column;
  int64_t size() const { return keys.end - keys.begin; }
};

// A block of queries of one stream and head, and a chunk of keys.
struct Item {
  size_t stream = 0;
  int64_t query = 0, queries = 0, head = 0;
  Segment segments[kMaxKeySets];
  int count = 0;
  int64_t columns = 0;
  bool first = false, last = false;  // of the chunks of this block
  std::array<VisibleOf<kBlock>, kMaxKeySets> visible;

  void add(size_t set, Range keys) {
    if (keys.empty()) return;
    segments[count++] = {set, keys, columns};
    columns += keys.end - keys.begin;
  }
};

// The state of a block of queries: running maximum and sum; and what a chunk leaves for the output: the
// factor for what is there from the chunks before, and that of the finished sum.
struct Softmax {
  alignas(64) float m[kBlock], l[kBlock], shrink[kBlock], inverse[kBlock];
};

template <class Engine>
struct ForwardMemory {
  using Elem = typename Engine::Elem;
  // Per key set and head: per tile of keys k^T [dim, kTile] as B, and whether v has only finite numbers; v
  // [keys, dim] as B.
  std::array<Elem*, kMaxKeySets> kt, v;
  std::array<bool*, kMaxKeySets> finite;
  std::array<int64_t, kMaxKeySets> tiles;  // of a head
  Elem *rows, *q;                          // [kTile, dim], [kBlock, dim]
  int64_t s_stride, p_stride;              // not powers of two: rows must not share cache sets
  // [kBlock, columns] both, in the same memory: a row of probabilities replaces the beginning of its scores,
  // which saves the first-level cache from writing as much again to the second.
  float* s;
  Elem* p;
  float* o;                  // [kBlock, dim]
  float *m, *sums, *sums_t;  // [kBlock], [kBlock, kLanes], [kLanes, kBlock]

  ForwardMemory(Carver& carver, const std::array<Range, kMaxKeySets>& keys, int64_t heads, int64_t dim,
                bool skip) {
    int64_t all = 0;
    for (size_t i = 0; i < kMaxKeySets; ++i) {
      tiles[i] = tiles_of(keys[i].end - keys[i].begin);
      kt[i] = carver.take<Elem>(heads * tiles[i] * kTile * dim);
      v[i] = carver.take<Elem>(heads * tiles[i] * kTile * dim);
      finite[i] = carver.take<bool>(heads * tiles[i]);
      all += tiles[i] * kTile;
    }
    rows = carver.take<Elem>(kTile * dim);
    q = carver.take<Elem>(kBlock * dim);
    const int64_t columns = skip ? std::min(all, kChunk) : all;
    s_stride = columns + 16;
    s = carver.take<float>(kBlock * s_stride);
    p = reinterpret_cast<Elem*>(s);
    p_stride = s_stride * int64_t(sizeof(float) / sizeof(Elem));
    o = carver.take<float>(kBlock * dim);
    m = carver.take<float>(kBlock);
    sums = carver.take<float>(kBlock * kLanes);
    sums_t = carver.take<float>(kBlock * kLanes);
  }
};

// The keys of a segment that some rows of scores read, counted from the segment's first.
struct SeenKeys {
  int32_t begin[kRows], end[kRows];
  Range blocks, all;  // what one row sees, rounded to multiples of kBlock; what all see

  void set(const Segment& segment, const VisibleOf<kBlock>& visible, int64_t row) {
    const auto first = int32_t(segment.keys.begin), size = int32_t(segment.size());
    int32_t low = size, high = 0, all_low = 0, all_high = size;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const int32_t b = std::max(visible.begin[row + r] - first, 0);
      const int32_t e = std::min(visible.end[row + r] - first, size);
      begin[r] = b, end[r] = e;
      low = b < e ? std::min(low, b) : low;
      high = b < e ? std::max(high, e) : high;
      all_low = std::max(all_low, b), all_high = std::min(all_high, e);
    }
    blocks = low < high ? Range{low / kBlock * kBlock, round_up(high, kBlock)} : Range{0, 0};
    all = all_low < all_high ? Range{all_low, all_high} : Range{blocks.end, 0};
  }
  // Calls body(first key, masked) for the blocks; `masked` is a compile-time constant, true where some row
  // does not see all of the block.
  template <class Body>
  [[gnu::always_inline]] void for_blocks(Body&& body) const {
    int64_t j = blocks.begin;
    for (; j < std::min(all.begin, blocks.end); j += kBlock) body(j, std::true_type());
    for (; j + kBlock <= all.end; j += kBlock) body(j, std::false_type());
    for (; j < blocks.end; j += kBlock) body(j, std::true_type());
  }
  // All ones in the lanes of those of the keys [key, key + kLanes) that row r sees.
  IntVec lanes(int r, int64_t key) const {
    IntVec j;
    for (int i = 0; i < kLanes; ++i) j[i] = i;
    j += int32_t(key);
    return (j >= begin[r]) & (j < end[r]);
  }
};

template <class Engine, class T>
class ForwardPiece {
  using Elem = typename Engine::Elem;

 public:
  ForwardPiece(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
               const Piece& piece, int64_t key_heads)
      : shape_(shape),
        queries_(queries),
        keys_(keys),
        piece_(piece),
        key_heads_(key_heads),
        group_(shape.heads / shape.kv_heads),
        hd_(shape.head_dim),
        dim_(round_up(shape.head_dim, Engine::kPad)),
        base_(piece.sequence * shape.length),
        scale_(broadcast(shape.scale * kLog2e)),
        used_(keys_of_piece(shape, queries, keys, piece)),
        mem_(carve([&](Carver& carver) {
          return ForwardMemory<Engine>(carver, used_, key_heads, dim_, shape.skip_tiles);
        })) {}

  void run() {
    load_keys();
    const int64_t first = piece_.key_head * group_, heads = key_heads_ * group_;
    for (int64_t q = piece_.queries.begin; q < piece_.queries.end; q += kBlock) {
      // What the next block reads and this one writes.
      ahead_ = RowsAhead();
      const int64_t rows = std::min(kBlock, piece_.queries.end - q), next = q + kBlock,
                    next_rows = std::clamp<int64_t>(piece_.queries.end - next, 0, kBlock);
      for (const QueryStream& stream : queries_) {
        ahead_.add(stream.o, base_ + q, rows, first * hd_, heads * hd_);
        ahead_.add(stream.q, base_ + next, next_rows, first * hd_, heads * hd_);
      }
      for (size_t t = 0; t < queries_.size(); ++t)
        for (int64_t h = first; queries_[t].q && h < first + heads; ++h) for_chunks(t, q, h);
    }
  }

 private:
  void load_keys() {
    for (size_t s = 0; s < keys_.size(); ++s) {
      for (int64_t j = used_[s].begin; j < used_[s].end; j += kTile) {
        const int64_t n = std::min(kTile, shape_.length - j), padded = round_up(n, kBlock);
        for (int64_t h = 0; h < key_heads_; ++h) {
          const int64_t tile = h * mem_.tiles[s] + (j - used_[s].begin) / kTile, at = tile * kTile * dim_;
          const auto load = [&](Elem* to, const Tensor& x) {
            return Engine::load_rows(to, x.row<T>(base_ + j) + (piece_.key_head + h) * hd_, x.stride, n,
                                     padded, hd_, dim_);
          };
          load(mem_.rows, keys_[s].k);
          Engine::transposed_b(mem_.kt[s] + at, mem_.rows, padded, dim_);
          mem_.finite[s][tile] = load(Engine::kOneLayout ? mem_.v[s] + at : mem_.rows, keys_[s].v);
          Engine::as_b(mem_.v[s] + at, mem_.rows, padded, dim_);
        }
      }
    }
  }
  // The first of the tiles of a query head in key set s.
  int64_t tiles_of_head(size_t s, int64_t head) const {
    return (head / group_ - piece_.key_head) * mem_.tiles[s];
  }

  // One block of queries, with its keys in chunks. How they are cut depends on what is visible, whatever is
  // visited besides.
  void for_chunks(size_t stream, int64_t query, int64_t head) {
    Item item;
    item.stream = stream, item.query = query, item.head = head;
    item.queries = std::min(kBlock, piece_.queries.end - query);
    std::array<Range, kMaxKeySets> seen, visit;
    for (size_t s = 0; s < seen.size(); ++s) {
      VisibleOf<kBlock>& visible = item.visible[s];
      visible.set(shape_, piece_.sequence, queries_[stream].band[s], query, item.queries);
      seen[s] = {visible.any.begin / kBlock * kBlock, round_up(visible.any.end, kBlock)};
      visit[s] = shape_.skip_tiles ? seen[s] : Range{used_[s].begin, round_up(used_[s].end, kBlock)};
      if (seen[s].empty()) seen[s] = {visit[s].begin, visit[s].begin};
    }
    item.first = true;
    size_t s = 0;
    int64_t at = seen[0].begin;
    while (!item.last) {
      item.count = 0, item.columns = 0;
      for (int64_t left = kChunk; s < seen.size();) {
        const int64_t end = std::min(at + left, seen[s].end);
        item.add(s, {at == seen[s].begin ? visit[s].begin : at, end == seen[s].end ? visit[s].end : end});
        left -= end - at;
        at = end;
        if (at < seen[s].end) break;
        if (++s < seen.size()) at = seen[s].begin;
      }
      item.last = s == seen.size();
      scores(item);
      for (int64_t row = 0; row < kBlock; row += kRows) {
        softmax_rows(item, row);
        ahead_.fetch(kRows * kRowsAhead);
      }
      finish_softmax(item);
      output(item);
      item.first = false;
    }
  }

  // s = q k^T.
  void scores(const Item& item) {
    const Tensor& q = queries_[item.stream].q;
    Engine::load_rows(mem_.q, q.row<T>(base_ + item.query) + item.head * hd_, q.stride, item.queries, kBlock,
                      hd_, dim_);
    float* to = mem_.s;
    for (int i = 0; i < item.count; ++i) {
      const Segment& segment = item.segments[i];
      for (int64_t j = segment.keys.begin; j < segment.keys.end;) {
        const int64_t at = j - used_[segment.set].begin,
                      n = std::min(kTile - at % kTile, segment.keys.end - j);
        const Elem* kt = mem_.kt[segment.set] +
                         (tiles_of_head(segment.set, item.head) + at / kTile) * kTile * dim_ +
                         at % kTile * Engine::kPack;
        Engine::template product<false>(kBlock, n, dim_, mem_.q, dim_, kt, kTile,
                                        to + segment.column + j - segment.keys.begin, mem_.s_stride);
        j += n;
      }
    }
  }

  // p = exp2(c s - m) of a few rows, with m their new maxima. Several at a time: a row is short, and the
  // steps to its maximum wait for one another.
  [[gnu::noinline]] void softmax_rows(const Item& item, int64_t row) {
    const int64_t s_stride = mem_.s_stride, p_stride = mem_.p_stride;
    const float* s = mem_.s + row * s_stride;
    Elem* p = mem_.p + row * p_stride;
    const Vec nothing = broadcast(-INFINITY), scale = scale_;
    SeenKeys seen[kMaxKeySets];
    Vec top[kRows], shift[kRows], sum[kRows] = {};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) top[r] = item.first ? nothing : broadcast(state_.m[row + r]);
    for (int i = 0; i < item.count; ++i) {
      const Segment& segment = item.segments[i];
      seen[i].set(segment, item.visible[segment.set], row);
      const float* from = s + segment.column;
      seen[i].for_blocks([&](int64_t j, auto masked) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            Vec x = load(from + r * s_stride + j + v * kLanes) * scale;
            if constexpr (masked) x = seen[i].lanes(r, j + v * kLanes) ? x : nothing;
            top[r] = greater(top[r], x);
          }
        }
      });
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec m = greatest(top[r]);
      mem_.m[row + r] = m[0];
      shift[r] = m == nothing ? Vec{} : m;
    }
    for (int i = 0; i < item.count; ++i) {
      const Segment& segment = item.segments[i];
      const float* from = s + segment.column;
      Elem* to = p + segment.column;
      seen[i].for_blocks([&](int64_t j, auto masked) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          Vec x[kVectors];
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            x[v] = exp2<Engine::kExpDegree>(load(from + r * s_stride + j + v * kLanes) * scale - shift[r]);
            if constexpr (masked) x[v] = seen[i].lanes(r, j + v * kLanes) ? x[v] : Vec{};
            sum[r] += x[v];
          }
          Engine::put_a(to, p_stride, r, j, x);
        }
      });
      const Vec zeros[kVectors] = {};
      const auto zero = [&](int64_t begin, int64_t end) {
        for (int64_t j = begin; j < end; j += kBlock)
          for (int r = 0; r < kRows; ++r) Engine::put_a(to, p_stride, r, j, zeros);
      };
      zero(0, seen[i].blocks.begin);
      zero(seen[i].blocks.end, segment.size());
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) store(mem_.sums + (row + r) * kLanes, sum[r]);
  }

  void finish_softmax(const Item& item) {
    transpose(reinterpret_cast<const uint32_t*>(mem_.sums), kLanes, reinterpret_cast<uint32_t*>(mem_.sums_t),
              kBlock, kBlock, kLanes);
    alignas(64) float lse[kBlock];
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Vec m = load(mem_.m + i), shift = m == broadcast(-INFINITY) ? Vec{} : m;
      Vec l{};
      for (int64_t lane = 0; lane < kLanes; ++lane) l += load(mem_.sums_t + lane * kBlock + i);
      if (!item.first) {
        const Vec shrink = exp2<Engine::kExpDegree>(load(state_.m + i) - shift);
        l += load(state_.l + i) * shrink;
        store(state_.shrink + i, shrink);
      }
      store(state_.m + i, m);
      store(state_.l + i, l);
      store(state_.inverse + i, l == Vec{} ? Vec{} : 1.0F / l);
      store(lse + i, l == Vec{} ? broadcast(-INFINITY) : (m + log2(l)) * kLn2);
    }
    if (!item.last) return;
    for (int64_t i = 0; i < item.queries; ++i)
      queries_[item.stream].lse.template row<float>(base_ + item.query + i)[item.head] = lse[i];
  }

  // o = p v, added to that of the chunks before.
  void output(const Item& item) {
    const Elem* p = mem_.p;
    if (item.first && (item.count == 0 || !all_values_finite(item))) std::fill_n(mem_.o, kBlock * dim_, 0.0F);
    if (!item.first)
      for (int64_t r = 0; r < kBlock; ++r)
        write_row(mem_.o + r * dim_, mem_.o + r * dim_, dim_, state_.shrink[r]);
    bool add = !item.first;
    for (int i = 0; i < item.count; ++i, add = true) {
      const Segment& segment = item.segments[i];
      const Elem* v = mem_.v[segment.set] + (tiles_of_head(segment.set, item.head) * kTile +
                                             segment.keys.begin - used_[segment.set].begin) *
                                                dim_;
      if (!all_values_finite(item))
        product_of_visible<Engine>(kBlock, dim_, segment.size(), p + segment.column, mem_.p_stride, v, dim_,
                                   mem_.o, dim_, [&](int64_t query, int64_t key, int64_t) {
                                     return item.visible[segment.set].at(query, segment.keys.begin + key);
                                   });
      else if (add)
        Engine::template product<true>(kBlock, dim_, segment.size(), p + segment.column, mem_.p_stride, v,
                                       dim_, mem_.o, dim_);
      else
        Engine::template product<false>(kBlock, dim_, segment.size(), p + segment.column, mem_.p_stride, v,
                                        dim_, mem_.o, dim_);
    }
    if (!item.last) return;
    const Tensor& o = queries_[item.stream].o;
    for (int64_t r = 0; r < item.queries; ++r)
      write_row(o.row<T>(base_ + item.query + r) + item.head * hd_, mem_.o + r * dim_, hd_,
                state_.inverse[r]);
  }
  bool all_values_finite(const Item& item) const {
    for (int i = 0; i < item.count; ++i) {
      const auto [set, keys, column] = item.segments[i];
      const int64_t first = (keys.begin - used_[set].begin) / kTile;
      for (int64_t tile = first; tile < tiles_of(keys.end - used_[set].begin); ++tile)
        if (!mem_.finite[set][tiles_of_head(set, item.head) + tile]) return false;
    }
    return true;
  }

  const AttentionShape& shape_;
  const QueryStreams& queries_;
  const KeySets& keys_;
  const Piece piece_;
  const int64_t key_heads_, group_;  // heads of keys from piece_.key_head on; heads of queries for each
  const int64_t hd_, dim_, base_;    // head_dim, padded; first row of the sequence
  const Vec scale_;
  [[maybe_unused]] typename Engine::Session session_;
  const std::array<Range, kMaxKeySets> used_;
  const ForwardMemory<Engine> mem_;
  RowsAhead ahead_;
  Softmax state_;
};

}  // namespace

}  // namespace attention

void attention_forward_cpu(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys) {
  using namespace attention;
  // A few long sequences are cut along their queries too; each piece lays out the keys it reads anew, so not
  // finer.
  constexpr int64_t kEnough = 32;
  const int64_t heads = shape.kv_heads, all = shape.batch * heads;
  if (all * shape.length == 0) return;
  const std::vector<Range> parts = cut(shape.length, std::min((kEnough + all - 1) / all, shape.length / 256));
  // Neighbouring heads in one piece, as far as there is work for all threads besides and their keys stay in
  // the second-level cache: then whole rows are read and written, in the order in which they lie in memory.
  constexpr int64_t kMostBytes = 3 << 18;
  const int64_t sets = std::count_if(keys.begin(), keys.end(), [](const KeySet& set) { return bool(set.k); });
  const int64_t bytes = 2 * sets * shape.length * shape.head_dim * int64_t(dtype_size(act_dtype(queries)));
  const int64_t size =
      std::clamp<int64_t>(std::min(all / kEnough, kMostBytes / std::max<int64_t>(bytes, 1)), 1, heads);
  const int64_t groups = (heads + size - 1) / size, count = int64_t(parts.size());
  with_engine(act_dtype(queries), [&](auto engine, auto element) {
    parallel_for(shape.batch * groups * count, [&](int64_t i) {
      const int64_t head = i / count % groups * size;
      ForwardPiece<decltype(engine), decltype(element)>(
          shape, queries, keys, Piece{i / count / groups, head, parts[size_t(i % count)], {0, shape.length}},
          std::min(size, heads - head))
          .run();
    });
  });
}

}  // namespace sps::ops
