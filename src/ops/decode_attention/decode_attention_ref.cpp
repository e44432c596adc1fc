// The formula of decode_attention.h as loops in double. Visibility is asked key by key from its definition.
#include <cmath>
#include <vector>

#include "ops/decode_attention/decode_attention_kernels.h"

namespace sps::ops {

namespace {

struct SeenKey {
  const double *k, *v;  // of the query's key head
  double p;             // first the score, then the probability
};

}  // namespace

void decode_attention_ref(const DecodeShape& shape, const DecodeStep& step, const DecodeQuerySet& queries,
                          const DecodeKeySets& keys) {
  const int64_t hd = shape.head_dim, group = shape.heads / shape.kv_heads;
  std::vector<SeenKey> seen;
  for (size_t s = 0; s < queries.size(); ++s) {
    if (!queries[s].q) continue;
    const StepRows& rows = step.stream[s];
    for (size_t run = 0; run < size_t(step.runs); ++run) {
      for (int64_t t = 0; t < rows.count[run]; ++t) {
        const int64_t row = rows.row[run] + t, i = rows.begin[run] + t;
        for (int64_t h = 0; h < shape.heads; ++h) {
          const double* q = queries[s].q.row<double>(row) + h * hd;
          const int64_t head = h / group;
          double top = -INFINITY, sum = 0;
          seen.clear();
          for (size_t n = 0; n < keys.size(); ++n) {
            const Band band = queries[s].band[n];
            if (band.empty()) continue;
            const DecodeKeys& set = keys[n];
            const StepRows& own = step.stream[size_t(set.stream)];
            for (int64_t j = 0; j <= i; ++j) {
              if (i - j < band.lo || i - j > band.hi) continue;
              if (j < rows.document_start[size_t(row)] || j < own.first[run]) continue;
              SeenKey key{};
              if (j < own.begin[run]) {
                const int64_t at = cache_row(set.cache, step.table, shape.kv_heads, step.slot[run], head, j);
                key = {set.cache.k.row<double>(at), set.cache.v.row<double>(at), 0};
              } else {
                const int64_t at = own.row[run] + j - own.begin[run];
                key = {set.k.row<double>(at) + head * hd, set.v.row<double>(at) + head * hd, 0};
              }
              for (int64_t d = 0; d < hd; ++d) key.p += q[d] * key.k[d];
              key.p *= shape.scale;
              top = std::max(top, key.p);
              seen.push_back(key);
            }
          }
          double* o = queries[s].o.row<double>(row) + h * hd;
          std::fill(o, o + hd, 0.0);
          for (SeenKey& key : seen) sum += key.p = std::exp(key.p - top);
          for (const SeenKey& key : seen)
            for (int64_t d = 0; d < hd; ++d) o[d] += key.p / sum * key.v[d];
        }
      }
    }
  }
}

}  // namespace sps::ops
