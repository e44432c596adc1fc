#include "ops/decode_attention/decode_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "ops/check.h"

namespace sps::ops {
namespace {

struct Case {
  std::string name;
  int64_t heads, kv_heads, head_dim;
  std::array<std::array<Band, kMaxKeySets>, kMaxQueryStreams> bands;
  std::vector<int64_t> lengths;
  int64_t document = 0;  // documents are about that long; 0: one
  int64_t page = 64;
  std::array<bool, kMaxQueryStreams> streams{true, true};
};

const Band kNone = Band::none(), kAll = Band::causal();

using Bands = std::array<Band, kMaxKeySets>;

std::vector<Case> cases() {
  const auto two = [](Bands x, Bands p) { return std::array<Bands, kMaxQueryStreams>{x, p}; };
  const Bands all{kAll, kNone, kNone}, nothing{};
  const auto beside = [](Band state, Band pred) { return Bands{state, pred, kNone}; };
  return {
      {"standard", 4, 4, 16, two(all, nothing), {37, 5, 64, 130}, 0, 16, {true, false}},
      {"sps", 2, 2, 64, two(beside(kAll, {1, 5}), beside(kAll, {0, 5})), {70, 1, 33}, 12, 8},
      {"sps_own_key_only", 3, 3, 24, two(all, beside(kAll, {0, 0})), {40, 17}, 0, 5},
      {"reverse", 2, 1, 32, two(beside({0, 3}, {1, Band::kInf}), beside({0, 3}, kAll)), {50, 90}, 20, 16},
      {"free_pause", 6, 2, 48, two(all, all), {129, 20, 3}, 40, 64},
      {"read_set", 2, 2, 20, two(nothing, {kNone, {0, 2}, kAll}), {31, 60}, 9, 7, {false, true}},
      {"odd_bands", 2, 2, 8, two(beside({0, 3}, {2, 5}), beside({1, 4}, {0, 1})), {45, 26}, 11, 64},
      {"long", 2, 1, 16, two(beside(kAll, {1, 9}), beside(kAll, {0, 9})), {2500, 1030}, 1700, 64},
      {"long_window", 1, 1, 16, two(beside({0, 1200}, kNone), all), {1500}, 0, 64},
      {"many_heads", 40, 1, 8, two(beside(kAll, {1, 2}), beside(kAll, {0, 2})), {70}, 0, 32},
  };
}

// Several whole sequences: their queries and keys, sequence after sequence.
struct Sequences {
  Case c;
  std::vector<int64_t> start;  // row of each sequence's first position
  int64_t rows = 0;
  std::vector<int32_t> document_start;  // by row
  std::array<Matrix, kMaxQueryStreams> q;
  std::array<Matrix, kMaxKeySets> k, v;
  std::array<bool, kMaxKeySets> present{};

  Sequences(const Case& the_case, DType dtype) : c(the_case) {
    const Rng rng(3, "documents");
    for (const int64_t length : c.lengths) {
      start.push_back(rows);
      for (int64_t i = 0, first = 0; i < length; ++i) {
        if (c.document > 0 && rng.below(uint64_t(rows + i), uint64_t(c.document)) == 0) first = i;
        document_start.push_back(int32_t(first));
      }
      rows += length;
    }
    for (size_t s = 0; s < q.size(); ++s) {
      if (!c.streams[s]) continue;
      q[s] = Matrix(dtype, rows, c.heads * c.head_dim);
      q[s].randomise(1, fmt::format("q{}", s), 1.5);
      for (size_t n = 0; n < present.size(); ++n) present[n] |= !c.bands[s][n].empty();
    }
    for (size_t n = 0; n < k.size(); ++n) {
      if (!present[n]) continue;
      k[n] = Matrix(dtype, rows, c.kv_heads * c.head_dim);
      k[n].randomise(1, fmt::format("k{}", n));
      v[n] = Matrix(dtype, rows, c.kv_heads * c.head_dim);
      v[n].randomise(1, fmt::format("v{}", n));
    }
  }
  float scale() const { return 1 / std::sqrt(float(c.head_dim)); }
};

using Outputs = std::array<Matrix, kMaxQueryStreams>;

// The whole of every sequence in one call of the other operation's reference.
Outputs whole(const Sequences& all) {
  Outputs out;
  const Case& c = all.c;
  for (size_t s = 0; s < out.size(); ++s)
    if (c.streams[s]) out[s] = Matrix(DType::f64, all.rows, c.heads * c.head_dim);
  const auto in_double = [](const Matrix& m) { return m->empty() ? Matrix() : m.to(DType::f64); };
  for (size_t b = 0; b < c.lengths.size(); ++b) {
    const int64_t from = all.start[b], n = c.lengths[b];
    std::array<QueryStream, kMaxQueryStreams> queries;
    std::array<KeySet, kMaxKeySets> keys;
    std::vector<Matrix> kept;
    kept.reserve(16);
    const auto part = [&](const Matrix& m) {
      kept.push_back(in_double(m));
      return kept.back()->rows_from(from, n);
    };
    for (size_t s = 0; s < queries.size(); ++s) {
      if (!c.streams[s]) continue;
      kept.emplace_back(DType::f64, n, c.heads);
      const Tensor lse = kept.back();
      queries[s] = {part(all.q[s]), out[s]->rows_from(from, n), lse, c.bands[s]};
    }
    for (size_t k = 0; k < keys.size(); ++k)
      if (all.present[k]) keys[k] = {part(all.k[k]), part(all.v[k])};
    const std::span starts(all.document_start.data() + from, size_t(n));
    attention_forward({}, {1, n, c.heads, c.kv_heads, c.head_dim, all.scale(), starts}, queries, keys);
  }
  return out;
}

// The same in steps: each takes some of the sequences a few positions on. `most` positions a step; what is
// not yet written into a cache is NaN.
Outputs in_steps(const Sequences& all, DType dtype, int64_t most, uint64_t seed) {
  const Case& c = all.c;
  const Rng rng(seed, "cuts");
  const size_t slots = c.lengths.size();
  int64_t longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  const int64_t per_slot = (longest + c.page - 1) / c.page;
  // Pages handed out in a scattered order; ring slots are scattered too.
  std::vector<int32_t> table(slots * size_t(per_slot));
  for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t((i * 7 + 3) % table.size());
  for (size_t i = 0; table.size() % 7 == 0 && i < table.size(); ++i) table[i] = int32_t(table.size() - 1 - i);
  const auto slot_of = [&](size_t b) { return int32_t(slots - 1 - b); };

  std::array<KeyCache, kMaxKeySets> caches;
  std::array<Matrix, kMaxKeySets> cache_k, cache_v;
  for (size_t n = 0; n < caches.size(); ++n) {
    if (!all.present[n]) continue;
    int64_t ring = 0;
    bool paged = false;
    for (size_t s = 0; s < c.bands.size(); ++s) {
      const Band band = c.streams[s] ? c.bands[s][n] : kNone;
      if (band.empty()) continue;
      paged |= band.hi == Band::kInf;
      ring = std::max(ring, band.hi);
    }
    const int64_t rows = paged ? c.page : ring, blocks = paged ? int64_t(table.size()) : int64_t(slots);
    if (rows == 0) continue;
    cache_k[n] = Matrix(dtype, blocks * c.kv_heads * rows, c.head_dim);
    cache_k[n].fill(NAN);
    cache_v[n] = Matrix(dtype, blocks * c.kv_heads * rows, c.head_dim);
    cache_v[n].fill(NAN);
    caches[n] = {cache_k[n], cache_v[n], rows, paged};
  }

  Outputs out;
  for (size_t s = 0; s < out.size(); ++s)
    if (c.streams[s]) out[s] = Matrix(dtype, all.rows, c.heads * c.head_dim);
  std::vector<int64_t> done(slots, 0);
  for (uint64_t draw = 0; done != c.lengths;) {
    std::vector<int32_t> slot, row, count, begin, first, starts;
    std::vector<int64_t> source;
    for (size_t b = 0; b < slots; ++b) {
      const int64_t left = c.lengths[b] - done[b];
      if (left == 0 || rng.below(draw++, 4) == 0) continue;
      const int64_t n = std::min(left, 1 + int64_t(rng.below(draw++, uint64_t(most))));
      slot.push_back(slot_of(b)), row.push_back(int32_t(source.size())), count.push_back(int32_t(n));
      begin.push_back(int32_t(done[b])), first.push_back(0);
      for (int64_t i = 0; i < n; ++i) source.push_back(all.start[b] + done[b] + i);
      done[b] += n;
    }
    if (slot.empty()) continue;
    for (const int64_t r : source) starts.push_back(all.document_start[size_t(r)]);
    const auto rows = int64_t(source.size());
    const auto gather = [&](const Matrix& m) {
      Matrix part(dtype, rows, m->cols, m->cols + 3);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t col = 0; col < m->cols; ++col) part.set(r, col, m.get(source[size_t(r)], col));
      return part;
    };
    DecodeStep step;
    step.runs = int64_t(slot.size());
    step.longest = *std::max_element(count.begin(), count.end());
    step.slot = slot, step.table = {table, per_slot};
    for (StepRows& s : step.stream) s = {row, count, begin, first, starts};
    const DecodeShape shape{c.heads, c.kv_heads, c.head_dim, all.scale()};
    std::array<Matrix, kMaxQueryStreams> q, o;
    std::array<Matrix, kMaxKeySets> k, v;
    std::array<DecodeQueries, kMaxQueryStreams> queries;
    std::array<DecodeKeys, kMaxKeySets> keys;
    for (size_t s = 0; s < q.size(); ++s) {
      if (!c.streams[s]) continue;
      q[s] = gather(all.q[s]), o[s] = Matrix(dtype, rows, c.heads * c.head_dim);
      queries[s] = {q[s], o[s], c.bands[s]};
    }
    for (size_t n = 0; n < k.size(); ++n) {
      if (!all.present[n]) continue;
      k[n] = gather(all.k[n]), v[n] = gather(all.v[n]);
      keys[n] = {k[n], v[n], n == 1 ? 1 : 0, caches[n]};
    }
    decode_attention({}, shape, step, queries, keys);
    for (const DecodeKeys& set : keys)
      if (set.k) keep_keys({}, shape, step, set);
    for (size_t s = 0; s < o.size(); ++s)
      for (int64_t r = 0; c.streams[s] && r < rows; ++r)
        for (int64_t col = 0; col < o[s]->cols; ++col) out[s].set(source[size_t(r)], col, o[s].get(r, col));
  }
  return out;
}

double largest_difference(const Outputs& a, const Outputs& b) {
  double most = 0;
  for (size_t s = 0; s < a.size(); ++s)
    for (int64_t r = 0; r < a[s]->rows; ++r)
      for (int64_t col = 0; col < a[s]->cols; ++col) {
        const double d = std::abs(a[s].get(r, col) - b[s].get(r, col));
        most = d <= most ? most : d;  // a NaN is kept
      }
  return most;
}

bool same_bits(const Outputs& a, const Outputs& b) {
  for (size_t s = 0; s < a.size(); ++s)
    if (!std::ranges::equal(a[s].whole(), b[s].whole())) return false;
  return true;
}

class DecodeAttention : public testing::TestWithParam<Case> {};

// Values are averages of numbers of size 1, so absolute differences are relative ones.
TEST_P(DecodeAttention, StepsGiveWhatTheWholeGives) {
  for (const auto& [dtype, tolerance] :
       {std::pair{DType::f64, 1e-13}, std::pair{DType::f32, 3e-6}, std::pair{DType::bf16, 1.0 / 128}}) {
    const Sequences all(GetParam(), dtype);
    const Outputs truth = whole(all);
    for (const int64_t most : {1, 9, 150})
      EXPECT_LE(largest_difference(in_steps(all, dtype, most, 1), truth), tolerance)
          << dtype_name(dtype) << " up to " << most;
  }
}

TEST_P(DecodeAttention, BitsDoNotDependOnCutsOrThreads) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Sequences all(GetParam(), dtype);
    const Outputs one_by_one = in_steps(all, dtype, 1, 1);
    for (const int64_t most : {4, 100, 3000})
      EXPECT_TRUE(same_bits(in_steps(all, dtype, most, 2), one_by_one)) << most;
    const int before = thread_count();
    set_thread_count(2);
    EXPECT_TRUE(same_bits(in_steps(all, dtype, 700, 5), one_by_one));
    set_thread_count(before);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DecodeAttention, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// One query on one key: the value itself, whatever the score. No key: zeros. Scores that would overflow.
TEST(DecodeAttentionEdges, FewKeys) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    Matrix q(dtype, 2, 4), o(dtype, 2, 4), k(dtype, 2, 4), v(dtype, 2, 4);
    q.fill(100), k.fill(100), v.randomise(1, "v");
    const std::vector<int32_t> slot{0}, row{0}, count{2}, begin{0}, first{0}, starts{0, 1};
    DecodeStep step{1, 2, slot, {}, {}};
    for (StepRows& s : step.stream) s = {row, count, begin, first, starts};
    const DecodeShape shape{1, 1, 4, 0.5F};
    o.fill(7);
    decode_attention({}, shape, step, {{{q, o, {Band{0, 0}}}, {}}}, {{{k, v, 0, {}}, {}, {}}});
    for (int64_t r = 0; r < 2; ++r)
      for (int64_t c = 0; c < 4; ++c) EXPECT_EQ(o.get(r, c), v.get(r, c));
    const std::vector<int32_t> late{9};
    step.stream[1].first = late;
    o.fill(7);
    decode_attention({}, shape, step, {{{q, o, {Band{0, 0}}}, {}}}, {{{k, v, 1, {}}, {}, {}}});
    for (int64_t r = 0; r < 2; ++r)
      for (int64_t c = 0; c < 4; ++c) EXPECT_EQ(o.get(r, c), 0);
    // A score that is not a number reaches the output and is not taken for nothing.
    k.set(0, 0, NAN);
    decode_attention({}, shape, step, {{{q, o, {Band{0, 0}}}, {}}}, {{{k, v, 0, {}}, {}, {}}});
    EXPECT_TRUE(std::isnan(o.get(0, 0)));
    EXPECT_EQ(o.get(1, 0), v.get(1, 0));
  }
}

}  // namespace
}  // namespace sps::ops
