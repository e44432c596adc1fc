// Forward: for a tile of queries, walk the tiles of visible keys with an online softmax (running maximum m,
// running sum l and unnormalised output, all per query).
#include <cmath>

#include "ops/attention/attention_cpu.h"

namespace sps::ops {

namespace attention {

namespace {

template <class Engine>
struct ForwardMemory {
  using Elem = typename Engine::Elem;
  // Per key set and tile of keys: k [kTile, dim] as A, v^T [dim, kTile] as A, and whether v has only finite
  // numbers.
  std::array<Elem*, kMaxKeySets> k, vt;
  std::array<bool*, kMaxKeySets> finite;
  Elem *rows, *b, *qt, *p;
  float *s, *ot, *o;  // [kTile, kTile], [dim, kTile], [kTile, dim]

  ForwardMemory(Carver& carver, const std::array<Range, kMaxKeySets>& keys, int64_t dim) {
    for (size_t s = 0; s < kMaxKeySets; ++s) {
      const int64_t tiles = tiles_of(keys[s].end - keys[s].begin);
      k[s] = carver.take<Elem>(tiles * kTile * dim);
      vt[s] = carver.take<Elem>(tiles * kTile * dim);
      finite[s] = carver.take<bool>(tiles);
    }
    rows = carver.take<Elem>(kTile * dim);
    b = carver.take<Elem>(kTile * dim);
    qt = carver.take<Elem>(kTile * dim);
    p = carver.take<Elem>(kTile * kTile);
    s = carver.take<float>(kTile * kTile);
    ot = carver.take<float>(kTile * dim);
    o = carver.take<float>(kTile * dim);
  }
};

// The state of a tile of queries.
struct Softmax {
  alignas(64) float m[kTile], l[kTile];
};

// p = exp2(c s - m) of a run, in B layout, with m the new maximum; rescales l and ot to it.
template <class Engine>
void softmax_step(const Run& run, const Visible& visible, int64_t first_key, float c, const float* s,
                  typename Engine::Elem* p, Softmax& state, float* ot, int64_t dim) {
  const Vec nothing = broadcast(-INFINITY), scale = broadcast(c);
  for (int64_t i = run.q0; i < run.q1; i += kBlock) {
    const auto at = [&](int64_t j, int v) { return s + j * kTile + i + v * kLanes; };
    Vec old[kVectors], top[kVectors], shift[kVectors], sum[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) old[v] = top[v] = load(state.m + i + v * kLanes);
    for_key_pairs(run, [&](int64_t j, auto masked) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Vec x0 = load(at(j, v)) * scale, x1 = load(at(j + 1, v)) * scale;
        if constexpr (masked) {
          x0 = lanes_that_see(visible, i + v * kLanes, first_key + j) ? x0 : nothing;
          x1 = lanes_that_see(visible, i + v * kLanes, first_key + j + 1) ? x1 : nothing;
        }
        top[v] = greater(top[v], greater(x0, x1));
      }
    });
    for (int v = 0; v < kVectors; ++v) {
      store(state.m + i + v * kLanes, top[v]);
      shift[v] = top[v] == nothing ? Vec{} : top[v];
    }
    for_key_pairs(run, [&](int64_t j, auto masked) {
      Vec even[kVectors], odd[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Vec p0 = exp2<Engine::kExpDegree>(load(at(j, v)) * scale - shift[v]);
        Vec p1 = exp2<Engine::kExpDegree>(load(at(j + 1, v)) * scale - shift[v]);
        if constexpr (masked) {
          p0 = lanes_that_see(visible, i + v * kLanes, first_key + j) ? p0 : Vec{};
          p1 = lanes_that_see(visible, i + v * kLanes, first_key + j + 1) ? p1 : Vec{};
        }
        sum[v] += p0 + p1;
        even[v] = p0, odd[v] = p1;
      }
      Engine::put_b(p, kTile, j, i, even, odd);
    });
    for (int v = 0; v < kVectors; ++v) {
      float* l = state.l + i + v * kLanes;
      const Vec shrink = exp2<Engine::kExpDegree>(old[v] - shift[v]);
      store(l, load(l) * shrink + sum[v]);
      if (!any_different(shrink, broadcast(1))) continue;
      float* out = ot + i + v * kLanes;
      for (int64_t d = 0; d < dim; ++d) store(out + d * kTile, load(out + d * kTile) * shrink);
    }
  }
}

constexpr int64_t kRowsAhead = 80;  // rows to fetch per tile

template <class Engine, class T>
void forward_piece(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                   const Piece& piece, bool next_head) {
  using Elem = typename Engine::Elem;
  [[maybe_unused]] const typename Engine::Session session;
  const int64_t hd = shape.head_dim, dim = round_up(hd, Engine::kPad), group = shape.heads / shape.kv_heads;
  const int64_t base = piece.sequence * shape.length;
  std::array<Range, kMaxKeySets> used;
  for (size_t s = 0; s < keys.size(); ++s) used[s] = keys_to_visit(shape, queries, piece, s);
  const auto mem = carve([&](Carver& carver) { return ForwardMemory<Engine>(carver, used, dim); });

  for (size_t s = 0; s < keys.size(); ++s) {
    for (int64_t j = used[s].begin; j < used[s].end; j += kTile) {
      const int64_t n = std::min(kTile, shape.length - j), padded = round_up(n, kBlock),
                    tile = (j - used[s].begin) / kTile;
      const int64_t col = piece.key_head * hd;
      Engine::load_rows(mem.k[s] + tile * kTile * dim, keys[s].k.row<T>(base + j) + col, keys[s].k.stride, n,
                        padded, hd, dim);
      mem.finite[s][tile] =
          Engine::load_rows(mem.rows, keys[s].v.row<T>(base + j) + col, keys[s].v.stride, n, padded, hd, dim);
      Engine::transposed_a(mem.vt[s] + tile * kTile * dim, kTile, Engine::as_b(mem.b, mem.rows, padded, dim),
                           padded, dim);
    }
  }

  RowsAhead ahead;
  {
    const int64_t length = shape.length, wide = group * hd, head = piece.key_head;
    for (const QueryStream& stream : queries) ahead.add(stream.o, base, length, head * wide, wide);
    for (size_t s = 0; s < keys.size() && next_head; ++s)
      for (const Tensor& x : {keys[s].k, keys[s].v}) ahead.add(x, base, length, (head + 1) * hd, hd);
    for (size_t t = 0; t < queries.size() && next_head; ++t)
      ahead.add(queries[t].q, base, length, (head + 1) * wide, wide);
    ahead.limit();
  }

  std::array<Visible, kMaxKeySets> visible;
  Softmax state;
  for (int64_t q = piece.queries.begin; q < piece.queries.end; q += kTile) {
    const int64_t n = std::min(kTile, piece.queries.end - q), padded = round_up(n, kBlock);
    for (const QueryStream& stream : queries) {
      if (!stream.q) continue;
      for (size_t s = 0; s < keys.size(); ++s) visible[s].set(shape, piece.sequence, stream.band[s], q, n);
      for (int64_t h = piece.key_head * group; h < (piece.key_head + 1) * group; ++h) {
        Engine::load_rows(mem.rows, stream.q.row<T>(base + q) + h * hd, stream.q.stride, n, padded, hd, dim);
        const Elem* qt = Engine::transposed_b(mem.qt, mem.rows, padded, dim);
        std::fill_n(state.m, kTile, -INFINITY);
        std::fill_n(state.l, kTile, 0.0F);
        std::fill_n(mem.ot, dim * kTile, 0.0F);
        for (size_t s = 0; s < keys.size(); ++s) {
          Range walk = used[s];
          if (shape.skip_tiles) {
            walk.begin = std::max(walk.begin, visible[s].any.begin / kTile * kTile);
            walk.end = std::min(walk.end, visible[s].any.end);
          }
          for (int64_t j = walk.begin; j < walk.end; j += kTile) {
            const int64_t tile = (j - used[s].begin) / kTile;
            const Elem* k = mem.k[s] + tile * kTile * dim;
            const Elem* vt = mem.vt[s] + tile * kTile * dim;
            Run runs[kTile / kBlock];
            const int count =
                find_runs(visible[s], padded, j, round_up(std::min(kTile, shape.length - j), kBlock),
                          shape.skip_tiles, runs);
            for (int r = 0; r < count; ++r) {
              const Run run = runs[r];
              const int64_t nq = run.q1 - run.q0, nk = run.k1 - run.k0;
              Engine::template product<false>(nk, nq, dim, k + run.k0 * dim, dim, qt + run.q0 * Engine::kPack,
                                              kTile, mem.s + run.k0 * kTile + run.q0, kTile);
              ahead.fetch(kRowsAhead);
              softmax_step<Engine>(run, visible[s], j, shape.scale * kLog2e, mem.s, mem.p, state, mem.ot,
                                   dim);
              const Elem* p = mem.p + run.k0 * kTile + run.q0 * Engine::kPack;
              if (run.masked() && !mem.finite[s][tile])
                product_of_visible<Engine>(dim, nq, nk, vt + run.k0, kTile, p, kTile, mem.ot + run.q0, kTile,
                                           [&](int64_t, int64_t kk, int64_t i) {
                                             return visible[s].at(run.q0 + i, j + run.k0 + kk);
                                           });
              else
                Engine::template product<true>(dim, nq, nk, vt + run.k0, kTile, p, kTile, mem.ot + run.q0,
                                               kTile);
            }
          }
        }
        for (int64_t i = 0; i < padded; i += kLanes) {
          const Vec l = load(state.l + i), inverse = l == Vec{} ? Vec{} : 1.0F / l;
          for (int64_t d = 0; d < dim; ++d)
            store(mem.ot + d * kTile + i, load(mem.ot + d * kTile + i) * inverse);
        }
        transpose_back(mem.ot, mem.o, dim, dim);
        write_rows(stream.o, base + q, n, h * hd, hd, mem.o, dim, 1);
        for (int64_t i = 0; i < n; ++i)
          stream.lse.template row<float>(base + q + i)[h] =
              state.l[i] == 0 ? -INFINITY : (state.m[i] + std::log2(state.l[i])) * kLn2;
      }
    }
  }
}

}  // namespace

}  // namespace attention

void attention_forward_cpu(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys) {
  using namespace attention;
  // A few long sequences are cut along their queries too; each piece lays out the keys it reads anew, so not
  // finer.
  constexpr int64_t kEnough = 32;
  const int64_t heads = shape.batch * shape.kv_heads;
  if (heads * shape.length == 0) return;
  const std::vector<Range> parts =
      cut(shape.length, std::min((kEnough + heads - 1) / heads, shape.length / 256));
  with_engine(act_dtype(queries), [&](auto engine, auto element) {
    const auto run = [&](int64_t head, Range part, bool next_head) {
      forward_piece<decltype(engine), decltype(element)>(
          shape, queries, keys, Piece{head / shape.kv_heads, head % shape.kv_heads, part, {0, shape.length}},
          next_head);
    };
    const auto count = int64_t(parts.size());
    if (count == 1)
      return for_head_groups(shape, [&](int64_t head, bool next) { run(head, parts[0], next); });
    parallel_for(heads * count, [&](int64_t i) { run(i / count, parts[size_t(i % count)], false); });
  });
}

}  // namespace sps::ops
