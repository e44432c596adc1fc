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
  int64_t tail = 24;  // positions before the last so many are taken in large pieces in any case
};

const Band kNone = Band::none(), kAll = Band::causal();

using Bands = std::array<Band, kMaxKeySets>;

std::vector<int64_t> many_lengths() {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 45; ++i) lengths.push_back(68 + i % 5);
  return lengths;
}

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
      {"long",
       2,
       1,
       16,
       two(beside(kAll, {1, 9}), beside(kAll, {0, 9})),
       {2500, 1030},
       1700,
       64,
       {true, true},
       9},
      {"long_window", 1, 1, 16, two(beside({0, 1200}, kNone), all), {1500}, 0, 64, {true, true}, 9},
      {"many_heads",
       40,
       1,
       8,
       two(beside(kAll, {1, 2}), beside(kAll, {0, 2})),
       {70},
       0,
       32,
       {true, true},
       12},
      {"wide",
       4,
       4,
       96,
       two(beside(kAll, {1, 70}), beside(kAll, {0, 70})),
       {400, 129, 1},
       0,
       64,
       {true, true},
       20},
      {"wide_groups", 8, 2, 128, two(all, all), {300, 257}, 90, 64, {true, true}, 20},
      // Alone in a step three and four queries read a key, in pieces of prompts many.
      {"groups_of_three", 6, 2, 32, two(all, nothing), {150, 66}, 50, 64, {true, false}},
      {"groups_of_four", 8, 2, 64, two(beside({0, 90}, kNone), nothing), {200, 65}, 0, 24, {true, false}},
      // On a GPU: more texts than a warp has lanes, more chunks than there are warps; whole chunks in a ring;
      // pages that begin and end within a chunk.
      {"many_texts",
       8,
       8,
       8,
       two(beside(kAll, {1, 64}), beside(kAll, {0, 64})),
       many_lengths(),
       50,
       24,
       {true, true},
       5},
      {"window_of_chunks",
       2,
       2,
       64,
       two(beside({0, 128}, {1, 64}), beside({0, 128}, {0, 64})),
       {290, 64},
       0,
       64,
       {true, true},
       24},
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

// How sequences are taken in steps: each step takes some of them up to `most` positions on. Rows of queries
// and keys are `padding` numbers longer than they need to be.
struct Steps {
  int64_t most = 1;
  uint64_t seed = 1;
  Device device = Device::cpu;
  int64_t padding = 3;
};

// The same in steps. What is not yet written into a cache is NaN.
Outputs in_steps(const Sequences& all, DType dtype, const Steps& how) {
  const int64_t most = how.most;
  const Case& c = all.c;
  const Rng rng(how.seed, "cuts");
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
  OnDevice kept(how.device);
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
    caches[n] = {kept(cache_k[n]), kept(cache_v[n]), rows, paged};
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
      const bool early = left > c.tail;
      const int64_t piece =
                        1 + int64_t(rng.below(draw++, uint64_t(early ? std::max<int64_t>(most, 500) : most))),
                    n = std::min(early ? left - c.tail : left, piece);
      slot.push_back(slot_of(b)), row.push_back(int32_t(source.size())), count.push_back(int32_t(n));
      begin.push_back(int32_t(done[b])), first.push_back(0);
      for (int64_t i = 0; i < n; ++i) source.push_back(all.start[b] + done[b] + i);
      done[b] += n;
    }
    if (slot.empty()) continue;
    for (const int64_t r : source) starts.push_back(all.document_start[size_t(r)]);
    const auto rows = int64_t(source.size());
    const auto gather = [&](const Matrix& m) {
      Matrix part(dtype, rows, m->cols, m->cols + how.padding);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t col = 0; col < m->cols; ++col) part.set(r, col, m.get(source[size_t(r)], col));
      return part;
    };
    const DecodeShape shape{c.heads, c.kv_heads, c.head_dim, all.scale()};
    std::array<Matrix, kMaxQueryStreams> q, o;
    std::array<Matrix, kMaxKeySets> k, v;
    {
      OnDevice on(how.device);
      DecodeStep step;
      step.runs = int64_t(slot.size());
      step.longest = *std::max_element(count.begin(), count.end());
      step.slot = on.ids(slot), step.table = {on.ids(table), per_slot};
      for (StepRows& s : step.stream)
        s = {on.ids(row), on.ids(count), on.ids(begin), on.ids(first), on.ids(starts)};
      std::array<DecodeQueries, kMaxQueryStreams> queries;
      std::array<DecodeKeys, kMaxKeySets> keys;
      for (size_t s = 0; s < q.size(); ++s) {
        if (!c.streams[s]) continue;
        q[s] = gather(all.q[s]), o[s] = Matrix(dtype, rows, c.heads * c.head_dim);
        queries[s] = {on(q[s]), on(o[s]), c.bands[s]};
      }
      for (size_t n = 0; n < k.size(); ++n) {
        if (!all.present[n]) continue;
        k[n] = gather(all.k[n]), v[n] = gather(all.v[n]);
        keys[n] = {on(k[n]), on(v[n]), n == 1 ? 1 : 0, caches[n]};
      }
      decode_attention(on.exec(), shape, step, queries, keys);
      keep_keys(on.exec(), c.head_dim, step, keys);
    }
    for (size_t s = 0; s < o.size(); ++s)
      for (int64_t r = 0; c.streams[s] && r < rows; ++r)
        for (int64_t col = 0; col < o[s]->cols; ++col) out[s].set(source[size_t(r)], col, o[s].get(r, col));
  }
  return out;
}

// Of numbers above 1 relative to b's: half a unit of bf16 is 1/256 of the number, which passes any fixed
// bound.
double largest_difference(const Outputs& a, const Outputs& b) {
  double most = 0;
  for (size_t s = 0; s < a.size(); ++s)
    for (int64_t r = 0; r < a[s]->rows; ++r)
      for (int64_t col = 0; col < a[s]->cols; ++col) {
        const double truth = b[s].get(r, col),
                     d = std::abs(a[s].get(r, col) - truth) / std::max(1.0, std::abs(truth));
        most = worse(most, d);
      }
  return most;
}

bool same_bits(const Outputs& a, const Outputs& b) {
  for (size_t s = 0; s < a.size(); ++s)
    if (!std::ranges::equal(a[s].whole(), b[s].whole())) return false;
  return true;
}

class DecodeAttention : public testing::TestWithParam<Case> {};

// Values are averages of numbers of size 1: absolute differences are relative ones, but for averages of a few
// keys, which may be several times as large and are rounded in proportion. On a GPU the weights
// of an average are rounded to bf16, too.
TEST_P(DecodeAttention, StepsGiveWhatTheWholeGives) {
  for (const Backend& backend : all_backends()) {
    const bool gpu = backend.device == Device::cuda;
    const double tolerance = backend.dtype == DType::f64   ? 1e-13
                             : backend.dtype == DType::f32 ? 3e-6
                                                           : 1.0 / (gpu ? 64 : 128);
    const Sequences all(GetParam(), backend.dtype);
    const Outputs truth = whole(all);
    for (const Steps& how : std::vector<Steps>{{1, 1, backend.device, 3},
                                               {9, 1, backend.device, 8},
                                               {150, 1, backend.device, 8},
                                               {1000, 1, backend.device, 3}})
      EXPECT_LE(largest_difference(in_steps(all, backend.dtype, how), truth), tolerance)
          << backend.name() << " up to " << how.most;
  }
}

// Neither how a sequence is cut nor what else is in a step; rows that can be read 16 bytes at a time, and
// others.
TEST_P(DecodeAttention, BitsDoNotDependOnCutsOrThreads) {
  for (const Backend& backend : fast_backends())
    for (const int64_t padding : {3, 8}) {
      const Sequences all(GetParam(), backend.dtype);
      const Outputs one_by_one = in_steps(all, backend.dtype, {1, 1, backend.device, padding});
      for (const int64_t most : {4, 100, 3000})
        EXPECT_TRUE(same_bits(in_steps(all, backend.dtype, {most, 2, backend.device, padding}), one_by_one))
            << backend.name() << " up to " << most << " padding " << padding;
      if (backend.device == Device::cuda) continue;
      const int before = thread_count();
      set_thread_count(2);
      EXPECT_TRUE(same_bits(in_steps(all, backend.dtype, {700, 5, backend.device, padding}), one_by_one));
      set_thread_count(before);
    }
}

// Keys and values that are not numbers reach the rows that see them, and no bit of the others.
TEST_P(DecodeAttention, WhatIsNoNumberReachesThoseWhoSeeIt) {
  const Case& c = GetParam();
  for (const Backend& backend : fast_backends()) {
    const Sequences clean(c, backend.dtype), poisoned(c, backend.dtype);
    // Of one position, the key in the last head of each set, or the value.
    const int64_t at = clean.start[0] + c.lengths[0] / 3, column = (c.kv_heads - 1) * c.head_dim;
    const bool of_value = c.lengths[0] % 2 == 0;
    for (size_t n = 0; n < clean.present.size(); ++n)
      if (clean.present[n]) (of_value ? poisoned.v : poisoned.k)[n].set(at, column, NAN);
    for (const int64_t most : {1, 200}) {
      const Steps how{most, 3, backend.device, 8};
      const Outputs want = in_steps(clean, backend.dtype, how), got = in_steps(poisoned, backend.dtype, how);
      for (size_t s = 0; s < got.size(); ++s)
        for (int64_t r = 0; r < got[s]->rows; ++r) {
          bool sees = false;
          for (size_t n = 0; n < clean.present.size(); ++n) {
            const Band band = c.streams[s] ? c.bands[s][n] : kNone;
            sees |= r < clean.start[0] + c.lengths[0] && r - at >= band.lo && r - at <= band.hi &&
                    clean.start[0] + clean.document_start[size_t(r)] <= at;
          }
          for (int64_t col = 0; col < got[s]->cols; ++col) {
            const int64_t key_head = col / c.head_dim / (c.heads / c.kv_heads);
            const bool no_number = sees && key_head == c.kv_heads - 1 && (!of_value || col % c.head_dim == 0);
            if (no_number)
              ASSERT_TRUE(std::isnan(got[s].get(r, col)))
                  << backend.name() << " row " << r << " column " << col;
            else
              ASSERT_EQ(got[s].get(r, col), want[s].get(r, col))
                  << backend.name() << " row " << r << " column " << col;
          }
        }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, DecodeAttention, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// One query on one key: the value itself, whatever the score. No key: zeros. Scores that would overflow.
TEST(DecodeAttentionEdges, FewKeys) {
  for (const Backend& backend : all_backends())
    for (const int64_t width : {4, 8}) {
      const DType dtype = backend.dtype;
      Matrix q(dtype, 2, width), o(dtype, 2, width), k(dtype, 2, width), v(dtype, 2, width);
      q.fill(100), k.fill(100), v.randomise(1, "v");
      const std::vector<int32_t> slot{0}, row{0}, count{2}, begin{0}, first{0}, late{9}, starts{0, 1};
      // Each row sees the key of its own position; `first`: from which position on there are any.
      const auto attend = [&](const std::vector<int32_t>& first_key) {
        o.fill(7);
        OnDevice on(backend.device);
        DecodeStep step{1, 2, on.ids(slot), {}, {}};
        for (StepRows& s : step.stream)
          s = {on.ids(row), on.ids(count), on.ids(begin), on.ids(first_key), on.ids(starts)};
        decode_attention(on.exec(), {1, 1, width, 0.5F}, step, {{{on(q), on(o), {Band{0, 0}}}, {}}},
                         {{{on(k), on(v), 0, {}}, {}, {}}});
      };
      attend(first);
      for (int64_t r = 0; r < 2; ++r)
        for (int64_t c = 0; c < width; ++c) EXPECT_EQ(o.get(r, c), v.get(r, c)) << backend.name();
      attend(late);
      for (int64_t r = 0; r < 2; ++r)
        for (int64_t c = 0; c < width; ++c) EXPECT_EQ(o.get(r, c), 0) << backend.name();
      // A score that is not a number reaches the output and is not taken for nothing.
      k.set(0, 0, NAN);
      attend(first);
      EXPECT_TRUE(std::isnan(o.get(0, 0))) << backend.name();
      EXPECT_EQ(o.get(1, 0), v.get(1, 0)) << backend.name();
    }
}

}  // namespace
}  // namespace sps::ops
