// The call that turns rows and keeps keys, against the operations that it stands for, bit by bit.
#include <gtest/gtest.h>

#include "ops/check.h"
#include "ops/decode_attention/decode_attention.h"

namespace sps::ops {
namespace {

struct Case {
  std::string name;
  int64_t heads, kv_heads, head_dim, width;  // rotated columns
  RopePairs pairs;
  bool norm;
  std::array<std::array<Band, 2>, kMaxQueryStreams> bands;  // per stream: over the keys of x, of p
  std::array<bool, kMaxQueryStreams> asks{true, true};
  int64_t texts = 4;
  bool p_turned = false;  // p's keys come turned
};

std::vector<Case> cases() {
  using Bands = std::array<Band, 2>;
  const auto two = [](Bands x, Bands p) { return std::array<Bands, kMaxQueryStreams>{x, p}; };
  const auto window = [](int64_t lo, int64_t hi) { return Band{lo, hi}; };
  const Band all = Band::causal(), none = Band::none();
  const auto half = RopePairs::half_split, next = RopePairs::adjacent;
  return {
      {"standard", 3, 3, 64, 64, half, false, two({all, none}, {none, none}), {true, false}},
      {"sps", 2, 2, 64, 64, next, false, two({all, window(1, 5)}, {all, window(0, 5)})},
      {"keys_only", 2, 2, 64, 32, next, true, two({none, none}, {all, window(0, 140)}), {false, true}},
      {"free_pause", 8, 2, 96, 48, half, true, two({all, none}, {all, none})},
      {"wide", 4, 2, 128, 128, next, true, two({window(0, 3), none}, {window(0, 3), window(0, 0)})},
      {"chunks_in_rings", 4, 4, 64, 64, half, true, two({all, window(1, 64)}, {all, window(0, 64)})},
      {"turned_before",
       4,
       2,
       96,
       96,
       next,
       true,
       two({all, window(1, 70)}, {all, window(0, 70)}),
       {true, true},
       4,
       true},
      {"crowd", 2, 2, 64, 64, half, true, two({all, window(1, 9)}, {all, window(0, 9)}), {true, true}, 40},
      {"narrow", 2, 1, 16, 16, half, true, two({all, window(1, 200)}, {all, window(0, 200)})},
  };
}

// Several texts at once, each one position on; their caches hold what an earlier step might have left.
struct Texts {
  static constexpr int64_t kPage = 32, kPerSlot = 12, kPositions = kPage * kPerSlot;
  // Texts in other slots than their numbers, one slot is free; every fourth has no prediction row.
  int64_t texts, slots;
  std::vector<int32_t> slot, begin, document, zero, one, row, count_p, table;
  std::array<Matrix, 2> q, o, q_turned, k, v, k_turned, cache_k, cache_v;
  Matrix cos, sin, q_gain, k_gain;

  explicit Texts(const Case& c) : texts(c.texts), slots(c.texts + 1) {
    for (int32_t i = 0; i < texts; ++i) {
      const std::array<int32_t, 4> positions{300, 0, 127, 128}, starts{250, 0, 3, 0};
      const size_t kind = size_t(i % 4);
      // The first four as they are, the others somewhat later.
      slot.push_back(int32_t((i * 2 + 3) % slots)), begin.push_back(positions[kind] + i / 4 * 5);
      document.push_back(starts[kind]), zero.push_back(0), one.push_back(1), row.push_back(i);
      count_p.push_back(kind == 3 ? 0 : 1);
    }
    for (int64_t i = 0; i < slots * kPerSlot; ++i) table.push_back(int32_t(i * 7 % (slots * kPerSlot)));
    cos = Matrix(DType::f32, kPositions, c.width / 2), sin = Matrix(DType::f32, kPositions, c.width / 2);
    rope_fill({cos, sin, c.pairs}, 10000);
    q_gain = Matrix(DType::f32, 1, c.head_dim), k_gain = Matrix(DType::f32, 1, c.head_dim);
    q_gain.randomise(4, "q gain", 0.3, 1), k_gain.randomise(4, "k gain", 0.3, 1);
    const int64_t wide = c.heads * c.head_dim, narrow = c.kv_heads * c.head_dim;
    for (size_t s = 0; s < 2; ++s) {
      const auto fresh = [&](int64_t cols, const char* name) {
        Matrix m(DType::bf16, texts, cols, cols + 8);
        m.randomise(5 + s, name, 1.5);
        return m;
      };
      q[s] = fresh(wide, "q"), o[s] = fresh(wide, "o"), q_turned[s] = fresh(wide, "nothing");
      k[s] = fresh(narrow, "k"), v[s] = fresh(narrow, "v"), k_turned[s] = fresh(narrow, "nothing");
      const int64_t rows = (paged(s) ? slots * kPerSlot : slots) * c.kv_heads * rows_of_block(c, s);
      cache_k[s] = Matrix(DType::bf16, rows, c.head_dim), cache_v[s] = Matrix(DType::bf16, rows, c.head_dim);
      cache_k[s].randomise(7 + s, "cache k"), cache_v[s].randomise(7 + s, "cache v");
    }
  }
  static bool paged(size_t set) { return set == 0; }
  static int64_t rows_of_block(const Case& c, size_t set) {
    int64_t most = 1;
    for (const auto& bands : c.bands) most = std::max(most, bands[set].hi);
    return paged(set) ? kPage : most;
  }
};

struct Schedules {
  DecodeSchedules* of_calls = nullptr;
  int32_t number = 0;
};

void attend(const Case& c, Texts& t, bool fused, Schedules schedules = {}) {
  Matrix rstd(DType::f32, t.texts, c.heads);
  OnDevice on(Device::cuda);
  const auto has = [&](size_t set) { return !c.bands[0][set].empty() || !c.bands[1][set].empty(); };
  const auto turns_keys = [&](size_t set) { return set == 0 || !c.p_turned; };
  DecodeStep step{t.texts, 1, on.ids(t.slot), {}, {on.ids(t.table), Texts::kPerSlot}};
  step.stream[0] = {on.ids(t.row), on.ids(t.one), on.ids(t.begin), on.ids(t.zero), on.ids(t.document)};
  step.stream[1] = {on.ids(t.row), on.ids(t.count_p), on.ids(t.begin), on.ids(t.zero), on.ids(t.document)};
  std::vector<int32_t> number{schedules.number};
  step.schedules = schedules.of_calls, step.number = on.ids(number);
  const DecodeShape shape{c.heads, c.kv_heads, c.head_dim, 0.1F};
  DecodeRotation rotation;
  rotation.table = {on(t.cos), on(t.sin), c.pairs}, rotation.eps = 1e-5F;
  std::array<DecodeQueries, kMaxQueryStreams> queries;
  std::array<DecodeKeys, kMaxKeySets> keys;
  for (size_t s = 0; s < 2; ++s) {
    if (c.asks[s]) queries[s] = {on(t.q[s]), on(t.o[s]), {c.bands[s][0], c.bands[s][1], Band::none()}};
    if (c.norm) rotation.q_gain[s] = on(t.q_gain);
    if (!has(s)) continue;
    keys[s] = {on(t.k[s]),
               on(t.v[s]),
               int(s),
               {on(t.cache_k[s]), on(t.cache_v[s]), Texts::rows_of_block(c, s), Texts::paged(s)}};
    rotation.set[s].keep = true;
    if (!turns_keys(s)) continue;
    rotation.set[s].k = on(t.k_turned[s]);
    if (c.norm) rotation.set[s].gain = on(t.k_gain);
  }
  if (fused) {
    ASSERT_TRUE(decode_attention_rotates(on.exec(), shape, step, queries, keys, rotation));
    return decode_attention(on.exec(), shape, step, queries, keys, rotation);
  }
  const auto turn = [&](Tensor x, int64_t heads, Tensor gain, Tensor y) {
    rope_forward(on.exec(), x, heads, rotation.table, on.ids(t.begin), {gain, rotation.eps},
                 gain ? on(rstd).cols_from(0, heads) : Tensor{}, y);
  };
  for (size_t s = 0; s < 2; ++s) {
    if (c.asks[s]) {
      turn(queries[s].q, c.heads, rotation.q_gain[s], on(t.q_turned[s]));
      queries[s].q = on(t.q_turned[s]);
    }
    if (!has(s) || !turns_keys(s)) continue;
    turn(keys[s].k, c.kv_heads, rotation.set[s].gain, on(t.k_turned[s]));
    keys[s].k = on(t.k_turned[s]);
  }
  decode_attention(on.exec(), shape, step, queries, keys);
  keep_keys(on.exec(), c.head_dim, step, keys);
}

class DecodeRotationTest : public testing::TestWithParam<Case> {};

TEST_P(DecodeRotationTest, IsTheOperationsItStandsFor) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  const Case& c = GetParam();
  Texts one(c), other(c);
  attend(c, one, true), attend(c, other, false);
  for (size_t s = 0; s < 2; ++s) {
    EXPECT_EQ(bits(one.o[s]), bits(other.o[s])) << "stream " << s;
    EXPECT_EQ(bits(one.cache_k[s]), bits(other.cache_k[s])) << "set " << s;
    EXPECT_EQ(bits(one.cache_v[s]), bits(other.cache_v[s])) << "set " << s;
    // Where a text has no row of predictions what stands there means nothing.
    for (int64_t r = 0; r < one.texts; ++r) {
      if (s == 1 && one.count_p[size_t(r)] == 0) continue;
      for (int64_t col = 0; col < one.k_turned[s]->cols; ++col)
        ASSERT_EQ(one.k_turned[s].get(r, col), other.k_turned[s].get(r, col)) << "set " << s << " row " << r;
    }
  }
  // Something has happened.
  EXPECT_NE(bits(one.cache_k[0]), bits(Texts(c).cache_k[0]));
}

// What one call of a step leaves for the next changes nothing, and is not taken for another step's.
TEST_P(DecodeRotationTest, SchedulesOfAStepChangeNothing) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  const Case& c = GetParam();
  DecodeSchedules schedules(open_gpu());
  const auto later = [&](int32_t by) {
    Texts t(c);
    for (int32_t& begin : t.begin) begin += by;
    return t;
  };
  const auto same = [&](const Texts& a, const Texts& b) {
    for (size_t s = 0; s < 2; ++s)
      if (bits(a.o[s]) != bits(b.o[s]) || bits(a.cache_k[s]) != bits(b.cache_k[s]) ||
          bits(a.cache_v[s]) != bits(b.cache_v[s]))
        return false;
    return true;
  };
  for (const int32_t step : {1, 2, 3}) {
    Texts alone = later(step);
    attend(c, alone, true);
    for (const char* call : {"that leaves a schedule", "that finds it"}) {
      Texts t = later(step);
      attend(c, t, true, {&schedules, step});
      EXPECT_TRUE(same(t, alone)) << "the call " << call << " in step " << step;
    }
  }
  // It is found indeed: under an old number texts are looked for in the slots that they had then.
  Texts right = later(3), wrong = later(3);
  for (Texts* t : {&right, &wrong})
    for (int32_t& slot : t->slot) slot = int32_t((slot + 1) % t->slots);
  attend(c, right, true), attend(c, wrong, true, {&schedules, 3});
  EXPECT_FALSE(same(wrong, right));
}

INSTANTIATE_TEST_SUITE_P(Cases, DecodeRotationTest, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace sps::ops
