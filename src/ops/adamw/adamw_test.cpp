#include "ops/adamw/adamw.h"

#include <array>
#include <limits>

#include "base/threads.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

const Exec ex;

struct State {
  Matrix w, grad, m, v, w_act;
  State(DType dtype, int64_t n)
      : w(dtype, 1, n), grad(dtype, 1, n), m(dtype, 1, n), v(dtype, 1, n), w_act(DType::bf16, 1, n) {
    w.randomise(1, "w", 0.02);
    m.fill(0), v.fill(0);
  }
  void step(const AdamW& p, Device device = Device::cpu) {
    OnDevice on(device);
    adamw(on.exec(), p, on(w), on(grad), on(m), on(v), on(w_act));
  }
};

std::vector<std::pair<Device, int64_t>> sizes() {
  std::vector<std::pair<Device, int64_t>> all;
  for (const Device device : test_devices())
    for (const int64_t n : {1, 7, 16, 513, 2048, 40000}) all.emplace_back(device, n);
  return all;
}

// By hand, with b1 = 1/2, b2 = 3/4, eps = 1, lr = 1/2, decay = 1/10 and scaled gradients 4, -2, 1:
//   t  m    v     m-hat  v-hat   w
//   0                            10
//   1  2    4     4      16      10 - (4/5 + 1) / 2               = 9.1
//   2  0    4     0      64/7    9.1 - 0.91 / 2                   = 8.645
//   3  1/2  13/4  4/7    208/37  8.645 - (4/7 / (sqrt(208/37) + 1) + 0.8645) / 2
TEST(AdamW, ThreeStepsByHand) {
  const std::array<double, 3> grads{8, -4, 2}, ms{2, 0, 0.5}, vs{4, 4, 3.25};
  const std::array<double, 3> ws{9.1, 8.645, 8.645 - (4.0 / 7 / (std::sqrt(208.0 / 37) + 1) + 0.8645) / 2};
  for (const auto& [device, dtype] : all_backends()) {
    if (dtype == DType::bf16) continue;
    const double tol = dtype == DType::f64 ? 1e-14 : 5e-7;
    State s(dtype, 1);
    s.w.fill(10);
    for (size_t i = 0; i < 3; ++i) {
      s.grad.fill(grads[i]);
      s.step(
          {.lr = 0.5, .beta1 = 0.5, .beta2 = 0.75, .eps = 1, .decay = 0.1, .t = int64_t(i) + 1, .scale = 0.5},
          device);
      EXPECT_NEAR(s.m.get(0, 0), ms[i], tol);
      EXPECT_NEAR(s.v.get(0, 0), vs[i], tol);
      EXPECT_NEAR(s.w.get(0, 0), ws[i], 10 * tol);
      EXPECT_EQ(s.w_act.get(0, 0), float(bf16(float(s.w.get(0, 0)))));
    }
  }
}

TEST(AdamW, FastCodeMatchesReferenceOverFiftySteps) {
  for (const auto& [device, n] : sizes()) {
    State fast(DType::f32, n), ref(DType::f64, n);
    ref.w = fast.w.to(DType::f64);
    const Matrix start = fast.w.to(DType::f64);
    for (int64_t t = 1; t <= 50; ++t) {
      fast.grad.randomise(uint64_t(t), "grad", 1e-3);
      ref.grad = fast.grad.to(DType::f64);
      const AdamW p{.lr = 6e-4 / double(t), .t = t, .scale = 0.7};
      fast.step(p, device);
      ref.step(p);
    }
    SPS_EXPECT_CLOSE(fast.w, ref.w, tolerance(DType::f32));
    SPS_EXPECT_CLOSE(fast.m, ref.m, tolerance(DType::f32));
    SPS_EXPECT_CLOSE(fast.v, ref.v, tolerance(DType::f32));
    SPS_EXPECT_CLOSE(fast.w_act, ref.w, tolerance(DType::bf16));
    EXPECT_GT(relative_error(ref.w, start), 1e-3) << "the weights hardly moved: the comparison says nothing";
  }
}

// A gradient of zero leaves the decay, which the f32 master weight keeps although it is far below bf16's
// resolution.
TEST(AdamW, DecayAloneShrinksWeights) {
  constexpr double lr = 6e-4, decay = 0.1;
  constexpr int64_t steps = 1000, n = 40;
  for (const Device device : test_devices()) {
    State s(DType::f32, n);
    for (int64_t i = 0; i < n; ++i) s.w.set(0, i, i % 2 == 0 ? 0.37 : -1.9);
    s.grad.fill(0);
    s.step({.lr = lr, .decay = decay, .t = 1}, device);
    EXPECT_NEAR(s.w.get(0, 0), 0.37 * (1 - lr * decay), 0.37 * 6e-8);
    for (int64_t t = 2; t <= steps; ++t) s.step({.lr = lr, .decay = decay, .t = t}, device);
    const double want = std::pow(1 - lr * decay, steps);  // 0.942
    for (int64_t i = 0; i < n; ++i) {
      const double start = i % 2 == 0 ? 0.37 : -1.9;
      EXPECT_NEAR(s.w.get(0, i) / start, want, steps * 0x1p-24);
      EXPECT_NEAR(s.w_act.get(0, i) / start, want, 0x1p-8);
    }
  }
}

TEST(AdamW, NoDecayAndNoGradientLeavesWeightsBitEqual) {
  for (const Device device : test_devices()) {
    State s(DType::f32, 100), before(DType::f32, 100);
    s.grad.fill(0);
    for (int64_t t = 1; t <= 3; ++t) s.step({.decay = 0, .t = t}, device);
    EXPECT_EQ(relative_error(s.w, before.w), 0);
  }
}

// 0.9 times the smallest denormal number rounds to itself: the moments would stay there, and slow, for good.
TEST(AdamW, VanishingMomentsReachZero) {
  for (const Device device : test_devices()) {
    State s(DType::f32, 40);
    s.grad.fill(1e-3);
    s.step({.t = 1}, device);
    s.grad.fill(0);
    for (int64_t t = 2; t <= 2000; ++t) {
      s.step({.t = t}, device);
      for (const Matrix* moment : {&s.m, &s.v}) {
        const double x = moment->get(0, 17);
        ASSERT_TRUE(x == 0 || x >= double(std::numeric_limits<float>::min())) << x << " at step " << t;
      }
    }
    EXPECT_EQ(s.m.get(0, 39), 0);
    EXPECT_EQ(s.v.get(0, 39), 0);
  }
}

TEST(AdamW, NanIsNotHidden) {
  for (const auto& [device, dtype] : all_backends()) {
    if (dtype == DType::bf16) continue;
    State s(dtype, 20);
    s.grad.fill(1);
    s.grad.set(0, 18, NAN);
    s.step({}, device);
    for (int64_t i = 0; i < 20; ++i) {
      EXPECT_EQ(std::isnan(s.w.get(0, i)), i == 18);
      EXPECT_EQ(std::isnan(s.m.get(0, i)), i == 18);
      EXPECT_EQ(std::isnan(s.v.get(0, i)), i == 18);
      EXPECT_EQ(std::isnan(s.w_act.get(0, i)), i == 18);
    }
  }
}

TEST(AdamW, CopyIsOptional) {
  State with(DType::f32, 50), without(DType::f32, 50);
  with.grad.randomise(1, "grad"), without.grad.randomise(1, "grad");
  with.step({});
  adamw(ex, {}, without.w, without.grad, without.m, without.v, {});
  EXPECT_EQ(relative_error(with.w, without.w), 0);
}

// Many tensors at once, each with its own settings and alignment, are what they are one by one.
TEST(AdamW, ManyAtOnceAreTheSameOneByOne) {
  for (const Device device : test_devices()) {
    std::vector<State> one, all;
    const auto settings = [](int64_t i) { return AdamW{.decay = i % 2 == 0 ? 0.1 : 0, .t = 1 + i}; };
    for (int64_t i = 0; i < 80; ++i)
      for (std::vector<State>* states : {&one, &all}) {
        states->emplace_back(DType::f32, i == 70 ? 9000 : i * 37);
        states->back().grad.randomise(uint64_t(i), "grad");
      }
    {
      OnDevice on(device);
      std::vector<AdamWUpdate> updates;
      for (int64_t i = 0; i < 80; ++i) {
        const State& s = all[size_t(i)];
        updates.push_back(
            {settings(i), on(s.w), on(s.grad), on(s.m), on(s.v), i % 3 == 0 ? Tensor{} : on(s.w_act)});
      }
      adamw(on.exec(), updates);
    }
    for (int64_t i = 0; i < 80; ++i) {
      const State &a = all[size_t(i)], &o = one[size_t(i)];
      one[size_t(i)].step(settings(i), device);
      EXPECT_EQ(bits(a.w), bits(o.w)) << i;
      EXPECT_EQ(bits(a.m), bits(o.m)) << i;
      EXPECT_EQ(bits(a.v), bits(o.v)) << i;
      if (i % 3 != 0) {
        EXPECT_EQ(bits(a.w_act), bits(o.w_act)) << i;
      }
    }
  }
}

// Of more tensors than one launch takes. Below 0 the factor leaves all of them alone.
TEST(AdamW, SettingsThatLieOnAGpuAreThoseOfTheCall) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  std::vector<State> told, there;
  std::vector<AdamWStep> steps;
  const auto settings = [](int64_t i) {
    return AdamW{.lr = 1e-3, .decay = i % 2 == 0 ? 0.1 : 0, .t = 1 + i, .scale = 0.3};
  };
  for (int64_t i = 0; i < 80; ++i) {
    for (std::vector<State>* states : {&told, &there}) {
      states->emplace_back(DType::f32, i == 70 ? 9000 : i * 37);
      states->back().grad.randomise(uint64_t(i), "grad");
    }
    AdamW other = settings(i);
    other.scale = 7;  // nobody's
    steps.emplace_back(other);
  }
  const auto run_there = [&](double factor) {
    Matrix scale(DType::f32, 1, 1);
    scale.set(0, 0, factor);
    OnDevice on(Device::cuda);
    std::vector<AdamWUpdate> updates;
    for (const State& s : there) updates.push_back({{}, on(s.w), on(s.grad), on(s.m), on(s.v), on(s.w_act)});
    const auto bytes = std::as_writable_bytes(std::span(steps));
    const Tensor list = on(view(bytes.data(), 1, 0), bytes);
    adamw(on.exec(), updates, {static_cast<const AdamWStep*>(list.data), steps.size()}, on(scale));
  };
  const auto all_bits = [](const std::vector<State>& states) {
    std::string all;
    for (const State& s : states) all += bits(s.w) + bits(s.m) + bits(s.v) + bits(s.w_act);
    return all;
  };
  const std::string before = all_bits(there);
  run_there(-1);
  EXPECT_TRUE(before == all_bits(there));
  run_there(0.3);
  {
    OnDevice on(Device::cuda);
    std::vector<AdamWUpdate> updates;
    for (size_t i = 0; i < told.size(); ++i) {
      const State& s = told[i];
      updates.push_back({settings(int64_t(i)), on(s.w), on(s.grad), on(s.m), on(s.v), on(s.w_act)});
    }
    adamw(on.exec(), updates);
  }
  EXPECT_FALSE(before == all_bits(there));
  EXPECT_TRUE(all_bits(told) == all_bits(there));
}

TEST(AdamW, SameBitsForAnyNumberOfThreads) {
  const int threads = thread_count();
  State one(DType::f32, 100001), two(DType::f32, 100001);
  one.grad.randomise(1, "grad"), two.grad.randomise(1, "grad");
  set_thread_count(1);
  one.step({});
  set_thread_count(2);
  two.step({});
  set_thread_count(threads);
  EXPECT_EQ(relative_error(one.w, two.w), 0);
  EXPECT_EQ(relative_error(one.m, two.m), 0);
  EXPECT_EQ(relative_error(one.v, two.v), 0);
}

TEST(AdamWDeathTest, WrongUseAborts) {
  State s(DType::f32, 8), longer(DType::f32, 9);
  EXPECT_DEATH(adamw(ex, {.t = 0}, s.w, s.grad, s.m, s.v, {}), "internal error");
  EXPECT_DEATH(adamw(ex, {}, s.w, longer.grad, s.m, s.v, {}), "internal error");
}

}  // namespace
}  // namespace sps::ops
