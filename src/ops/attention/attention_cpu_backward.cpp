// Backward: probabilities are computed again from the saved log-sum-exp. A piece owns the key gradients of
// one key head, or the query gradients of its query heads, or both, and adds to them in a fixed order.
#include <algorithm>
#include <cmath>

#include "ops/attention/attention_cpu.h"

namespace sps::ops {

namespace attention {

namespace {

// Queries and keys of a panel: their probabilities are kept, so that each gradient adds up over a whole panel
// in tile registers rather than tile by tile in memory.
constexpr int64_t kPanel = 256, kPanelTiles = kPanel / kTile, kPanelBlocks = kPanel / kBlock;
constexpr int64_t kPanelStride = kPanel + 32;  // not a power of two: rows must not share cache sets

template <class Engine>
struct BackwardMemory {
  using Elem = typename Engine::Elem;
  // Per key set: k, v [keys, dim] and k^T [dim, keys] as A; dk, dv [keys, dim]; per tile of keys: k finite?
  // Per block of keys: do dk and dv hold anything?
  std::array<Elem*, kMaxKeySets> k, v, kt;
  std::array<int64_t, kMaxKeySets> kt_stride;
  std::array<float*, kMaxKeySets> dk, dv;
  std::array<bool*, kMaxKeySets> finite, started;
  // A panel of queries: rows, B [kPanel, dim], and per tile of queries B of the transpose [dim, kTile].
  Elem *q, *q_b, *qt, *d_o, *d_o_b, *d_ot;
  Elem *p, *ds_a;            // a tile of keys across the panel of queries, [kTile, kPanelStride]
  Elem* ds_b;                // a panel of keys across the panel of queries, [kPanel, kPanelStride]
  float *s, *dp, *dqt, *dq;  // [kTile, kBlock] twice, [dim, kPanelStride], [kTile, dim]

  BackwardMemory(Carver& carver, const std::array<Range, kMaxKeySets>& keys, int64_t dim) {
    for (size_t i = 0; i < kMaxKeySets; ++i) {
      const int64_t tiles = tiles_of(keys[i].end - keys[i].begin), size = tiles * kTile * dim;
      kt_stride[i] = tiles * kTile + 32;
      k[i] = carver.take<Elem>(size);
      v[i] = carver.take<Elem>(size);
      kt[i] = carver.take<Elem>(dim * kt_stride[i]);
      dk[i] = carver.take<float>(size);
      dv[i] = carver.take<float>(size);
      finite[i] = carver.take<bool>(tiles);
      started[i] = carver.take<bool>(tiles * (kTile / kBlock));
    }
    for (Elem** panel : {&q, &qt, &d_o, &d_ot}) *panel = carver.take<Elem>(kPanel * dim);
    q_b = Engine::kOneLayout ? q : carver.take<Elem>(kPanel * dim);
    d_o_b = Engine::kOneLayout ? d_o : carver.take<Elem>(kPanel * dim);
    for (Elem** strip : {&p, &ds_a}) *strip = carver.take<Elem>(kTile * kPanelStride);
    ds_b = carver.take<Elem>(kPanel * kPanelStride);
    for (float** block : {&s, &dp}) *block = carver.take<float>(kTile * kBlock);
    dqt = carver.take<float>(dim * kPanelStride);
    dq = carver.take<float>(kTile * dim);
  }
};

inline void zero(float* c, int64_t ldc, int64_t rows, int64_t cols) {
  for (int64_t r = 0; r < rows; ++r) std::fill_n(c + r * ldc, cols, 0.0F);
}

struct RowStatistics {
  alignas(64) float lse[kPanel], delta[kPanel];  // lse in units of log 2; delta = d_o . o
};

// p = exp2(c s - lse) and ds = p (dp - delta) for a block of queries of a run, exactly zero where masked.
// s and dp [keys, kBlock]; query i of the tile has the statistics lse[0 .. kBlock) and delta. p and ds_a
// start at the block's first query of the tile's first key, likewise ds_b.
template <class Engine>
void softmax_backward(const Run& run, int64_t i, const Visible& visible, int64_t first_key, float c,
                      const float* lse_of, const float* delta_of, const float* s, const float* dp,
                      typename Engine::Elem* to_p, typename Engine::Elem* to_ds_a,
                      typename Engine::Elem* to_ds_b) {
  const Vec scale = broadcast(c);
  Vec lse[kVectors], delta[kVectors];
  for (int v = 0; v < kVectors; ++v)
    lse[v] = load(lse_of + v * kLanes), delta[v] = load(delta_of + v * kLanes);
  for_key_pairs(run, [&](int64_t j, auto masked) {
    Vec p[2][kVectors], ds[2][kVectors];
#pragma GCC unroll 2
    for (int e = 0; e < 2; ++e) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = (j + e) * kBlock + v * kLanes;
        p[e][v] = exp2<Engine::kExpDegree>(load(s + at) * scale - lse[v]);
        ds[e][v] = p[e][v] * (load(dp + at) - delta[v]);
        if constexpr (masked) {
          const IntVec seen = lanes_that_see(visible, i + v * kLanes, first_key + j + e);
          p[e][v] = seen ? p[e][v] : Vec{};
          ds[e][v] = seen ? ds[e][v] : Vec{};
        }
      }
      Engine::put_a(to_p, kPanelStride, j + e, 0, p[e]);
      Engine::put_a(to_ds_a, kPanelStride, j + e, 0, ds[e]);
    }
    if constexpr (!Engine::kOneLayout) Engine::put_b(to_ds_b, kPanelStride, j, 0, ds[0], ds[1]);
  });
}

// Extends what is known of a row or column of blocks to [begin, end), and calls zero(b, e) for a gap.
template <class Zero>
void extend(Range& known, int64_t begin, int64_t end, Zero&& zero) {
  if (known.empty())
    known.begin = begin;
  else if (known.end < begin)
    zero(known.end, begin);
  known.end = end;
}

// Zeros the block of columns at x of rows [begin, end), in A layout (pack 1) or B (Engine::kPack).
template <class Elem>
void zero_block(Elem* x, int64_t begin, int64_t end, int64_t pack) {
  for (int64_t r = begin; r < end; r += pack) std::fill_n(x + r * kPanelStride, kBlock * pack, Elem());
}

template <class T>
void row_statistics(const QueryStream& stream, const QueryGrad& grad, int64_t row, int64_t n, int64_t head,
                    int64_t hd, RowStatistics& rows) {
  std::fill_n(rows.lse, kPanel, 0.0F);
  std::fill_n(rows.delta, kPanel, 0.0F);
  for (int64_t i = 0; i < n; ++i) {
    const float lse = stream.lse.row<float>(row + i)[head];
    rows.lse[i] = lse == -INFINITY ? 0 : lse * kLog2e;
    const T* o = stream.o.row<T>(row + i) + head * hd;
    const T* d_o = grad.d_o.row<T>(row + i) + head * hd;
    rows.delta[i] = sum_lanes(
        hd, [&](int64_t d, auto mask) { return load_lanes(o + d, mask) * load_lanes(d_o + d, mask); });
  }
}

// A block of queries (the one at `block` of the tile at `tile` of the panel) against the keys of a run.
struct Step {
  Run run;
  int64_t tile, block;
};

struct Wanted {
  bool query_grads, key_grads;
};

// What the piece will write and, if the next head follows, what that will read.
inline RowsAhead rows_ahead(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                            const QueryGrads& query_grads, const KeyGrads& key_grads, const Piece& piece,
                            Wanted wanted, bool next_head) {
  RowsAhead ahead;
  const int64_t row = piece.sequence * shape.length, rows = shape.length, hd = shape.head_dim;
  const int64_t wide = shape.heads / shape.kv_heads * hd, head = piece.key_head;
  for (size_t t = 0; t < queries.size() && wanted.query_grads; ++t)
    ahead.add(query_grads[t].dq, row, rows, head * wide, wide);
  for (size_t s = 0; s < keys.size() && wanted.key_grads; ++s) {
    ahead.add(key_grads[s].dk, row, rows, head * hd, hd);
    ahead.add(key_grads[s].dv, row, rows, head * hd, hd);
  }
  for (size_t s = 0; s < keys.size() && next_head; ++s) {
    ahead.add(keys[s].k, row, rows, (head + 1) * hd, hd);
    ahead.add(keys[s].v, row, rows, (head + 1) * hd, hd);
  }
  for (size_t t = 0; t < queries.size() && next_head; ++t)
    for (const Tensor& x : {queries[t].q, query_grads[t].d_o, queries[t].o})
      ahead.add(x, row, rows, (head + 1) * wide, wide);
  ahead.limit();
  return ahead;
}

template <class Engine, class T>
void backward_piece(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                    const QueryGrads& query_grads, const KeyGrads& key_grads, const Piece& piece,
                    Wanted wanted, bool next_head) {
  using Elem = typename Engine::Elem;
  [[maybe_unused]] const typename Engine::Session session;
  const int64_t hd = shape.head_dim, dim = round_up(hd, Engine::kPad), group = shape.heads / shape.kv_heads;
  const int64_t base = piece.sequence * shape.length, key_col = piece.key_head * hd;
  const std::array<Range, kMaxKeySets> used = keys_of_piece(shape, queries, keys, piece);
  const auto mem = carve([&](Carver& carver) { return BackwardMemory<Engine>(carver, used, dim); });

  for (size_t s = 0; s < keys.size(); ++s) {
    for (int64_t j = used[s].begin; j < used[s].end; j += kTile) {
      const int64_t n = std::min(kTile, shape.length - j), padded = round_up(n, kBlock);
      const int64_t tile = (j - used[s].begin) / kTile, at = tile * kTile * dim;
      mem.finite[s][tile] = Engine::load_rows(mem.k[s] + at, keys[s].k.row<T>(base + j) + key_col,
                                              keys[s].k.stride, n, padded, hd, dim);
      Engine::load_rows(mem.v[s] + at, keys[s].v.row<T>(base + j) + key_col, keys[s].v.stride, n, padded, hd,
                        dim);
      Engine::transposed_a(mem.kt[s] + tile * kTile, mem.kt_stride[s],
                           Engine::as_b(mem.q_b, mem.k[s] + at, padded, dim), padded, dim);
      std::fill_n(mem.started[s] + tile * (kTile / kBlock), kTile / kBlock, false);
    }
  }
  RowsAhead ahead = rows_ahead(shape, queries, keys, query_grads, key_grads, piece, wanted, next_head);

  std::array<std::array<Visible, kPanelTiles>, kMaxKeySets> visible;
  RowStatistics rows;
  for (int64_t q = piece.queries.begin; q < piece.queries.end; q += kPanel) {
    const int64_t n = std::min(kPanel, piece.queries.end - q), padded = round_up(n, kBlock);
    for (size_t t = 0; t < queries.size(); ++t) {
      const QueryStream& stream = queries[t];
      if (!stream.q) continue;
      std::array<Range, kMaxKeySets> walk;
      bool any = false;
      for (size_t s = 0; s < keys.size(); ++s) {
        walk[s] = {used[s].end, used[s].begin};
        for (int64_t i = 0; i < padded; i += kTile) {
          Visible& sees = visible[s][size_t(i / kTile)];
          sees.set(shape, piece.sequence, stream.band[s], q + i, std::min(kTile, n - i));
          if (sees.any.empty()) continue;
          walk[s].begin = std::min(walk[s].begin, sees.any.begin / kTile * kTile);
          walk[s].end = std::max(walk[s].end, sees.any.end);
        }
        if (!shape.skip_tiles) walk[s] = used[s];
        walk[s] = {std::max(walk[s].begin, used[s].begin), std::min(walk[s].end, used[s].end)};
        any = any || !walk[s].empty();
      }
      if (!any && !wanted.query_grads) continue;
      for (int64_t h = piece.key_head * group; h < (piece.key_head + 1) * group; ++h) {
        const QueryGrad& grad = query_grads[t];
        bool finite = true;
        for (int64_t i = 0; i < n; i += kTile) {
          const int64_t m = std::min(kTile, n - i), full = round_up(m, kBlock), at = i * dim;
          finite &= Engine::load_rows(mem.q + at, stream.q.row<T>(base + q + i) + h * hd, stream.q.stride, m,
                                      full, hd, dim);
          finite &= Engine::load_rows(mem.d_o + at, grad.d_o.row<T>(base + q + i) + h * hd, grad.d_o.stride,
                                      m, full, hd, dim);
          Engine::transposed_b(mem.qt + at, mem.q + at, full, dim);
          Engine::transposed_b(mem.d_ot + at, mem.d_o + at, full, dim);
          Engine::as_b(mem.q_b + at, mem.q + at, full, dim);
          Engine::as_b(mem.d_o_b + at, mem.d_o + at, full, dim);
        }
        row_statistics<T>(stream, grad, base + q, n, h, hd, rows);
        bool dq_started[kPanelBlocks] = {};
        // C += A B where C is a gradient (not there yet: C = A B), without what the masked pairs of infinite
        // rows would add.
        const auto add = [&](bool exact, bool started, int64_t m, int64_t cols, int64_t k, const Elem* a,
                             int64_t lda, const Elem* b, int64_t ldb, float* c, int64_t ldc, auto&& sees) {
          if (exact) {
            if (!started) zero(c, ldc, m, cols);
            product_of_visible<Engine>(m, cols, k, a, lda, b, ldb, c, ldc, sees);
          } else if (started) {
            Engine::template product<true>(m, cols, k, a, lda, b, ldb, c, ldc);
          } else {
            Engine::template product<false>(m, cols, k, a, lda, b, ldb, c, ldc);
          }
        };
        for (size_t s = 0; s < keys.size(); ++s) {
          for (int64_t first = walk[s].begin; first < walk[s].end; first += kPanel) {
            const int64_t last = std::min(first + kPanel, walk[s].end), panel_at = first - used[s].begin;
            bool keys_finite = true;
            Range key_range[kPanelBlocks];  // per block of queries: the keys of the panel that ds_b holds
            const auto sees = [&](int64_t i, int64_t key) {
              return visible[s][size_t(i / kTile)].at(i % kTile, first + key);
            };
            for (int64_t j = first; j < last; j += kTile) {
              const int64_t tile = (j - used[s].begin) / kTile, at = tile * kTile * dim, offset = j - first;
              Elem* const ds_a = Engine::kOneLayout ? mem.ds_b + offset * kPanelStride : mem.ds_a;
              keys_finite = keys_finite && mem.finite[s][tile];
              Range query_range[kTile / kBlock];  // per block of keys: the queries that p and ds_a hold
              Step steps[kPanelBlocks];
              int count = 0;
              for (int64_t i = 0; i < padded; i += kTile) {
                Run runs[kTile / kBlock];
                const int found =
                    find_runs(visible[s][size_t(i / kTile)], std::min(kTile, padded - i), j,
                              round_up(std::min(kTile, shape.length - j), kBlock), shape.skip_tiles, runs);
                for (int r = 0; r < found; ++r)
                  for (int64_t b = runs[r].q0; b < runs[r].q1; b += kBlock) steps[count++] = {runs[r], i, b};
              }
              const auto scores = [&](const Step& step) {
                const int64_t nk = step.run.k1 - step.run.k0, keys_at = at + step.run.k0 * dim;
                const int64_t queries_at = step.tile * dim + step.block * Engine::kPack;
                const int64_t to = step.run.k0 * kBlock;
                Engine::template product<false>(nk, kBlock, dim, mem.k[s] + keys_at, dim, mem.qt + queries_at,
                                                kTile, mem.s + to, kBlock);
                Engine::template product<false>(nk, kBlock, dim, mem.v[s] + keys_at, dim,
                                                mem.d_ot + queries_at, kTile, mem.dp + to, kBlock);
              };
              for (int r = 0; r < count; ++r) {
                scores(steps[r]);
                const Run& run = steps[r].run;
                const int64_t col = steps[r].tile + steps[r].block;
                softmax_backward<Engine>(run, steps[r].block, visible[s][size_t(steps[r].tile / kTile)], j,
                                         shape.scale * kLog2e, rows.lse + col, rows.delta + col, mem.s,
                                         mem.dp, mem.p + col, ds_a + col,
                                         mem.ds_b + offset * kPanelStride + col * Engine::kPack);
                ahead.fetch(Engine::kRowsAhead);
                extend(key_range[col / kBlock], offset + run.k0, offset + run.k1,
                       [&](int64_t from, int64_t to) {
                         zero_block(mem.ds_b + col * Engine::kPack, from, to, Engine::kPack);
                       });
                for (int64_t k = run.k0; k < run.k1; k += kBlock)
                  extend(query_range[k / kBlock], col, col + kBlock, [&](int64_t from, int64_t to) {
                    for (; from < to; from += kBlock) {
                      zero_block(mem.p + from, k, k + kBlock, 1);
                      zero_block(ds_a + from, k, k + kBlock, 1);
                    }
                  });
              }
              if (!wanted.key_grads || !key_grads[s].dk) continue;
              const bool exact = !finite || !mem.finite[s][tile];
              for (int64_t k = 0; k < kTile; k += kBlock) {
                const Range range = query_range[k / kBlock];
                if (range.empty()) continue;
                bool& started = mem.started[s][(j - used[s].begin + k) / kBlock];
                const int64_t to = at + k * dim, from = k * kPanelStride + range.begin;
                const auto row_sees = [&](int64_t key, int64_t i, int64_t) {
                  return sees(range.begin + i, offset + k + key);
                };
                add(exact, started, kBlock, dim, range.end - range.begin, mem.p + from, kPanelStride,
                    mem.d_o_b + range.begin * dim, dim, mem.dv[s] + to, dim, row_sees);
                add(exact, started, kBlock, dim, range.end - range.begin, ds_a + from, kPanelStride,
                    mem.q_b + range.begin * dim, dim, mem.dk[s] + to, dim, row_sees);
                started = true;
              }
            }
            if (!wanted.query_grads) continue;
            for (int64_t i = 0; i < padded; i += kBlock) {
              const Range range = key_range[i / kBlock];
              if (range.empty()) continue;
              add(!finite || !keys_finite, dq_started[i / kBlock], dim, kBlock, range.end - range.begin,
                  mem.kt[s] + panel_at + range.begin, mem.kt_stride[s],
                  mem.ds_b + range.begin * kPanelStride + i * Engine::kPack, kPanelStride, mem.dqt + i,
                  kPanelStride,
                  [&](int64_t, int64_t key, int64_t query) { return sees(i + query, range.begin + key); });
              dq_started[i / kBlock] = true;
            }
          }
        }
        if (!wanted.query_grads) continue;
        for (int64_t i = 0; i < padded; i += kBlock)
          if (!dq_started[i / kBlock]) zero(mem.dqt + i, kPanelStride, dim, kBlock);
        for (int64_t i = 0; i < n; i += kTile) {
          transpose(reinterpret_cast<const uint32_t*>(mem.dqt + i), kPanelStride,
                    reinterpret_cast<uint32_t*>(mem.dq), dim, dim, kTile);
          write_rows(grad.dq, base + q + i, std::min(kTile, n - i), h * hd, hd, mem.dq, dim, shape.scale);
        }
      }
    }
  }
  if (!wanted.key_grads) return;
  std::fill_n(mem.dq, kTile * dim, 0.0F);  // for keys that nothing reads
  for (size_t s = 0; s < keys.size(); ++s) {
    if (!keys[s].k || !key_grads[s].dk) continue;
    const KeyGrad& grad = key_grads[s];
    for (int64_t j = piece.keys.begin; j < piece.keys.end; j += kTile) {
      const int64_t n = std::min(kTile, piece.keys.end - j), at = (j - used[s].begin) * dim;
      const bool read = used[s].begin <= j && j < used[s].end;
      for (int64_t b = 0; read && b < round_up(n, kBlock); b += kBlock) {
        if (mem.started[s][(j - used[s].begin + b) / kBlock]) continue;
        zero(mem.dk[s] + at + b * dim, dim, kBlock, dim);
        zero(mem.dv[s] + at + b * dim, dim, kBlock, dim);
      }
      write_rows(grad.dk, base + j, n, key_col, hd, read ? mem.dk[s] + at : mem.dq, dim, shape.scale,
                 grad.accumulate);
      write_rows(grad.dv, base + j, n, key_col, hd, read ? mem.dv[s] + at : mem.dq, dim, 1, grad.accumulate);
    }
  }
}

}  // namespace

}  // namespace attention

void attention_backward_cpu(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                            const QueryGrads& query_grads, const KeyGrads& key_grads) {
  using namespace attention;
  // With too few heads to share out, query and key gradients are found separately, each over parts of the
  // sequence; that computes the probabilities twice (7 products instead of 5).
  constexpr int64_t kEnough = 8, kParts = 16;
  const int64_t heads = shape.batch * shape.kv_heads;
  if (heads * shape.length == 0) return;
  const Range all{0, shape.length};
  const bool any_keys =
      std::any_of(key_grads.begin(), key_grads.end(), [](const KeyGrad& g) { return bool(g.dk); });
  const bool together = heads >= kEnough || shape.length <= 4 * kTile;
  const std::vector<Range> parts =
      together ? std::vector<Range>{all} : cut(shape.length, std::min(kParts / heads, shape.length / 256));
  const int64_t count = int64_t(parts.size());
  with_engine(act_dtype(queries), [&](auto engine, auto element) {
    const auto run = [&](int64_t head, Range of_queries, Range of_keys, Wanted wanted, bool next_head) {
      backward_piece<decltype(engine), decltype(element)>(
          shape, queries, keys, query_grads, key_grads,
          Piece{head / shape.kv_heads, head % shape.kv_heads, of_queries, of_keys}, wanted, next_head);
    };
    if (together)
      return for_head_groups(shape, [&](int64_t head, bool next) {
        run(head, all, all, {true, any_keys}, next);
      });
    parallel_for(2 * heads * count, [&](int64_t i) {
      const Range part = parts[size_t(i / 2 % count)];
      if (i % 2 == 0)
        run(i / 2 / count, part, all, {true, false}, false);
      else if (any_keys)
        run(i / 2 / count, all, part, {false, true}, false);
    });
  });
}

}  // namespace sps::ops
