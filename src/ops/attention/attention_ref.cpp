// The formulas of attention.h as loops in double. Visibility is asked pair by pair from its definition, so
// that the interval arithmetic of the fast code has something independent to be tested against.
#include <cmath>
#include <vector>

#include "base/threads.h"
#include "ops/attention/attention_kernels.h"

namespace sps::ops {

namespace {

struct Pair {  // a key that the query reads
  size_t set;
  int64_t row;  // of k and v
  double p;     // first the score, then the probability
};

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

void put(const Tensor& t, int64_t r, int64_t c, double v) {
  if (t.dtype == DType::f64)
    t.row<double>(r)[c] = v;
  else
    t.row<float>(r)[c] = float(v);
}
double get(const Tensor& t, int64_t r, int64_t c) {
  return t.dtype == DType::f64 ? t.row<double>(r)[c] : double(t.row<float>(r)[c]);
}

// Everything query head h of row i of sequence b reads through `stream`, with probabilities; lse.
double probabilities(const AttentionShape& a, const QueryStream& stream, const KeySets& keys, int64_t b,
                     int64_t i, int64_t h, std::vector<Pair>& pairs) {
  const int64_t base = b * a.length, key_head = h / (a.heads / a.kv_heads);
  const double* q = stream.q.row<double>(base + i) + h * a.head_dim;
  pairs.clear();
  double top = -INFINITY;
  for (size_t s = 0; s < keys.size(); ++s) {
    const Band band = stream.band[s];
    for (int64_t j = 0; j < a.length; ++j) {
      if (i - j < band.lo || i - j > band.hi) continue;
      if (a.document_start[size_t(base + i)] != a.document_start[size_t(base + j)]) continue;
      const double score =
          a.scale * dot(q, keys[s].k.row<double>(base + j) + key_head * a.head_dim, a.head_dim);
      top = std::max(top, score);
      pairs.push_back({s, base + j, score});
    }
  }
  double sum = 0;
  for (Pair& pair : pairs) sum += pair.p = std::exp(pair.p - top);
  for (Pair& pair : pairs) pair.p /= sum;
  return pairs.empty() ? -INFINITY : top + std::log(sum);
}

}  // namespace

void attention_forward_ref(const AttentionShape& a, const QueryStreams& queries, const KeySets& keys) {
  const int64_t group = a.heads / a.kv_heads;
  for (const QueryStream& stream : queries) {
    if (!stream.q) continue;
    parallel_for(a.batch * a.length, [&](int64_t r) {
      std::vector<Pair> pairs;
      for (int64_t h = 0; h < a.heads; ++h) {
        put(stream.lse, r, h, probabilities(a, stream, keys, r / a.length, r % a.length, h, pairs));
        double* o = stream.o.row<double>(r) + h * a.head_dim;
        std::fill(o, o + a.head_dim, 0.0);
        for (const Pair& pair : pairs) {
          const double* v = keys[pair.set].v.row<double>(pair.row) + h / group * a.head_dim;
          for (int64_t d = 0; d < a.head_dim; ++d) o[d] += pair.p * v[d];
        }
      }
    });
  }
}

void attention_backward_ref(const AttentionShape& a, const QueryStreams& queries, const KeySets& keys,
                            const QueryGrads& query_grads, const KeyGrads& key_grads) {
  const int64_t group = a.heads / a.kv_heads, hd = a.head_dim;
  parallel_for(a.batch * a.kv_heads, [&](int64_t piece) {
    const int64_t b = piece / a.kv_heads, g = piece % a.kv_heads, col = g * hd;
    std::array<std::vector<double>, kMaxKeySets> dk, dv;  // [length, head_dim]
    for (size_t s = 0; s < keys.size(); ++s) {
      if (!keys[s].k) continue;
      dk[s].assign(size_t(a.length * hd), 0);
      dv[s].assign(size_t(a.length * hd), 0);
    }
    std::vector<Pair> pairs;
    std::vector<double> o(static_cast<size_t>(hd)), dq(static_cast<size_t>(hd));
    for (size_t s = 0; s < queries.size(); ++s) {
      if (!queries[s].q) continue;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        for (int64_t i = 0; i < a.length; ++i) {
          const int64_t row = b * a.length + i;
          probabilities(a, queries[s], keys, b, i, h, pairs);
          const double* q = queries[s].q.row<double>(row) + h * hd;
          const double* d_o = query_grads[s].d_o.row<double>(row) + h * hd;
          std::fill(o.begin(), o.end(), 0.0);
          std::fill(dq.begin(), dq.end(), 0.0);
          for (const Pair& pair : pairs)
            for (int64_t d = 0; d < hd; ++d)
              o[size_t(d)] += pair.p * keys[pair.set].v.row<double>(pair.row)[col + d];
          const double delta = dot(d_o, o.data(), hd);
          for (const Pair& pair : pairs) {
            const double* k = keys[pair.set].k.row<double>(pair.row) + col;
            const double* v = keys[pair.set].v.row<double>(pair.row) + col;
            const double ds = pair.p * (dot(d_o, v, hd) - delta);
            const int64_t at = (pair.row - b * a.length) * hd;
            for (int64_t d = 0; d < hd; ++d) {
              dv[pair.set][size_t(at + d)] += pair.p * d_o[d];
              dk[pair.set][size_t(at + d)] += a.scale * ds * q[d];
              dq[size_t(d)] += a.scale * ds * k[d];
            }
          }
          for (int64_t d = 0; d < hd; ++d) put(query_grads[s].dq, row, h * hd + d, dq[size_t(d)]);
        }
      }
    }
    for (size_t s = 0; s < keys.size(); ++s) {
      if (!keys[s].k || !key_grads[s].dk) continue;
      const KeyGrad& grad = key_grads[s];
      for (int64_t j = 0; j < a.length; ++j)
        for (int64_t d = 0; d < hd; ++d) {
          const int64_t row = b * a.length + j, at = j * hd + d;
          put(grad.dk, row, col + d, dk[s][size_t(at)] + (grad.accumulate ? get(grad.dk, row, col + d) : 0));
          put(grad.dv, row, col + d, dv[s][size_t(at)] + (grad.accumulate ? get(grad.dv, row, col + d) : 0));
        }
    }
  });
}

}  // namespace sps::ops
