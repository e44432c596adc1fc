#include "infer/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "base/test_dir.h"

namespace sps {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

int32_t draw(const SamplingOptions& options, const std::vector<float>& logits, uint64_t n = 0,
             std::vector<bool> forbidden = {}) {
  forbidden.resize(logits.size());
  return NextId(options).draw(logits, forbidden, n);
}

// How often each id comes in `draws` draws.
std::map<int32_t, int> counts(const SamplingOptions& options, const std::vector<float>& logits, int draws,
                              std::vector<bool> forbidden = {}) {
  forbidden.resize(logits.size());
  NextId next(options);
  std::map<int32_t, int> n;
  for (int i = 0; i < draws; ++i) ++n[next.draw(logits, forbidden, uint64_t(i))];
  return n;
}

std::set<int32_t> ids(const std::map<int32_t, int>& counts) {
  std::set<int32_t> all;
  for (const auto& [id, n] : counts) all.insert(id);
  return all;
}

std::vector<float> logs(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(float(std::log(p)));
  return logits;
}

TEST(Sampling, TemperatureZeroTakesTheLargest) {
  const std::vector<float> logits{-1, 3, 2.5f, -kInf, 2.9f};
  EXPECT_EQ(draw({}, logits), 1);
  for (const int64_t k : {1, 3, 99}) EXPECT_EQ(draw({.top_k = k, .top_p = 0.5}, logits), 1);
  // The same as the one candidate of top_k = 1.
  for (uint64_t n = 0; n < 20; ++n) EXPECT_EQ(draw({.temperature = 1.5, .top_k = 1}, logits, n), 1);
}

TEST(Sampling, TiesGoToTheLowestId) {
  EXPECT_EQ(draw({}, {1, 2, 5, 5, 5}), 2);
  EXPECT_EQ(draw({}, {0.0f, -0.0f}), 0);
  EXPECT_EQ(draw({.temperature = 1, .top_k = 1}, {1, 5, 5}, 3), 1);
  // Exactly k, however many are as large as the k-th.
  EXPECT_EQ(ids(counts({.temperature = 1, .top_k = 3}, {1, 2, 2, 2, 3}, 400)), (std::set<int32_t>{1, 2, 4}));
  EXPECT_EQ(ids(counts({.temperature = 1, .top_k = 2}, {0, 0, 0, 0}, 400)), (std::set<int32_t>{0, 1}));
}

TEST(Sampling, TopKBeyondTheVocabularyAndZeroAreAll) {
  const std::vector<float> logits{0, 0.5f, 1, -0.5f};
  for (const int64_t k : {0, 4, 5, 1'000'000})
    EXPECT_EQ(counts({.temperature = 1, .top_k = k}, logits, 200), counts({.temperature = 1}, logits, 200));
}

TEST(Sampling, TopPIsTheSmallestSetThatReachesIt) {
  const std::vector<float> logits = logs({.3, .1, .1, .5});
  const auto kept = [&](double p) { return ids(counts({.temperature = 1, .top_p = p}, logits, 2000)); };
  EXPECT_EQ(kept(0.8), (std::set<int32_t>{0, 3}));  // .5 + .3 reaches .8: no third
  EXPECT_EQ(kept(0.81), (std::set<int32_t>{0, 1, 3}));
  EXPECT_EQ(kept(0.5), (std::set<int32_t>{3}));
  EXPECT_EQ(kept(0.51), (std::set<int32_t>{0, 3}));  // the id that crosses p belongs to the set
  EXPECT_EQ(kept(1e-9), (std::set<int32_t>{3}));
  EXPECT_EQ(kept(0.95), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(kept(1), (std::set<int32_t>{0, 1, 2, 3}));
  // top_p measures what top_k left: .5 / .8 alone reaches .6.
  EXPECT_EQ(ids(counts({.temperature = 1, .top_k = 2, .top_p = 0.6}, logits, 500)), (std::set<int32_t>{3}));
}

TEST(Sampling, FrequenciesAreTheSoftmax) {
  const std::vector<double> p{.1, .2, .3, .4};
  constexpr int kDraws = 40000;
  for (const double temperature : {1.0, 2.0, 0.5}) {
    double total = 0;
    for (const double x : p) total += std::pow(x, 1 / temperature);
    const auto n = counts({.temperature = temperature, .seed = 3}, logs(p), kDraws);
    for (int32_t id = 0; id < 4; ++id) {
      const double want = std::pow(p[size_t(id)], 1 / temperature) / total;
      const double deviation = std::sqrt(want * (1 - want) / kDraws);
      EXPECT_NEAR(double(n.at(id)) / kDraws, want, 4 * deviation)
          << "id " << id << ", temperature " << temperature;
    }
  }
}

TEST(Sampling, TruncationKeepsTheProportions) {
  const auto n = counts({.temperature = 1, .top_k = 2}, logs({.1, .2, .3, .4}), 20000);
  EXPECT_NEAR(double(n.at(3)) / 20000, 4.0 / 7, 4 * std::sqrt(12.0 / 49 / 20000));
}

TEST(Sampling, ExtremeTemperaturesAreDefined) {
  const std::vector<float> logits{10, -80, 9.5f, 3e38f, -3e38f};
  for (uint64_t n = 0; n < 50; ++n) EXPECT_EQ(draw({.temperature = 1e-30}, logits, n), 3);
  for (uint64_t n = 0; n < 50; ++n) EXPECT_EQ(draw({.temperature = 5e-324}, logits, n), 3);
  // Equal logits stay equal whatever the temperature.
  EXPECT_EQ(ids(counts({.temperature = 1e-30}, {2, 7, 7}, 200)), (std::set<int32_t>{1, 2}));
  // Everything is equally likely in the limit.
  const auto n = counts({.temperature = 1e15}, {10, -80, 9.5f, 40}, 20000);
  for (int32_t id = 0; id < 4; ++id) EXPECT_NEAR(n.at(id), 5000, 4 * std::sqrt(20000 * 3.0 / 16));
}

TEST(Sampling, OnlyDifferencesOfLogitsMatter) {
  const std::vector<float> logits{1, 2, 0.5f, 1.5f};
  const SamplingOptions options{.temperature = 0.9, .top_k = 3, .top_p = 0.9};
  const auto want = counts(options, logits, 500);
  // Beyond 88 the exponential of the logit itself would overflow.
  for (const float shift : {128.0f, 1024.0f, -1024.0f, 65536.0f}) {
    std::vector<float> shifted = logits;
    for (float& x : shifted) x += shift;
    EXPECT_EQ(counts(options, shifted, 500), want) << "shift " << shift;
  }
}

TEST(Sampling, NanIsAnErrorThatNamesTheId) {
  for (const SamplingOptions options : {SamplingOptions{}, SamplingOptions{.temperature = 1}}) {
    EXPECT_PRED2(mentions, error_of([&] { draw(options, {1, 2, kNan, 4}); }), "id 2");
    // What may not be drawn is not looked at.
    EXPECT_EQ(draw(options, {1, 90, kNan}, 0, {false, false, true}), 1);
  }
}

TEST(Sampling, NothingLeftIsAnError) {
  for (const SamplingOptions options : {SamplingOptions{}, SamplingOptions{.temperature = 1, .top_p = 0.5}}) {
    EXPECT_PRED2(mentions, error_of([&] { draw(options, {-kInf, -kInf}); }), "no id is left");
    EXPECT_PRED2(mentions, error_of([&] { draw(options, {1, 2}, 0, {true, true}); }), "no id is left");
  }
}

TEST(Sampling, ForbiddenAndImpossibleIdsNeverCome) {
  const std::vector<float> logits{50, 1, -kInf, 1, 49};
  const std::vector<bool> forbidden{true, false, false, false, true};
  EXPECT_EQ(draw({}, logits, 0, forbidden), 1);
  EXPECT_EQ(ids(counts({.temperature = 1}, logits, 500, forbidden)), (std::set<int32_t>{1, 3}));
  EXPECT_EQ(ids(counts({.temperature = 1e15}, logits, 500, forbidden)), (std::set<int32_t>{1, 3}));
  // top_k counts what may be drawn.
  EXPECT_EQ(ids(counts({.temperature = 1, .top_k = 2}, logits, 500, forbidden)), (std::set<int32_t>{1, 3}));
}

// One infinite logit: certain, not inf - inf.
TEST(Sampling, AnInfiniteLogitWins) {
  EXPECT_EQ(draw({}, {1, kInf, 2}), 1);
  for (uint64_t n = 0; n < 20; ++n) EXPECT_EQ(draw({.temperature = 1, .top_p = 0.9}, {1, kInf, 2}, n), 1);
}

TEST(Sampling, DrawsDependOnSeedAndNumberAlone) {
  const std::vector<float> logits(100, 0.0f);
  const std::vector<bool> all(100);
  NextId forward({.temperature = 1, .seed = 5}), backward({.temperature = 1, .seed = 5});
  std::vector<int32_t> a, b(20), other;
  for (uint64_t n = 0; n < 20; ++n) a.push_back(forward.draw(logits, all, n));
  for (uint64_t n = 20; n-- > 0;) b[n] = backward.draw(logits, all, n);
  EXPECT_EQ(a, b);
  for (uint64_t n = 0; n < 20; ++n) other.push_back(draw({.temperature = 1, .seed = 6}, logits, n));
  EXPECT_NE(a, other);
}

TEST(Sampling, OptionsThatMakeNoSenseAreNamed) {
  const auto refused = [](const SamplingOptions& options, const char* name) {
    EXPECT_PRED2(mentions, error_of([&] { check(options); }), name);
    EXPECT_PRED2(mentions, error_of([&] { NextId next(options); }), name);
  };
  refused({.temperature = -1}, "temperature = -1");
  refused({.temperature = NAN}, "temperature");
  refused({.temperature = INFINITY}, "temperature");
  refused({.top_k = -1}, "top_k = -1");
  refused({.top_p = 0}, "top_p = 0");
  refused({.top_p = 1.5}, "top_p = 1.5");
  refused({.top_p = -0.1}, "top_p");
  refused({.top_p = NAN}, "top_p");
  refused({.min_p = -0.1}, "min_p = -0.1");
  refused({.min_p = 1.5}, "min_p = 1.5");
  refused({.min_p = NAN}, "min_p");
  refused({.repetition_penalty = 0}, "repetition_penalty = 0");
  refused({.repetition_penalty = -2}, "repetition_penalty = -2");
  refused({.repetition_penalty = INFINITY}, "repetition_penalty");
  refused({.repetition_penalty = NAN}, "repetition_penalty");
}

TEST(Sampling, MinPIsAPartOfTheLikeliest) {
  const std::vector<float> logits = logs({.3, .1, .1, .5});
  const auto kept = [&](const SamplingOptions& o) { return ids(counts(o, logits, 2000)); };
  EXPECT_EQ(kept({.temperature = 1, .min_p = 0.19}), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(kept({.temperature = 1, .min_p = 0.21}), (std::set<int32_t>{0, 3}));
  EXPECT_EQ(kept({.temperature = 1, .min_p = 0.61}), (std::set<int32_t>{3}));
  EXPECT_EQ(kept({.temperature = 1, .min_p = 1}), (std::set<int32_t>{3}));
  EXPECT_EQ(ids(counts({.temperature = 1, .min_p = 1}, {2, 2, 1}, 500)), (std::set<int32_t>{0, 1}));
  // After the temperature: .3/.5 is .36 at temperature 1/2.
  EXPECT_EQ(kept({.temperature = 0.5, .min_p = 0.4}), (std::set<int32_t>{3}));
  EXPECT_EQ(kept({.temperature = 0.5, .min_p = 0.35}), (std::set<int32_t>{0, 3}));
}

TEST(Sampling, TheRepetitionPenaltyActsOnWhatHasBeenSeen) {
  const std::vector<float> logits{4, 3, -1, -1.5f};
  const std::vector<bool> none(4), seen{true, false, true, false};
  const auto greedy = [&](double penalty, const std::vector<bool>& forbidden) {
    return NextId({.repetition_penalty = penalty}).draw(logits, forbidden, 0, seen);
  };
  EXPECT_EQ(greedy(1, none), 0);
  EXPECT_EQ(greedy(1.3, none), 0);  // 3.08
  EXPECT_EQ(greedy(1.4, none), 1);  // 2.86
  EXPECT_EQ(greedy(0.5, none), 0);  // below 1 it favours them
  const std::vector<bool> positive{true, true, false, false};
  EXPECT_EQ(greedy(1.4, positive), 2);  // -1.4
  EXPECT_EQ(greedy(1.6, positive), 3);  // -1.6
  // Nothing has been seen yet.
  EXPECT_EQ(NextId({.repetition_penalty = 9}).draw(logits, none, 0), 0);
}

TEST(Sampling, LogProbabilitiesAreTheModelsOwn) {
  const std::vector<double> p{.1, .2, .3, .4};
  const std::vector<float> logits = logs(p);
  for (int32_t id = 0; id < 4; ++id) EXPECT_NEAR(log_probability(logits, id), std::log(p[size_t(id)]), 1e-6);
  std::vector<float> shifted = logits;
  for (float& l : shifted) l += 1024;
  EXPECT_NEAR(log_probability(shifted, 2), std::log(.3), 1e-3);  // the shift rounds the logits
  EXPECT_EQ(log_probability(std::vector<float>{3, -kInf, 1}, 1), -INFINITY);
  EXPECT_EQ(log_probability(std::vector<float>{3, kInf, 1}, 1), 0);
  EXPECT_EQ(log_probability(std::vector<float>{3, kInf, 1}, 0), -INFINITY);
  EXPECT_TRUE(std::isnan(log_probability(std::vector<float>{3, kNan, 1}, 0)));
}

}  // namespace
}  // namespace sps
