// The rules themselves are tested in infer/sampling_test.cpp, through NextId. Here: rows side by side, and
// every device against the CPU and against exact probabilities.
#include "ops/sample/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "ops/check.h"

namespace sps::ops {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  Matrix logits, forbidden, seen;
  std::vector<SampleRow> rows;

  Case(int64_t count, int64_t vocab, int64_t sets)
      : logits(DType::f32, count, vocab, vocab + 1),
        forbidden(DType::i32, sets, id_words(vocab)),
        seen(DType::i32, sets, id_words(vocab), id_words(vocab) + 2),
        rows(size_t(count)) {
    for (int64_t r = 0; r < count; ++r) rows[size_t(r)].set = int32_t(r % sets);
  }
  static void put(const Matrix& sets, int64_t set, int64_t id) {
    sets->row<int32_t>(set)[id / 32] |= int32_t(1U << (id % 32));
  }
  static bool holds(const Matrix& sets, int64_t set, int64_t id) {
    return (uint32_t(sets->row<int32_t>(set)[id / 32]) >> (id % 32) & 1) != 0;
  }
};

std::vector<Sampled> run(Device device, const Case& c, bool with_seen = true) {
  std::vector<Sampled> drawn(c.rows.size());
  if (device == Device::cpu) {
    sample({}, c.logits, c.rows, c.forbidden, with_seen ? *c.seen : Tensor{}, drawn);
    return drawn;
  }
  OnDevice on(device);
  const Bytes rows(c.rows.size() * sizeof(SampleRow), Memory::device);
  const Bytes there(drawn.size() * sizeof(Sampled), Memory::device);
  copy_bytes(on.exec(), rows.data(), c.rows.data(), rows.size());
  sample(on.exec(), on(c.logits), {reinterpret_cast<const SampleRow*>(rows.data()), c.rows.size()},
         on(c.forbidden), with_seen ? on(c.seen) : Tensor{},
         {reinterpret_cast<Sampled*>(there.data()), drawn.size()});
  copy_bytes(on.exec(), drawn.data(), there.data(), there.size());
  synchronize(on.exec());
  return drawn;
}

// Every rule by itself and together, logits with ties and with numbers that come from real texts' range.
Case mixed_case(int64_t vocab, uint64_t seed) {
  const Rng rng(seed, "case");
  const int64_t count = 24;
  Case c(count, vocab, count);
  uint64_t n = 0;
  for (int64_t r = 0; r < count; ++r) {
    const double spread = r % 4 == 0 ? 8 : 2;
    for (int64_t id = 0; id < vocab; ++id) {
      double l = spread * rng.normal(n++) - 20;
      if (r % 3 == 0) l = std::round(l);  // many are equal
      if (rng.below(n++, 50) == 0) l = -kInf;
      c.logits.set(r, id, l);
      if (id % 13 == r % 13 && vocab > 20) c.put(c.forbidden, r, id);
      if (rng.below(n++, 4) == 0) c.put(c.seen, r, id);
    }
    SampleRow& row = c.rows[size_t(r)];
    row.uniform = rng.uniform(n++), row.log_probability = int32_t(r % 2);
    if (r % 8 != 0) row.temperature = 0.5 + rng.uniform(n++);
    if (r % 2 == 1) row.top_k = int32_t(1 + rng.below(n++, uint64_t(vocab)));
    if (r % 5 < 2) row.top_p = 0.3 + 0.69 * rng.uniform(n++);
    if (r % 7 < 2) row.min_p = 0.1 * rng.uniform(n++);
    if (r % 3 == 1) row.repetition_penalty = 1.3F;
  }
  return c;
}

// On a GPU draws may differ where a random number falls between two roundings: none of these does.
TEST(Sample, EveryDeviceDrawsTheCpusIds) {
  for (const Device device : test_devices())
    for (const int64_t vocab : {1, 29, 32, 300, 5000, 50304})
      for (const uint64_t seed : {1, 2}) {
        const Case c = mixed_case(vocab, seed);
        Case again = mixed_case(vocab, seed);
        for (SampleRow& row : again.rows) row.log_probability = 1;
        const auto want = run(Device::cpu, c), got = run(device, again);
        for (size_t r = 0; r < want.size(); ++r) {
          ASSERT_EQ(got[r].problem, want[r].problem);
          ASSERT_EQ(got[r].id, want[r].id) << "vocab " << vocab << " row " << r;
          if (want[r].problem != SampleProblem::none) continue;
          // What was drawn has been seen.
          EXPECT_TRUE(Case::holds(again.seen, int64_t(r), got[r].id));
          const std::span<const float> logits(again.logits->row<float>(int64_t(r)), size_t(vocab));
          EXPECT_NEAR(got[r].log_probability, log_probability(logits, got[r].id), 1e-9);
          EXPECT_TRUE(c.rows[r].log_probability == 1 || want[r].log_probability == 0);
        }
        EXPECT_EQ(bits(again.seen), bits(c.seen));
      }
}

// More ids than there are, than may be drawn or than there are with a chance: all of them.
TEST(Sample, TopKBeyondWhatThereIsIsNone) {
  for (const Device device : test_devices())
    for (const int64_t vocab : {1, 29, 300, 5000}) {
      Case none = mixed_case(vocab, 4);
      for (SampleRow& row : none.rows) row.top_k = 0;
      const auto want = run(Device::cpu, none);
      for (const int64_t k : {vocab, vocab + 1, int64_t{100'000}, kMostIds}) {
        Case c = mixed_case(vocab, 4);
        for (SampleRow& row : c.rows) row.top_k = int32_t(k);
        const auto got = run(device, c);
        for (size_t r = 0; r < want.size(); ++r) {
          ASSERT_EQ(got[r].problem, want[r].problem);
          EXPECT_EQ(got[r].id, want[r].id) << "vocab " << vocab << " row " << r << " k " << k;
        }
      }
    }
}

// The draws of a row are its own: the same with others beside it, and with none.
TEST(Sample, CompanyChangesNothing) {
  for (const Device device : test_devices()) {
    const Case all = mixed_case(700, 3), untouched = mixed_case(700, 3);
    const auto together = run(device, all);
    for (int64_t r = 0; r < int64_t(together.size()); ++r) {
      Case one(1, 700, 1);
      for (int64_t id = 0; id < 700; ++id) one.logits.set(0, id, untouched.logits.get(r, id));
      for (int64_t w = 0; w < id_words(700); ++w)
        one.forbidden.set(0, w, untouched.forbidden.get(r, w)), one.seen.set(0, w, untouched.seen.get(r, w));
      one.rows[0] = untouched.rows[size_t(r)], one.rows[0].set = 0;
      const Sampled alone = run(device, one)[0];
      EXPECT_EQ(alone.id, together[size_t(r)].id);
      EXPECT_EQ(alone.log_probability, together[size_t(r)].log_probability);
    }
  }
}

TEST(Sample, WhatIsImpossibleIsSaid) {
  for (const Device device : test_devices())
    for (const double temperature : {0.0, 1.0}) {
      const int64_t vocab = 9000;
      Case c(7, vocab, 7);
      c.logits.randomise(1, "logits");
      for (SampleRow& row : c.rows) row.temperature = temperature, row.log_probability = 1, row.top_p = 0.9;
      c.logits.set(0, 8000, kNan), c.logits.set(0, 70, kNan);
      for (int64_t id = 0; id < vocab; ++id) c.logits.set(1, id, -kInf);
      for (int64_t id = 0; id < vocab; ++id) c.put(c.forbidden, 2, id);
      c.logits.set(3, 5, kNan),
          c.put(c.forbidden, 3, 5);  // is not looked at, but by the model's distribution
      c.logits.set(4, 8999, kInf);
      for (int64_t id = 0; id < vocab; ++id)
        if (id != 4321) c.logits.set(5, id, -kInf);
      for (int64_t id = 0; id < vocab; ++id) c.logits.set(6, id, id % 2 == 0 ? 3e38 : -3e38);
      const auto drawn = run(device, c);
      EXPECT_EQ(drawn[0].problem, SampleProblem::not_a_number);
      EXPECT_EQ(drawn[0].id, 70);
      EXPECT_EQ(drawn[1].problem, SampleProblem::nothing_left);
      EXPECT_EQ(drawn[2].problem, SampleProblem::nothing_left);
      EXPECT_EQ(drawn[3].problem, SampleProblem::none);
      EXPECT_TRUE(std::isnan(drawn[3].log_probability));
      EXPECT_EQ(drawn[4].id, 8999);
      EXPECT_EQ(drawn[4].log_probability, 0);
      EXPECT_EQ(drawn[5].id, 4321);
      EXPECT_EQ(drawn[5].log_probability, 0);
      EXPECT_EQ(drawn[6].id % 2, 0);
      EXPECT_NEAR(drawn[6].log_probability, -std::log(4500.0), 1e-9);
      for (const int64_t r : {0, 1, 2})
        for (int64_t w = 0; w < id_words(vocab); ++w) ASSERT_EQ(c.seen.get(r, w), 0);
    }
}

TEST(Sample, SizesTies) {
  for (const Device device : test_devices()) {
    // Ten equal logits, k of them: the lowest ids, each as often as its part of the numbers from 0 to 1.
    const int64_t vocab = 40, count = 30;
    Case c(count, vocab, 1);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t id = 0; id < vocab; ++id) c.logits.set(r, id, id % 4 == 0 ? 2.5 : id % 4 == 1 ? -0.0 : -1);
      c.rows[size_t(r)].temperature = 1, c.rows[size_t(r)].top_k = 3;
      c.rows[size_t(r)].uniform = (double(r) + 0.5) / double(count);
    }
    const auto drawn = run(device, c, false);
    for (int64_t r = 0; r < count; ++r) EXPECT_EQ(drawn[size_t(r)].id, 4 * (r / 10));
    // 0 and -0 are equal.
    for (int64_t r = 0; r < count; ++r)
      for (int64_t id = 0; id < vocab; ++id) c.logits.set(r, id, id % 3 == 1 ? 0.0 : -0.0);
    for (const Sampled& s : run(device, c, false)) EXPECT_LT(s.id, 3);
    for (SampleRow& row : c.rows) row.temperature = 0;
    for (const Sampled& s : run(device, c, false)) EXPECT_EQ(s.id, 0);
  }
}

// Pearson's test of many draws against the probabilities that the rules define, worked out here by sorting
// everything. The statistic's mean is the number of free probabilities f, its deviation sqrt(2f); six
// deviations above are about one in ten million for the f of these cases.
TEST(Sample, FrequenciesPassAChiSquareTest) {
  constexpr int64_t kIds = 300, kDraws = 30000, kAtOnce = 1000;
  const Rng rng(1, "logits");
  struct Rules {
    double temperature = 1, top_p = 1, min_p = 0;
    int32_t top_k = 0;
    float repetition_penalty = 1;
  };
  uint64_t seed = 0;
  for (const Rules& o : std::vector<Rules>{{},
                                           {.temperature = 0.7},
                                           {.top_k = 40},
                                           {.temperature = 1.2, .top_p = 0.8},
                                           {.top_p = 0.97},
                                           {.min_p = 0.05},
                                           {.repetition_penalty = 1.5F},
                                           {0.9, 0.9, 0.02, 100, 1.2F}}) {
    ++seed;
    for (const Device device : test_devices()) {
      Case c(kAtOnce, kIds, kAtOnce);
      std::vector<std::pair<double, size_t>> sorted;  // weight, id
      for (int64_t id = 0; id < kIds; ++id) {
        const auto logit = float(1.5 * rng.normal(uint64_t(id)));
        for (int64_t r = 0; r < kAtOnce; ++r) {
          c.logits.set(r, id, logit);
          if (id % 11 == 0) c.put(c.forbidden, r, id);
          if (id % 3 == 0) c.put(c.seen, r, id);
        }
        if (id % 11 == 0) continue;
        const double penalty = id % 3 == 0 ? o.repetition_penalty : 1;
        sorted.emplace_back(std::exp((logit > 0 ? logit / penalty : logit * penalty) / o.temperature),
                            size_t(id));
      }
      const Matrix seen = c.seen.to(DType::i32);
      std::sort(sorted.rbegin(), sorted.rend());
      if (o.top_k > 0) sorted.resize(size_t(o.top_k));
      double total = 0, mass = 0;
      for (const auto& [w, id] : sorted) total += w;
      size_t keep = 0;
      while (keep < sorted.size() && mass < o.top_p * total) mass += sorted[keep++].first;
      sorted.resize(keep);
      while (sorted.back().first < o.min_p * sorted[0].first) sorted.pop_back();
      total = 0;
      for (const auto& [w, id] : sorted) total += w;

      std::vector<int64_t> n(kIds, 0);
      const Rng draws(seed, "sampling");
      for (int64_t first = 0; first < kDraws; first += kAtOnce) {
        for (int64_t r = 0; r < kAtOnce; ++r) {
          SampleRow& row = c.rows[size_t(r)];
          row.temperature = o.temperature, row.top_k = o.top_k, row.top_p = o.top_p, row.min_p = o.min_p;
          row.repetition_penalty = o.repetition_penalty, row.uniform = draws.uniform(uint64_t(first + r));
        }
        copy_tensor(seen, c.seen);  // what one batch has drawn the next has not seen
        for (const Sampled& s : run(device, c)) ++n[size_t(s.id)];
      }
      int64_t counted = 0, rest_n = 0;
      double chi = 0, rest = 0;  // ids that are expected less than 20 times count as one
      double cells = -1;
      for (const auto& [w, id] : sorted) {
        const double want = w / total * double(kDraws);
        counted += n[id];
        if (want < 20) {
          rest += want, rest_n += n[id];
          continue;
        }
        chi += std::pow(double(n[id]) - want, 2) / want, ++cells;
      }
      if (rest > 0) chi += std::pow(double(rest_n) - rest, 2) / rest, ++cells;
      EXPECT_EQ(counted, kDraws);  // nothing else was drawn
      EXPECT_LT(chi, cells + 6 * std::sqrt(2 * cells)) << "rules " << seed << " of " << cells;
      EXPECT_GT(cells, 10);
    }
  }
}

}  // namespace
}  // namespace sps::ops
