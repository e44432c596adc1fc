// Backward: probabilities are computed again from the saved log-sum-exp. A piece owns the key gradients of
// one key head, or the query gradients of its query heads, or both, and adds to them in a fixed order.
#include <cmath>

#include "ops/attention/attention_cpu.h"

namespace sps::ops {

namespace attention {

namespace {

template <class Engine>
struct BackwardMemory {
  using Elem = typename Engine::Elem;
  // Per key set and tile of keys: k, v [kTile, dim] and k^T [dim, kTile] as A; dk, dv [kTile, dim]; k finite?
  std::array<Elem*, kMaxKeySets> k, v, kt;
  std::array<float*, kMaxKeySets> dk, dv;
  std::array<bool*, kMaxKeySets> finite;
  Elem *q, *q_b, *qt, *d_o, *d_o_b, *d_ot;  // a tile of queries: rows, B, and B of the transpose
  Elem *p, *ds_a, *ds_b;                    // [kTile, kTile]
  float *s, *dp, *dqt, *dq;                 // [kTile, kTile] twice, [dim, kTile], [kTile, dim]

  BackwardMemory(Carver& carver, const std::array<Range, kMaxKeySets>& keys, int64_t dim) {
    for (size_t i = 0; i < kMaxKeySets; ++i) {
      const int64_t tiles = tiles_of(keys[i].end - keys[i].begin), size = tiles * kTile * dim;
      k[i] = carver.take<Elem>(size);
      v[i] = carver.take<Elem>(size);
      kt[i] = carver.take<Elem>(size);
      dk[i] = carver.take<float>(size);
      dv[i] = carver.take<float>(size);
      finite[i] = carver.take<bool>(tiles);
    }
    for (Elem** tile : {&q, &q_b, &qt, &d_o, &d_o_b, &d_ot}) *tile = carver.take<Elem>(kTile * dim);
    for (Elem** tile : {&p, &ds_a, &ds_b}) *tile = carver.take<Elem>(kTile * kTile);
    if (Engine::kOneLayout) ds_b = ds_a;
    for (float** tile : {&s, &dp}) *tile = carver.take<float>(kTile * kTile);
    for (float** tile : {&dqt, &dq}) *tile = carver.take<float>(kTile * dim);
  }
};

struct RowStatistics {
  alignas(64) float lse[kTile], delta[kTile];  // lse in units of log 2; delta = d_o . o
};

// p = exp2(c s - lse) and ds = p (dp - delta) of a run, exactly zero where masked.
template <class Engine>
void softmax_backward(const Run& run, const Visible& visible, int64_t first_key, float c,
                      const RowStatistics& rows, const BackwardMemory<Engine>& mem) {
  const Vec scale = broadcast(c);
  for (int64_t i = run.q0; i < run.q1; i += kLanes) {
    const Vec lse = load(rows.lse + i), delta = load(rows.delta + i);
    for_key_pairs(run, [&](int64_t j, auto masked) {
      Vec p[2], ds[2];
#pragma GCC unroll 2
      for (int e = 0; e < 2; ++e) {
        const int64_t at = (j + e) * kTile + i;
        p[e] = exp2<Engine::kExpDegree>(load(mem.s + at) * scale - lse);
        ds[e] = p[e] * (load(mem.dp + at) - delta);
        if constexpr (masked) {
          const IntVec seen = lanes_that_see(visible, i, first_key + j + e);
          p[e] = seen ? p[e] : Vec{};
          ds[e] = seen ? ds[e] : Vec{};
        }
      }
      Engine::put_a(mem.p, j, i, p[0], p[1]);
      Engine::put_a(mem.ds_a, j, i, ds[0], ds[1]);
      if constexpr (!Engine::kOneLayout) Engine::put_b(mem.ds_b, j, i, ds[0], ds[1]);
    });
  }
}

template <class T>
void row_statistics(const QueryStream& stream, const QueryGrad& grad, int64_t row, int64_t n, int64_t head,
                    int64_t hd, RowStatistics& rows) {
  std::fill_n(rows.lse, kTile, 0.0F);
  std::fill_n(rows.delta, kTile, 0.0F);
  for (int64_t i = 0; i < n; ++i) {
    const float lse = stream.lse.row<float>(row + i)[head];
    rows.lse[i] = lse == -INFINITY ? 0 : lse * kLog2e;
    const T* o = stream.o.row<T>(row + i) + head * hd;
    const T* d_o = grad.d_o.row<T>(row + i) + head * hd;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < hd; ++d) sum += to_f32(o[d]) * to_f32(d_o[d]);
    rows.delta[i] = sum;
  }
}

struct Wanted {
  bool query_grads, key_grads;
};

template <class Engine, class T>
void backward_piece(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                    const QueryGrads& query_grads, const KeyGrads& key_grads, const Piece& piece,
                    Wanted wanted) {
  using Elem = typename Engine::Elem;
  [[maybe_unused]] const typename Engine::Session session;
  const int64_t hd = shape.head_dim, dim = round_up(hd, Engine::kPad), group = shape.heads / shape.kv_heads;
  const int64_t base = piece.sequence * shape.length, key_col = piece.key_head * hd;
  std::array<Range, kMaxKeySets> used;
  for (size_t s = 0; s < keys.size(); ++s)
    if (keys[s].k) used[s] = keys_to_visit(shape, queries, piece, s);
  const auto mem = carve([&](Carver& carver) { return BackwardMemory<Engine>(carver, used, dim); });

  for (size_t s = 0; s < keys.size(); ++s) {
    for (int64_t j = used[s].begin; j < used[s].end; j += kTile) {
      const int64_t n = std::min(kTile, shape.length - j), padded = round_up(n, kBlock);
      const int64_t tile = (j - used[s].begin) / kTile, at = tile * kTile * dim;
      Engine::load_rows(mem.k[s] + at, keys[s].k.row<T>(base + j) + key_col, keys[s].k.stride, n, padded, hd,
                        dim);
      Engine::load_rows(mem.v[s] + at, keys[s].v.row<T>(base + j) + key_col, keys[s].v.stride, n, padded, hd,
                        dim);
      Engine::transposed_a(mem.kt[s] + at, Engine::as_b(mem.q_b, mem.k[s] + at, padded, dim), padded, dim);
      mem.finite[s][tile] = all_finite(mem.k[s] + at, padded * dim);
      std::fill_n(mem.dk[s] + at, kTile * dim, 0.0F);
      std::fill_n(mem.dv[s] + at, kTile * dim, 0.0F);
    }
  }

  std::array<Visible, kMaxKeySets> visible;
  RowStatistics rows;
  for (int64_t q = piece.queries.begin; q < piece.queries.end; q += kTile) {
    const int64_t n = std::min(kTile, piece.queries.end - q), padded = round_up(n, kBlock);
    for (size_t t = 0; t < queries.size(); ++t) {
      const QueryStream& stream = queries[t];
      if (!stream.q) continue;
      std::array<Range, kMaxKeySets> walk;
      bool any = false;
      for (size_t s = 0; s < keys.size(); ++s) {
        visible[s].set(shape, piece.sequence, stream.band[s], q, n);
        walk[s] = used[s];
        if (shape.skip_tiles) {
          walk[s].begin = std::max(used[s].begin, visible[s].any.begin / kTile * kTile);
          walk[s].end = std::min(used[s].end, visible[s].any.end);
        }
        any = any || !walk[s].empty();
      }
      if (!any && !wanted.query_grads) continue;
      for (int64_t h = piece.key_head * group; h < (piece.key_head + 1) * group; ++h) {
        const QueryGrad& grad = query_grads[t];
        Engine::load_rows(mem.q, stream.q.row<T>(base + q) + h * hd, stream.q.stride, n, padded, hd, dim);
        Engine::load_rows(mem.d_o, grad.d_o.row<T>(base + q) + h * hd, grad.d_o.stride, n, padded, hd, dim);
        const Elem* qt = Engine::transposed_b(mem.qt, mem.q, padded, dim);
        const Elem* d_ot = Engine::transposed_b(mem.d_ot, mem.d_o, padded, dim);
        const Elem* q_b = Engine::as_b(mem.q_b, mem.q, padded, dim);
        const Elem* d_o_b = Engine::as_b(mem.d_o_b, mem.d_o, padded, dim);
        const bool finite = all_finite(mem.q, padded * dim) && all_finite(mem.d_o, padded * dim);
        row_statistics<T>(stream, grad, base + q, n, h, hd, rows);
        std::fill_n(mem.dqt, dim * kTile, 0.0F);
        for (size_t s = 0; s < keys.size(); ++s) {
          for (int64_t j = walk[s].begin; j < walk[s].end; j += kTile) {
            const int64_t tile = (j - used[s].begin) / kTile, at = tile * kTile * dim;
            const bool all_finite = finite && mem.finite[s][tile];
            Run runs[kTile / kBlock];
            const int count =
                find_runs(visible[s], padded, j, round_up(std::min(kTile, shape.length - j), kBlock),
                          shape.skip_tiles, runs);
            for (int r = 0; r < count; ++r) {
              const Run run = runs[r];
              const int64_t nq = run.q1 - run.q0, nk = run.k1 - run.k0, keys_at = at + run.k0 * dim;
              const int64_t square = run.k0 * kTile + run.q0,
                            square_b = run.k0 * kTile + run.q0 * Engine::kPack;
              Engine::template product<false>(nk, nq, dim, mem.k[s] + keys_at, dim,
                                              qt + run.q0 * Engine::kPack, kTile, mem.s + square, kTile);
              Engine::template product<false>(nk, nq, dim, mem.v[s] + keys_at, dim,
                                              d_ot + run.q0 * Engine::kPack, kTile, mem.dp + square, kTile);
              softmax_backward<Engine>(run, visible[s], j, shape.scale * kLog2e, rows, mem);
              const bool exact = run.masked() && !all_finite;
              const auto add = [&](int64_t m, int64_t cols, int64_t k, const Elem* a, int64_t lda,
                                   const Elem* b, int64_t ldb, float* c, int64_t ldc, auto&& sees) {
                if (exact)
                  product_of_visible<Engine>(m, cols, k, a, lda, b, ldb, c, ldc, sees);
                else
                  Engine::template product<true>(m, cols, k, a, lda, b, ldb, c, ldc);
              };
              const auto sees = [&](int64_t i, int64_t key) {
                return visible[s].at(run.q0 + i, j + run.k0 + key);
              };
              if (wanted.query_grads)
                add(dim, nq, nk, mem.kt[s] + at + run.k0, kTile, mem.ds_b + square_b, kTile, mem.dqt + run.q0,
                    kTile, [&](int64_t, int64_t key, int64_t i) { return sees(i, key); });
              if (wanted.key_grads) {
                const auto row_sees = [&](int64_t key, int64_t i, int64_t) { return sees(i, key); };
                add(nk, dim, nq, mem.p + square, kTile, d_o_b + run.q0 * dim, dim, mem.dv[s] + keys_at, dim,
                    row_sees);
                add(nk, dim, nq, mem.ds_a + square, kTile, q_b + run.q0 * dim, dim, mem.dk[s] + keys_at, dim,
                    row_sees);
              }
            }
          }
        }
        if (wanted.query_grads) {
          transpose_back(mem.dqt, mem.dq, dim, dim);
          write_rows(grad.dq, base + q, n, h * hd, hd, mem.dq, dim, shape.scale);
        }
      }
    }
  }
  if (!wanted.key_grads) return;
  std::fill_n(mem.dq, kTile * dim, 0.0F);  // for keys that nothing reads
  for (size_t s = 0; s < keys.size(); ++s) {
    if (!keys[s].k) continue;
    const KeyGrad& grad = key_grads[s];
    for (int64_t j = piece.keys.begin; j < piece.keys.end; j += kTile) {
      const int64_t n = std::min(kTile, piece.keys.end - j), at = (j - used[s].begin) * dim;
      const bool read = used[s].begin <= j && j < used[s].end;
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
  const bool together = heads >= kEnough || shape.length <= 4 * kTile;
  const std::vector<Range> parts =
      together ? std::vector<Range>{all} : cut(shape.length, std::min(kParts / heads, shape.length / 256));
  const int64_t count = int64_t(parts.size());
  with_engine(act_dtype(queries), [&](auto engine, auto element) {
    const auto run = [&](int64_t head, Range of_queries, Range of_keys, Wanted wanted) {
      backward_piece<decltype(engine), decltype(element)>(
          shape, queries, keys, query_grads, key_grads,
          Piece{head / shape.kv_heads, head % shape.kv_heads, of_queries, of_keys}, wanted);
    };
    if (together) return parallel_for(heads, [&](int64_t head) { run(head, all, all, {true, true}); });
    parallel_for(2 * heads * count, [&](int64_t i) {
      const Range part = parts[size_t(i / 2 % count)];
      if (i % 2 == 0)
        run(i / 2 / count, part, all, {true, false});
      else
        run(i / 2 / count, all, part, {false, true});
    });
  });
}

}  // namespace sps::ops
