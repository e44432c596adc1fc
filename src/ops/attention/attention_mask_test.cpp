// Which pairs count: bands, documents, tiles, poison, and what must not change a bit.
#include <cstring>

#include "base/error.h"
#include "ops/attention/attention_case.h"

namespace sps::ops {

namespace {

// The definition, pair by pair, apart from the code under test.
bool sees(Band band, int64_t i, int64_t j, const int32_t* starts) {
  return band.lo <= i - j && i - j <= band.hi && starts[i] == starts[j];
}

bool same_bits(const Matrix& a, const Matrix& b) {
  for (int64_t r = 0; r < a->rows; ++r) {
    const auto row = [r](const Matrix& m) {
      return static_cast<const std::byte*>(m->data) + r * m->stride * int64_t(dtype_size(m->dtype));
    };
    if (std::memcmp(row(a), row(b), size_t(a->cols) * dtype_size(a->dtype)) != 0) return false;
  }
  return true;
}

void expect_same_bits(const AttentionCall& a, const AttentionCall& b, bool backward = true) {
  const std::vector<Result> x = results(a, backward), y = results(b, backward);
  ASSERT_EQ(x.size(), y.size());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_TRUE(same_bits(*x[i].matrix, *y[i].matrix)) << x[i].name;
}

void expect_finite_or_empty(const AttentionCall& call) {
  for (const Result& r : results(call, true))
    for (int64_t row = 0; row < (*r.matrix)->rows; ++row)
      for (int64_t c = 0; c < (*r.matrix)->cols; ++c) {
        const double x = r.matrix->get(row, c);
        ASSERT_TRUE(std::isfinite(x) || (r.name.starts_with("lse") && x == -INFINITY))
            << r.name << " row " << row;
      }
}

std::vector<AttentionCase> families(AttentionCase c) {
  std::vector<AttentionCase> all;
  const auto add = [&](AttentionCase family, std::string name) {
    family.name = std::move(name);
    all.push_back(std::move(family));
  };
  add(standard(c), "standard");
  add(free_pause(c), "free_pause");
  for (int64_t w :
       {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{16}, int64_t{64}, c.length - 1, c.length, c.length + 1}) {
    add(sps(c, w), fmt::format("sps {}", w));
    add(reverse_sps(c, w), fmt::format("reverse_sps {}", w));  // delayed_state has the same bands
    add(two_streams(c, Band::causal(), Band::none(), Band::causal(), {0, w}),
        fmt::format("free_pause {}", w));
  }
  return all;
}

TEST(BandArea, CountsPairs) {
  for (int64_t length : {0, 1, 2, 7, 20})
    for (int64_t lo = 0; lo < length + 3; ++lo)
      for (int64_t hi : {int64_t{-1}, lo - 1, lo, lo + 1, lo + 5, length - 1, length, Band::kInf}) {
        int64_t count = 0;
        for (int64_t i = 0; i < length; ++i)
          for (int64_t j = 0; j < length; ++j) count += lo <= i - j && i - j <= hi;
        EXPECT_EQ(band_area({lo, hi}, length), count) << lo << " " << hi << " " << length;
      }
  EXPECT_EQ(band_area(Band::none(), 5), 0);
}

TEST(BandArea, GivesThePublishedCounts) {
  const auto area = [](const AttentionCase& c, int64_t length) {
    int64_t sum = 0;
    for (const auto& stream : c.bands)
      for (Band band : stream) sum += band_area(band, length);
    return sum;
  };
  EXPECT_EQ(area(standard({}), 4096), 8390656);
  EXPECT_EQ(area(sps({}, 64), 4096), 17305536);
  EXPECT_EQ(area(sps({}, 0), 4096), 16785408);
  EXPECT_EQ(area(sps({}, 4096), 4096), 33558528);
  for (int64_t t : {1, 2, 5, 64, 1000}) {
    EXPECT_EQ(area(free_pause({}), t), t * (t + 1));
    for (int64_t w : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{16}, int64_t{64}, t - 1, t, t + 1}) {
      const int64_t formula = w >= t - 1 ? t * (2 * t + 1) : t * t + 2 * t + 2 * w * t - w * (w + 1);
      EXPECT_EQ(area(sps({}, w), t), formula) << "w " << w << " T " << t;
      EXPECT_EQ(area(reverse_sps({}, w), t), formula) << "w " << w << " T " << t;
    }
  }
}

// With q = 0 every visible key weighs the same: exp(lse) counts them and o is the mean of their values.
void expect_visible_pairs(const AttentionCase& c, DType dtype) {
  SCOPED_TRACE(fmt::format("{}, T {}, {}", c.name, c.length, dtype_name(dtype)));
  AttentionCall call(c, dtype);
  for (Matrix& q : call.q) q.fill(0);
  call.forward();
  double pairs = 0;
  for (size_t s = 0; s < 2; ++s) {
    if (!c.streams[s]) continue;
    for (int64_t r = 0; r < c.batch * c.length; ++r) {
      const int64_t base = r / c.length * c.length, i = r - base;
      double count = 0, mean = 0;
      for (size_t k = 0; k < 3; ++k)
        for (int64_t j = 0; j < c.length; ++j)
          if (sees(c.bands[s][k], i, j, call.starts_.data() + base))
            count += 1, mean += call.v[k].get(base + j, 0);
      mean /= std::max(count, 1.0);
      const double found = std::exp(call.lse[s].get(r, 0));
      pairs += found;
      ASSERT_NEAR(found, count, 1e-4 * count) << "stream " << s << " row " << i;
      ASSERT_NEAR(call.o[s].get(r, 0), mean, 4 * tolerance(dtype, 2)) << "stream " << s << " row " << i;
    }
  }
  EXPECT_NEAR(pairs, double(call.visible_pairs()), 1e-4 * pairs);
}

void expect_bands_of_every_family(const Kind& kind) {
  const Threads one(1);
  for (int64_t head_dim : {4, 8})
    for (int64_t length : {1, 3, 64, 65, 130})
      for (int64_t document : {0, 9})
        for (AttentionCase& c :
             families({.batch = 2, .length = length, .head_dim = head_dim, .document = document})) {
          c.device = kind.device, c.apart = kind.apart;
          expect_visible_pairs(c, kind.dtype);
        }
}

TEST(AttentionMask, ReferenceShowsExactlyTheBandsOfEveryFamily) {
  expect_bands_of_every_family({Device::cpu, DType::f64});
}

class AttentionBits : public AttentionOn {};
INSTANTIATE_TEST_SUITE_P(, AttentionBits, AttentionOn::kinds(), AttentionOn::name);

TEST_P(AttentionBits, ShowsExactlyTheBandsOfEveryFamily) {
  expect_bands_of_every_family(GetParam());
}

TEST_P(AttentionBits, SkippingTilesChangesNothing) {
  const Threads one(1);
  for (int64_t length : {40, 200, 290})
    for (int64_t document : {0, 60})
      for (const AttentionCase& c : families(here({.batch = 1,
                                    .length = length,
                                    .heads = 2,
                                    .kv_heads = 1,
                                    .head_dim = 32,
                                    .document = document}))) {
        SCOPED_TRACE(fmt::format("{}, T {}", c.name, length));
        AttentionCall skip(c, dtype()), visit(c, dtype());
        visit.skip_tiles = false;
        skip.forward(), skip.backward();
        visit.forward(), visit.backward();
        expect_same_bits(skip, visit);
      }
}

TEST_P(AttentionBits, ThreadsChangeNothing) {
  for (int64_t batch : {1, 5})
    for (int64_t length : {90, 700}) {
      const AttentionCase c =
          here(sps({.batch = batch, .length = length, .heads = 4, .kv_heads = 2, .head_dim = 32}, 64));
      AttentionCall one(c, dtype()), two(c, dtype());
      {
        const Threads threads(1);
        one.forward(), one.backward();
      }
      {
        const Threads threads(2);
        two.forward(), two.backward();
      }
      expect_same_bits(one, two);
    }
}

TEST_P(AttentionBits, WindowsAsLongAsTheSequenceAreNoWindows) {
  const AttentionCase c = here({.batch = 1, .length = 140, .heads = 2, .kv_heads = 2, .head_dim = 32});
  AttentionCase clipped = standard(c);
  AttentionCall full(clipped, dtype());
  full.forward(), full.backward();
  for (int64_t hi : {c.length - 1, c.length, c.length + 1, Band::kInf - 1}) {
    clipped.bands[0][0] = {0, hi};
    AttentionCall window(clipped, dtype());
    window.forward(), window.backward();
    expect_same_bits(full, window);
  }
  AttentionCall twice(sps(c, Band::kInf), dtype());
  twice.forward(), twice.backward();
  for (int64_t w : {c.length - 1, c.length, c.length + 1}) {
    AttentionCall window(sps(c, w), dtype());
    window.forward(), window.backward();
    expect_same_bits(twice, window);
  }
}

TEST_P(AttentionBits, TheSameEveryTime) {
  for (int64_t head_dim : {40, 128}) {
    AttentionCase c =
        here(sps({.batch = 2, .length = 300, .heads = 4, .kv_heads = 2, .head_dim = head_dim}, 64));
    AttentionCall once(c, dtype());
    once.forward(), once.backward();
    for (int i = 0; i < 2; ++i) {
      AttentionCall again(c, dtype());
      again.forward(), again.backward();
      expect_same_bits(once, again);
    }
  }
}

// Nothing after position i, and nothing in another document, reaches row i: not one bit.
TEST_P(AttentionBits, RowsDependOnTheirPastOfTheirDocumentOnly) {
  const AttentionCase c =
      here(sps({.batch = 1, .length = 150, .heads = 2, .kv_heads = 1, .head_dim = 32, .document = 40}, 16));
  AttentionCall before(c, dtype());
  before.forward();
  for (int64_t changed : {0, 39, 40, 41, 77, 149}) {
    AttentionCall after(c, dtype());
    for (size_t s = 0; s < 2; ++s)
      for (int64_t d = 0; d < c.head_dim; ++d) {
        after.k[s].set(changed, d, 1 + double(d));
        after.v[s].set(changed, d, 3);
      }
    after.forward();
    for (size_t s = 0; s < 2; ++s)
      for (int64_t i = 0; i < c.length; ++i) {
        const bool may = sees(c.bands[s][0], i, changed, before.starts_.data()) ||
                         sees(c.bands[s][1], i, changed, before.starts_.data());
        bool same = true;
        for (int64_t d = 0; d < before.o[s]->cols; ++d)
          same = same && before.o[s].get(i, d) == after.o[s].get(i, d);
        EXPECT_NE(same, may) << "key " << changed << " stream " << s << " row " << i;
      }
  }
}

// NaN and infinity in one document, in every tensor, with borders inside tiles: the others' results keep
// their values (within rounding: tiles with NaN take a path that sums in another order).
void expect_poison_to_stay(AttentionCase c, DType dtype, double poison) {
  AttentionCall clean(c, dtype), dirty(c, dtype);
  const int32_t target = clean.starts_[70];
  ASSERT_GT(target, 0);
  ASSERT_NE(target % 64, 0);
  const auto poisoned = [&](int64_t r) { return r < c.length && clean.starts_[size_t(r)] == target; };
  for (int64_t r = 0; r < c.batch * c.length; ++r) {
    if (!poisoned(r)) continue;
    for (size_t s = 0; s < 2; ++s) {
      for (int64_t d = 0; d < dirty.q[s]->cols; ++d)
        dirty.q[s].set(r, d, poison), dirty.d_o[s].set(r, d, poison);
      for (int64_t d = 0; d < dirty.k[s]->cols; ++d)
        dirty.k[s].set(r, d, poison), dirty.v[s].set(r, d, poison);
    }
  }
  clean.forward(), clean.backward();
  dirty.forward(), dirty.backward();
  const std::vector<Result> want = results(clean, true), got = results(dirty, true);
  for (size_t i = 0; i < want.size(); ++i) {
    int64_t nan = 0;
    for (int64_t r = 0; r < c.batch * c.length; ++r)
      for (int64_t d = 0; d < (*want[i].matrix)->cols; ++d) {
        const double x = got[i].matrix->get(r, d), y = want[i].matrix->get(r, d);
        if (poisoned(r))
          nan += std::isnan(x);
        else
          ASSERT_NEAR(x, y, tolerance(dtype) * (1 + std::abs(y))) << want[i].name << " row " << r;
      }
    EXPECT_GT(nan, 0) << want[i].name << ": the poison was not read at all";
  }
}
TEST_P(AttentionBits, PoisonStaysInItsDocument) {
  for (const double poison : {double(NAN), double(INFINITY)})
    for (const int64_t w : {0, 5, 64})
      for (const int64_t head_dim : {32, 128}) {
        AttentionCase c = here(sps(
            {.batch = 2, .length = 150, .heads = 4, .kv_heads = 2, .head_dim = head_dim, .document = 23}, w));
        expect_poison_to_stay(c, dtype(), poison);
      }
}

// NaN in one key or value changes exactly the rows that see it, also where the window leaves it.
TEST_P(AttentionBits, PoisonedKeyReachesOnlyRowsThatSeeIt) {
  for (const int64_t head_dim : {16, 96}) {
    AttentionCase c =
        here(standard({.batch = 1, .length = 200, .heads = 1, .kv_heads = 1, .head_dim = head_dim}));
    c.bands[0][0] = {2, 40};
    for (const int64_t key : {0, 63, 64, 100})
      for (const bool in_value : {false, true}) {
        AttentionCall call(c, dtype());
        (in_value ? call.v[0] : call.k[0]).set(key, 3, NAN);
        call.forward(), call.backward();
        for (int64_t i = 0; i < c.length; ++i) {
          const bool hit = sees(c.bands[0][0], i, key, call.starts_.data());
          EXPECT_EQ(std::isnan(call.o[0].get(i, 3)), hit) << "key " << key << " row " << i;
          EXPECT_EQ(std::isnan(call.dq[0].get(i, 3)), hit) << "key " << key << " row " << i;
        }
      }
  }
}

// NaN in one query or its gradient changes exactly the keys that it sees.
TEST_P(AttentionBits, PoisonedQueryReachesOnlyKeysThatItSees) {
  for (const int64_t head_dim : {16, 96}) {
    AttentionCase c =
        here(standard({.batch = 1, .length = 200, .heads = 1, .kv_heads = 1, .head_dim = head_dim}));
    c.bands[0][0] = {2, 40};
    for (const int64_t query : {2, 63, 64, 199})
      for (const bool in_gradient : {false, true}) {
        AttentionCall call(c, dtype());
        (in_gradient ? call.d_o[0] : call.q[0]).set(query, 3, NAN);
        call.forward(), call.backward();
        for (int64_t j = 0; j < c.length; ++j) {
          const bool hit = sees(c.bands[0][0], query, j, call.starts_.data());
          EXPECT_EQ(std::isnan(call.dk[0].get(j, 3)), hit) << "query " << query << " key " << j;
          EXPECT_EQ(std::isnan(call.dv[0].get(j, 3)), hit) << "query " << query << " key " << j;
        }
      }
  }
}

TEST_P(AttentionBits, RowsThatSeeNothingAreZero) {
  AttentionCase c =
      here({.batch = 1, .length = 100, .heads = 2, .kv_heads = 1, .head_dim = 16, .document = 30});
  c.streams = {true, true};
  c.bands[0][0] = {
      5, Band::kInf};  // the first five rows of each document see nothing; stream 1 sees nothing at all
  for (bool skip : {true, false}) {
    AttentionCall call(c, dtype());
    call.skip_tiles = skip;
    for (size_t s = 0; s < 2; ++s) call.o[s].fill(NAN), call.lse[s].fill(NAN), call.dq[s].fill(NAN);
    call.dk[0].fill(NAN), call.dv[0].fill(NAN);
    call.forward(), call.backward();
    expect_finite_or_empty(call);
    int64_t empty = 0;
    for (size_t s = 0; s < 2; ++s)
      for (int64_t r = 0; r < c.length; ++r) {
        const bool none = s == 1 || r - call.starts_[size_t(r)] < 5;
        ASSERT_EQ(call.lse[s].get(r, 0) == -INFINITY, none) << "row " << r;
        if (!none) continue;
        ++empty;
        for (int64_t d = 0; d < call.o[s]->cols; ++d) {
          ASSERT_EQ(call.o[s].get(r, d), 0);
          ASSERT_EQ(call.dq[s].get(r, d), 0);
        }
      }
    EXPECT_GT(empty, 100);
  }
}

// One softmax over a union: cutting the keys into disjoint bands of equal sets, one of them empty, changes
// nothing, and the parts' own results merge by log-sum-exp.
void expect_split_invariance(Device device, DType dtype, double tol) {
  AttentionCase whole = standard({.batch = 2, .length = 130, .heads = 2, .kv_heads = 1, .head_dim = 16});
  whole.device = device;
  for (const int64_t at : {0, 1, 16, 64, 130}) {  // 130: the far part is empty
    AttentionCase cut = whole;
    cut.sets = {true, true, true};
    cut.bands[0] = {Band{0, at - 1}, Band::none(), Band{at, Band::kInf}};
    AttentionCall one(whole, dtype, 1, dtype), two(cut, dtype, 1, dtype);
    for (size_t s = 1; s < 3; ++s) {
      two.k[s] = one.k[0].to(dtype);
      two.v[s] = one.v[0].to(dtype);
    }
    one.forward(), one.backward();
    two.forward(), two.backward();
    SPS_EXPECT_CLOSE(two.o[0], one.o[0], tol);
    SPS_EXPECT_CLOSE(two.lse[0], one.lse[0], tol);
    SPS_EXPECT_CLOSE(two.dq[0], one.dq[0], tol);
    Matrix dk = two.dk[0].to(dtype), dv = two.dv[0].to(dtype);
    for (int64_t r = 0; r < dk->rows; ++r)
      for (int64_t c = 0; c < dk->cols; ++c) {
        ASSERT_EQ(two.dk[1].get(r, c), 0);
        dk.set(r, c, dk.get(r, c) + two.dk[2].get(r, c));
        dv.set(r, c, dv.get(r, c) + two.dv[2].get(r, c));
      }
    SPS_EXPECT_CLOSE(dk, one.dk[0], tol);
    SPS_EXPECT_CLOSE(dv, one.dv[0], tol);

    AttentionCase near = whole, far = whole;
    near.bands[0][0] = cut.bands[0][0], far.bands[0][0] = cut.bands[0][2];
    AttentionCall a(near, dtype), b(far, dtype);
    a.forward(), b.forward();
    Matrix merged = one.o[0].to(dtype);
    for (int64_t r = 0; r < merged->rows; ++r)
      for (int64_t c = 0; c < merged->cols; ++c) {
        const int64_t h = c / whole.head_dim;
        const double lse = one.lse[0].get(r, h);
        merged.set(r, c,
                   std::exp(a.lse[0].get(r, h) - lse) * a.o[0].get(r, c) +
                       std::exp(b.lse[0].get(r, h) - lse) * b.o[0].get(r, c));
      }
    SPS_EXPECT_CLOSE(merged, one.o[0], tol);
  }
}

TEST(AttentionMask, SplittingKeysChangesNothing) {
  expect_split_invariance(Device::cpu, DType::f64, 1e-12);
  for (const Device device : test_devices()) expect_split_invariance(device, DType::f32, 1e-6);
}

}  // namespace

}  // namespace sps::ops
