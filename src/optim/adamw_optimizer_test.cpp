#include "optim/adamw_optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/rng.h"
#include "ops/clip/clip.h"
#include "tensor/device.h"

namespace sps {
namespace {

std::vector<Parameter> parameters() {
  return {{.name = "matrix", .shape = {3, 5}, .init_std = 0.5},
          {.name = "norm", .shape = {7}, .init_mean = 1},
          {.name = "start", .shape = {1, 4}, .init_std = 0.5}};
}

void random_gradients(ParameterStore& store, uint64_t seed) {
  const Rng rng(seed, "gradients");
  const Tensor g = store.all_gradients();
  for (int64_t i = 0; i < g.cols; ++i) {
    if (g.dtype == DType::f64)
      g.as<double>()[i] = rng.normal(uint64_t(i));
    else
      g.as<float>()[i] = float(rng.normal(uint64_t(i)));
  }
}

const Exec kCpu;

// One number under AdamW (training spec, section 4), written as its definition.
struct Scalar {
  double w, m = 0, v = 0;
  void step(double g, int t, double lr, double decay) {
    m = 0.9 * m + 0.1 * g;
    v = 0.95 * v + 0.05 * g * g;
    const double m_hat = m / (1 - std::pow(0.9, t)), v_hat = v / (1 - std::pow(0.95, t));
    w = w * (1 - lr * decay) - lr * m_hat / (std::sqrt(v_hat) + 1e-8);
  }
};

TEST(AdamWOptimizer, FollowsTheDefinition) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    ParameterStore store(parameters(), dtype);
    store.initialise(3);
    AdamWOptimizer optimizer(store);
    const auto value = [&](const Tensor& t, int64_t i) {
      return t.dtype == DType::f64 ? t.as<double>()[i] : double(t.as<float>()[i]);
    };
    std::vector<std::vector<Scalar>> want(3);
    for (int p = 0; p < 3; ++p)
      for (int64_t i = 0; i < store.list()[size_t(p)].count(); ++i)
        want[size_t(p)].push_back({value(store.weight(p), i)});
    for (int t = 1; t <= 5; ++t) {
      random_gradients(store, uint64_t(t));
      const double lr = 0.01 * t, scale = t == 2 ? 0.25 : 1;
      optimizer.step(kCpu, store, {.lr = lr, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .decay = 0.1}, scale);
      for (int p = 0; p < 3; ++p)
        for (size_t i = 0; i < want[size_t(p)].size(); ++i) {
          Scalar& s = want[size_t(p)][i];
          s.step(scale * value(store.gradient(p), int64_t(i)), t, lr, p == 1 ? 0 : 0.1);
          EXPECT_NEAR(value(store.weight(p), int64_t(i)), s.w, dtype == DType::f64 ? 1e-14 : 2e-6)
              << store.list()[size_t(p)].name << " " << i << " after " << t;
        }
    }
    EXPECT_EQ(optimizer.steps(), (std::vector<int64_t>{5, 5, 5}));
  }
}

// Each step takes 2^-10 of a weight, a quarter of what bf16 can tell apart: rounded weights alone would never
// move.
TEST(AdamWOptimizer, DecayAloneShrinksTheMatricesOfABf16Run) {
  ParameterStore store(parameters(), DType::bf16);
  store.initialise(3);
  AdamWOptimizer optimizer(store);
  store.zero_gradients(kCpu);
  const float before = store.weight(0).as<float>()[4];
  const float start = store.weight(2).as<float>()[0];
  const float rounded = float(store.rounded(0).as<bf16>()[4]);
  for (int t = 0; t < 200; ++t) optimizer.step(kCpu, store, {.lr = 1.0 / 1024, .decay = 1}, 1);
  const double want = before * std::pow(1 - 1.0 / 1024, 200);
  EXPECT_NEAR(store.weight(0).as<float>()[4], want, 1e-4 * std::fabs(want));
  EXPECT_LT(std::fabs(float(store.rounded(0).as<bf16>()[4])), 0.85 * std::fabs(rounded));
  for (int64_t i = 0; i < 7; ++i) {
    EXPECT_EQ(store.weight(1).as<float>()[i], 1) << "norms do not decay";
    EXPECT_EQ(float(store.rounded(1).as<bf16>()[i]), 1);
  }
  EXPECT_NEAR(store.weight(2).as<float>()[0] / start, want / before, 1e-4)
      << "one row of a matrix is a matrix";
}

TEST(AdamWOptimizer, Bf16CopiesAreTheRoundedWeights) {
  ParameterStore store(parameters(), DType::bf16);
  store.initialise(3);
  AdamWOptimizer optimizer(store);
  for (int t = 1; t <= 3; ++t) {
    random_gradients(store, uint64_t(t));
    optimizer.step(kCpu, store, {.lr = 0.1}, 1);
  }
  for (int p = 0; p < 3; ++p)
    for (int64_t i = 0; i < store.list()[size_t(p)].count(); ++i)
      EXPECT_EQ(float(store.rounded(p).as<bf16>()[i]), float(bf16(store.weight(p).as<float>()[i])));
}

// A larger model takes over what a smaller one has: by name, with moments and numbers of updates.
TEST(AdamWOptimizer, AdoptsByName) {
  const std::vector<Parameter> all = parameters();
  ParameterStore small({all[2], all[0]}, DType::f32), large(all, DType::f32);
  small.initialise(1), large.initialise(1);
  AdamWOptimizer from(small), to(large);
  for (int t = 1; t <= 4; ++t) {
    random_gradients(small, uint64_t(t));
    from.step(kCpu, small, {.lr = 0.1}, 1);
  }
  to.adopt(from);
  EXPECT_EQ(to.steps(), (std::vector<int64_t>{4, 0, 4}));
  const auto old_moments = from.named_moments(), moments = to.named_moments();
  ASSERT_EQ(moments.size(), 6u);
  for (const NamedTensor& m : moments) {
    const auto found = std::find_if(old_moments.begin(), old_moments.end(),
                                    [&](const NamedTensor& o) { return o.name == m.name; });
    for (int64_t i = 0; i < m.tensor.count(); ++i) {
      const float got = m.tensor.as<float>()[i];
      EXPECT_EQ(got, found == old_moments.end() ? 0.0f : found->tensor.as<float>()[i]) << m.name;
      EXPECT_EQ(got == 0, m.name == "m.norm" || m.name == "v.norm") << m.name;
    }
  }
}

// The moments are the whole state beside the numbers of updates: a second optimizer that is given both goes
// on alike.
TEST(AdamWOptimizer, MomentsAndStepsAreItsState) {
  ParameterStore a(parameters(), DType::f32), b(parameters(), DType::f32);
  a.initialise(1), b.initialise(1);
  AdamWOptimizer first(a);
  for (int t = 1; t <= 3; ++t) {
    random_gradients(a, uint64_t(t));
    first.step(kCpu, a, {.lr = 0.1}, 1);
  }
  AdamWOptimizer second(b);
  const auto copy = [](const Tensor& from, const Tensor& to) {
    std::copy_n(from.as<float>(), from.count(), to.as<float>());
  };
  copy(a.all_weights(), b.all_weights());
  const auto from = first.named_moments(), to = second.named_moments();
  for (size_t i = 0; i < from.size(); ++i) {
    EXPECT_EQ(from[i].name, to[i].name);
    EXPECT_EQ(from[i].shape, to[i].shape);
    copy(from[i].tensor, to[i].tensor);
  }
  second.set_steps(first.steps());
  for (ParameterStore* store : {&a, &b}) random_gradients(*store, 9);
  first.step(kCpu, a, {.lr = 0.1}, 1);
  second.step(kCpu, b, {.lr = 0.1}, 1);
  EXPECT_EQ(a.hash(), b.hash());
}

// Frozen: no moments, no decay, no update, no part in the norm, and no say in what the others become.
TEST(AdamWOptimizer, LeavesFrozenParametersAlone) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    std::vector<Parameter> list = parameters();
    ParameterStore whole(list, dtype);
    list[0].frozen = true;
    ParameterStore store(list, dtype);
    AdamWOptimizer all(whole), optimizer(store);
    EXPECT_EQ(all.bytes() - optimizer.bytes(), 512u) << "two moments of 15 numbers, aligned";
    std::vector<std::string> names;
    for (const NamedTensor& m : optimizer.named_moments()) names.push_back(m.name);
    EXPECT_EQ(names, (std::vector<std::string>{"m.norm", "v.norm", "m.start", "v.start"}));
    for (ParameterStore* s : {&whole, &store}) s->initialise(3), random_gradients(*s, 4);
    const std::vector<float> before(store.weight(0).as<float>(), store.weight(0).as<float>() + 15);

    double squares = 0;
    for (int p = 1; p < 3; ++p)
      for (int64_t i = 0; i < list[size_t(p)].count(); ++i)
        squares += std::pow(double(store.gradient(p).as<float>()[i]), 2);
    EXPECT_NEAR(gradient_norm(kCpu, store).norm, std::sqrt(squares), 1e-6 * std::sqrt(squares));
    EXPECT_GT(gradient_norm(kCpu, whole).norm, 1.1 * std::sqrt(squares));
    store.gradient(0).as<float>()[2] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(gradient_norm(kCpu, store).not_finite, "");

    for (int t = 0; t < 3; ++t) {
      all.step(kCpu, whole, {.lr = 0.1, .decay = 0.1}, 1);
      optimizer.step(kCpu, store, {.lr = 0.1, .decay = 0.1}, 1);
    }
    EXPECT_EQ(optimizer.steps(), (std::vector<int64_t>{0, 3, 3}));
    EXPECT_TRUE(std::equal(before.begin(), before.end(), store.weight(0).as<float>()));
    EXPECT_FALSE(std::equal(before.begin(), before.end(), whole.weight(0).as<float>()));
    for (int p = 1; p < 3; ++p)
      for (int64_t i = 0; i < list[size_t(p)].count(); ++i)
        EXPECT_EQ(store.weight(p).as<float>()[i], whole.weight(p).as<float>()[i]);
  }
}

// Norm, clipping and update that nobody waits for, recorded or not, are those of the host to the bit; what is
// flagged or not finite updates nothing and does not count.
TEST(AdamWOptimizer, AGpuClipsAsTheHostDoes) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  const Exec ex = open_gpu();
  const Bytes number(sizeof(float), Memory::device);
  const Tensor flag{number.data(), 1, 1, 1, DType::f32, Device::cuda};
  const auto set_flag = [&](float value) { copy_tensor(view(&value, 1, 1), flag); };
  std::vector<Parameter> list = parameters();
  list[1].frozen = true;
  for (const bool graphs : {false, true}) {
    ParameterStore drawn(list, DType::f32), want(list, DType::bf16, true, Device::cuda),
        got(list, DType::bf16, true, Device::cuda);
    want.initialise(3), got.initialise(3);
    AdamWOptimizer of_host(want), on_gpu(got);
    const auto moments = [](const AdamWOptimizer& o) {
      std::vector<float> all;
      for (const NamedTensor& m : o.named_moments()) {
        const OnHost there(m.tensor);
        all.insert(all.end(), there->as<float>(), there->as<float>() + m.tensor.count());
      }
      return all;
    };
    for (int t = 1; t <= 5; ++t) {
      random_gradients(drawn, uint64_t(t));
      copy_tensor(drawn.all_gradients(), want.all_gradients());
      copy_tensor(drawn.all_gradients(), got.all_gradients());
      const ops::AdamW settings{.lr = 0.01 * t};
      const GradientNorm norm = gradient_norm(ex, want);
      ASSERT_GT(norm.norm, 1);
      of_host.step(ex, want, settings, ops::clip_factor(norm.norm, 1));
      on_gpu.start(ex, got, settings, 1, flag, graphs);
      EXPECT_EQ(on_gpu.take_norm().norm, norm.norm);
      EXPECT_EQ(got.hash(), want.hash()) << t;
      EXPECT_EQ(moments(on_gpu), moments(of_host)) << t;
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const bool bad_loss : {true, false}) {
      set_flag(bad_loss ? 1 : 0);
      if (!bad_loss) copy_tensor(view(&nan, 1, 1), got.gradient(2).cols_from(1, 1));
      on_gpu.start(ex, got, {.lr = 0.1}, 1, flag, graphs);
      EXPECT_EQ(on_gpu.take_norm().not_finite, bad_loss ? "" : "start");
      EXPECT_EQ(got.hash(), want.hash());
      EXPECT_EQ(moments(on_gpu), moments(of_host));
      EXPECT_EQ(on_gpu.steps(), (std::vector<int64_t>{5, 0, 5}));
    }
  }
}

TEST(GradientNorm, IsOverAllParametersTogether) {
  ParameterStore store(parameters(), DType::f32);
  random_gradients(store, 5);
  double squares = 0;
  for (int p = 0; p < 3; ++p)
    for (int64_t i = 0; i < store.list()[size_t(p)].count(); ++i)
      squares += std::pow(double(store.gradient(p).as<float>()[i]), 2);
  const GradientNorm g = gradient_norm(kCpu, store);
  EXPECT_NEAR(g.norm, std::sqrt(squares), 1e-6 * std::sqrt(squares));
  EXPECT_EQ(g.not_finite, "");
}

TEST(GradientNorm, NamesTheFirstTensorThatIsNotFinite) {
  ParameterStore store(parameters(), DType::f32);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    random_gradients(store, 5);
    store.gradient(2).as<float>()[3] = bad;
    GradientNorm g = gradient_norm(kCpu, store);
    EXPECT_FALSE(std::isfinite(g.norm));
    EXPECT_EQ(g.not_finite, "start");
    store.gradient(1).as<float>()[6] = bad;
    EXPECT_EQ(gradient_norm(kCpu, store).not_finite, "norm");
  }
}

}  // namespace
}  // namespace sps
