// Numbers: the reference against central differences, the fast code against the reference.
#include <cstring>

#include "base/error.h"
#include "ops/attention/attention_case.h"

namespace sps::ops {

namespace {

double weighted_sum(const Matrix& o, const Matrix& weights) {
  double sum = 0;
  for (int64_t r = 0; r < o->rows; ++r)
    for (int64_t c = 0; c < o->cols; ++c) sum += o.get(r, c) * weights.get(r, c);
  return sum;
}

void expect_reference_gradients(const AttentionCase& c) {
  SCOPED_TRACE(c.name);
  AttentionCall call(c, DType::f64, 3, DType::f64);
  call.forward();
  call.backward();
  const auto loss = [&] {
    call.forward();
    double sum = 0;
    for (size_t s = 0; s < call.q.size(); ++s)
      if (c.streams[s]) sum += weighted_sum(call.o[s], call.d_o[s]);
    return sum;
  };
  for (size_t s = 0; s < call.q.size(); ++s)
    if (c.streams[s]) expect_gradient(loss, call.q[s], call.dq[s], fmt::format("q{}", s));
  for (size_t s = 0; s < call.k.size(); ++s) {
    if (!c.sets[s]) continue;
    expect_gradient(loss, call.k[s], call.dk[s], fmt::format("k{}", s));
    expect_gradient(loss, call.v[s], call.dv[s], fmt::format("v{}", s));
  }
}

Band random_band(const Rng& rng, uint64_t i, int64_t length) {
  const int64_t lo = int64_t(rng.below(3 * i, uint64_t(length) / 2 + 1));
  switch (rng.below(3 * i + 1, 4)) {
    case 0:
      return Band::none();
    case 1:
      return {lo, Band::kInf};
    default:
      return {lo, lo + int64_t(rng.below(3 * i + 2, uint64_t(length)))};
  }
}

// Two streams, three sets, arbitrary bands (some empty), grouped heads, documents.
AttentionCase random_case(uint64_t seed, int64_t length) {
  const Rng rng(seed, "attention case");
  AttentionCase c;
  c.batch = 2, c.length = length, c.kv_heads = 1 + int64_t(rng.below(100, 2));
  c.heads = c.kv_heads * (1 + int64_t(rng.below(101, 3)));
  c.head_dim = 3 + int64_t(rng.below(102, 10));
  c.document = int64_t(rng.below(103, 3)) * (1 + length / 4);
  c.streams = {true, rng.below(104, 3) > 0};
  c.sets = {true, true, true};
  for (size_t s = 0; s < c.streams.size(); ++s)
    for (size_t k = 0; k < c.sets.size(); ++k) c.bands[s][k] = random_band(rng, s * 3 + k, length);
  c.name = fmt::format("random case {}", seed);
  return c;
}

TEST(AttentionReference, GradientsMatchCentralDifferences) {
  const Threads one(1);
  for (uint64_t seed = 1; seed <= 6; ++seed) expect_reference_gradients(random_case(seed, 7));
  AttentionCase c{.batch = 1, .length = 6, .heads = 4, .kv_heads = 2, .head_dim = 4, .document = 2};
  c.name = "sps(1)";
  expect_reference_gradients(sps(c, 1));
  c.name = "free_pause";
  expect_reference_gradients(free_pause(c));
}

// How many bf16 roundings stand between the reference and a result, besides its own: lse none; o those of the
// probabilities; a gradient those of p or ds, and of the o from which delta is made.
double roundings(const std::string& name) {
  return name[0] == 'l' ? 1 : name[0] == 'o' ? 2 : 3;
}

double largest(const Matrix& m) {
  double most = 0;
  for (int64_t r = 0; r < m->rows; ++r)
    for (int64_t c = 0; c < m->cols; ++c) most = std::max(most, std::abs(m.get(r, c)));
  return most;
}

// scale * |d_o . v| * |k| or |q|, with the largest entries for each.
double score_gradient_size(const AttentionCall& call) {
  double size = 0;
  for (size_t s = 0; s < call.q.size(); ++s)
    for (size_t k = 0; k < call.k.size(); ++k)
      if (call.q[s]->data && call.k[k]->data)
        size = std::max(size, largest(call.d_o[s]) * largest(call.v[k]) *
                                  std::max(largest(call.k[k]), largest(call.q[s])));
  return size * call.scale * std::sqrt(double(call.config().head_dim));
}

void expect_close_to_reference(const AttentionCase& c, DType dtype, DType grads = DType::f32,
                               uint64_t seed = 1) {
  SCOPED_TRACE(fmt::format("{}, T {}, head_dim {}, {}", c.name, c.length, c.head_dim, dtype_name(dtype)));
  AttentionCall call(c, dtype, seed, grads);
  AttentionCall want = call.reference();
  call.forward(), call.backward();
  want.forward(), want.backward();
  const std::vector<Result> got = results(call, true), expected = results(want, true);
  for (size_t i = 0; i < got.size(); ++i) {
    const double tol = tolerance(dtype, roundings(got[i].name));
    if (largest(*expected[i].matrix) > 0)
      EXPECT_LE(relative_error(*got[i].matrix, *expected[i].matrix), tol) << got[i].name;
    else  // scores without effect (a single key, or none): what is left of d_o . v - d_o . o and its factors
      EXPECT_LE(largest(*got[i].matrix), tol * score_gradient_size(call)) << got[i].name;
  }
}

class AttentionTypes : public AttentionOn {};
INSTANTIATE_TEST_SUITE_P(, AttentionTypes, AttentionOn::kinds(), AttentionOn::name);

TEST_P(AttentionTypes, MatchesReferenceAtAwkwardLengths) {
  for (int64_t length : {1, 5, 63, 64, 65, 127, 128, 129, 200, 257}) {
    const AttentionCase c =
        here({.batch = 2, .length = length, .heads = 2, .kv_heads = 1, .head_dim = 48, .name = "lengths"});
    expect_close_to_reference(standard(c), dtype());
    expect_close_to_reference(sps(c, 16), dtype());
  }
}

TEST_P(AttentionTypes, MatchesReferenceAtEveryHeadSize) {
  for (int64_t head_dim : {1, 8, 16, 32, 48, 64, 72, 80, 96, 120, 128, 136, 264}) {
    AttentionCase c =
        here({.batch = 1, .length = 150, .heads = 2, .kv_heads = 2, .head_dim = head_dim, .name = "heads"});
    expect_close_to_reference(sps(c, 16), dtype());
    c.heads = 4, c.document = 40;
    expect_close_to_reference(reverse_sps(c, 70), dtype(), dtype());
  }
}

TEST_P(AttentionTypes, MatchesReferenceWithWindowsDocumentsAndGroups) {
  for (int64_t w : {0, 1, 16, 64, 150}) {
    AttentionCase c = here({.batch = 2, .length = 150, .heads = 4, .kv_heads = 1, .head_dim = 32});
    c.name = fmt::format("w {}", w);
    expect_close_to_reference(reverse_sps(c, w), dtype());
    c.document = 30;
    c.name += " with documents";
    expect_close_to_reference(sps(c, w), dtype());
  }
  expect_close_to_reference(
      free_pause(here({.batch = 1, .length = 130, .heads = 6, .kv_heads = 3, .head_dim = 64})), dtype());
}

TEST_P(AttentionTypes, MatchesReferenceForRandomBandTables) {
  for (uint64_t seed = 10; seed < 30; ++seed)
    for (int64_t wide : {1, 8}) {
      AttentionCase c = here(random_case(seed, 40 + int64_t(seed) * 5));
      c.head_dim *= wide;
      expect_close_to_reference(c, dtype(), dtype());
    }
}

// The one long sequence: forward is cut along its queries, backward also along its keys.
TEST_P(AttentionTypes, MatchesReferenceForOneLongSequence) {
  AttentionCase c =
      here({.batch = 1, .length = 1100, .heads = 1, .kv_heads = 1, .head_dim = 16, .document = 400});
  expect_close_to_reference(sps(c, 70), dtype());
}

// A context of 4032, which no tile of 128 divides, at a width that has fast code everywhere.
TEST_P(AttentionTypes, AContextThatNoTileDivides) {
  const AttentionCase c = here({.batch = 1,
                                .length = 4032,
                                .heads = 1,
                                .kv_heads = 1,
                                .head_dim = 64,
                                .document = 1500,
                                .name = "long context"});
  expect_close_to_reference(standard(c), dtype());
  expect_close_to_reference(sps(c, 64), dtype());
}

TEST(Attention, SharpScoresStayExact) {  // probabilities near 0 and 1, scores of +-100s, a growing maximum
  for (const Device device : test_devices()) {
    AttentionCase c = standard({.batch = 1, .length = 130, .heads = 1, .kv_heads = 1, .head_dim = 16});
    c.device = device;
    AttentionCall call(c, DType::f32);
    call.scale = 20;
    AttentionCall want = call.reference();
    want.scale = 20;
    call.forward(), want.forward();
    // A score of size s carries a rounding of s * 2^-24 from f32 products, which the exponential passes on.
    SPS_EXPECT_CLOSE(call.lse[0], want.lse[0], 1e-6);
    SPS_EXPECT_CLOSE(call.o[0], want.o[0], 400 * 16 * 0x1p-24);
  }
}

// The largest score must be found for scales of either sign, and with none all keys weigh the same.
TEST_P(AttentionTypes, MatchesReferenceForAnyScale) {
  const AttentionCase c =
      here(sps({.batch = 1, .length = 90, .heads = 2, .kv_heads = 1, .head_dim = 64, .document = 25}, 8));
  for (const float scale : {-0.1F, 0.0F, 0.3F}) {
    AttentionCall call(c, dtype());
    call.scale = scale;
    AttentionCall want = call.reference();
    want.scale = scale;
    call.forward(), want.forward();
    for (size_t s = 0; s < 2; ++s) {
      SPS_EXPECT_CLOSE(call.o[s], want.o[s], tolerance(dtype(), 2));
      SPS_EXPECT_CLOSE(call.lse[s], want.lse[s], tolerance(dtype()));
    }
  }
}

TEST_P(AttentionTypes, KeyGradientsAccumulateOrOverwrite) {
  const AttentionCase c = here(sps({.batch = 2, .length = 70, .heads = 2, .kv_heads = 1, .head_dim = 16}, 3));
  AttentionCall plain(c, dtype()), added(c, dtype());
  plain.forward(), added.forward();
  for (size_t s = 0; s < 2; ++s)
    plain.dk[s].fill(NAN), plain.dv[s].fill(NAN), added.dk[s].fill(2), added.dv[s].fill(-1);
  added.accumulate = true;
  plain.backward(), added.backward();
  for (size_t s = 0; s < 2; ++s)
    for (int64_t r = 0; r < plain.dk[s]->rows; ++r)
      for (int64_t d = 0; d < plain.dk[s]->cols; ++d) {
        ASSERT_EQ(float(added.dk[s].get(r, d)), float(plain.dk[s].get(r, d)) + 2.0F);
        ASSERT_EQ(float(added.dv[s].get(r, d)), float(plain.dv[s].get(r, d)) - 1.0F);
      }
}

// Sets whose owner takes no gradient: the others' gradients keep their bits, and nothing is written for them.
void expect_unwanted_gradients_left_out(const Kind& kind) {
  const DType dtype = kind.dtype;
  AttentionCase cases[] = {
      random_case(12, 90), sps({.batch = 2, .length = 150, .heads = 4, .kv_heads = 2, .head_dim = 16}, 9),
      sps({.batch = 1, .length = 600, .heads = 1, .kv_heads = 1, .head_dim = 16}, 70)};  // cut in parts
  for (AttentionCase& c : cases) {
    c.device = kind.device, c.apart = kind.apart;
    for (size_t unwanted = 0; unwanted < (size_t(1) << kMaxKeySets); ++unwanted) {
      AttentionCall all(c, dtype), some(c, dtype);
      for (size_t s = 0; s < kMaxKeySets; ++s) {
        some.wanted[s] = (unwanted >> s & 1) == 0;
        if (c.sets[s]) some.dk[s].fill(7), some.dv[s].fill(7);
      }
      all.forward(), some.forward();
      all.backward(), some.backward();
      for (size_t t = 0; t < kMaxQueryStreams; ++t) {
        if (!c.streams[t]) continue;
        SPS_EXPECT_CLOSE(some.dq[t], all.dq[t], 0);
      }
      for (size_t s = 0; s < kMaxKeySets; ++s) {
        if (!c.sets[s]) continue;
        for (const auto& [got, want] : {std::pair{&some.dk[s], &all.dk[s]}, {&some.dv[s], &all.dv[s]}})
          for (int64_t r = 0; r < (*got)->rows; ++r)
            for (int64_t d = 0; d < (*got)->cols; ++d)
              ASSERT_EQ(got->get(r, d), some.wanted[s] ? want->get(r, d) : 7) << c.name << " set " << s;
      }
    }
  }
}
TEST_P(AttentionTypes, KeyGradientsThatNobodyWantsAreLeftOut) {
  expect_unwanted_gradients_left_out(GetParam());
}
TEST(AttentionReference, KeyGradientsThatNobodyWantsAreLeftOut) {
  expect_unwanted_gradients_left_out({Device::cpu, DType::f64});
}

}  // namespace

}  // namespace sps::ops
