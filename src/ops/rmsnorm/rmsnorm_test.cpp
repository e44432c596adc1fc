#include "ops/rmsnorm/rmsnorm.h"

#include "base/error.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

constexpr float kEps = 1e-6F;

// One problem: `rows` rows of x and delta, or one row of x for all; a few of them picked, or all.
struct Case {
  int64_t rows, d;
  bool delta = true, one_row = false, in_place = false, residual = true, copy = true;
  std::vector<int32_t> pick = {};
  bool wide = false;  // rows start where wide accesses may: the GPU has kernels for these, and for all others
  int64_t out_rows() const { return pick.empty() ? rows : int64_t(pick.size()); }
};

std::vector<int32_t> every_third(int64_t rows) {
  std::vector<int32_t> pick;
  for (int64_t r = rows > 1 ? 1 : 0; r < rows; r += 3) pick.push_back(int32_t(r));
  return pick;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::pair<int64_t, int64_t> shapes[] = {{1, 2},     {1, 200},  {3, 8},    {100, 48},
                                                {257, 192}, {64, 513}, {300, 200}};
  for (const auto& [rows, d] : shapes) {
    all.push_back({rows, d});
    all.push_back({.rows = rows, .d = d, .in_place = true, .copy = false});
    all.push_back({.rows = rows, .d = d, .delta = false, .residual = false});
    all.push_back({.rows = rows, .d = d, .delta = false, .in_place = true, .copy = false});
    all.push_back({.rows = rows, .d = d, .one_row = true, .residual = false, .copy = false});
    all.push_back({.rows = rows, .d = d, .delta = false, .one_row = true});
    all.push_back({.rows = rows, .d = d, .residual = false, .pick = every_third(rows)});
    all.push_back(
        {.rows = rows, .d = d, .delta = false, .residual = false, .copy = false, .pick = every_third(rows)});
    all.push_back({.rows = rows, .d = d, .one_row = true, .residual = false, .pick = every_third(rows)});
  }
  // Each shape of a GPU's groups of threads, and more rows than its blocks take at once.
  for (const int64_t d : {8, 48, 200, 264, 1000, 1032, 2056, 4104})
    for (const Case& c : std::vector<Case>(all.begin() + 9, all.begin() + 18)) {
      all.push_back(c);
      all.back().d = d, all.back().rows = d > 1000 ? 5 : 70, all.back().wide = true;
      if (!c.pick.empty()) all.back().pick = every_third(all.back().rows);
    }
  for (const int64_t d : {129, 1025}) all.push_back({.rows = 9, .d = d});
  all.push_back({.rows = 3500, .d = 16, .wide = true});
  return all;
}

std::string describe(const Case& c, DType act) {
  return fmt::format("{} rows {} d {}{}{}{}{}{}{} picked {}", dtype_name(act), c.rows, c.d,
                     c.wide ? " wide" : "", c.delta ? " delta" : "", c.one_row ? " one_row" : "",
                     c.in_place ? " in_place" : "", c.residual ? " residual" : "", c.copy ? " copy" : "",
                     c.pick.size());
}

// All tensors of a case. `of` draws them in the given act dtype; in_double holds the same numbers in f64.
struct Data {
  Matrix x, delta, gain, s, y, rstd, dy, dres, ds, ds_act, dgain;

  static Data of(const Case& c, DType act) {
    const DType wide = act == DType::f64 ? DType::f64 : DType::f32;
    const int64_t n = c.out_rows();
    const auto stride = [&](int64_t padding) { return c.d + padding * (c.wide ? 8 : 1); };
    Data t{Matrix(wide, c.one_row ? 1 : c.rows, c.d, stride(4)),
           Matrix(act, c.rows, c.d, stride(3)),
           Matrix(wide, 1, c.d),
           Matrix(wide, n, c.d, stride(7)),
           Matrix(act, n, c.d, stride(1)),
           Matrix(wide, n, 1, 2),
           Matrix(act, n, c.d, stride(2)),
           Matrix(wide, n, c.d, stride(5)),
           Matrix(wide, c.rows, c.d, stride(6)),
           Matrix(act, c.rows, c.d, stride(8)),
           Matrix(wide, 1, c.d)};
    t.x.randomise(1, "x", 1.5);
    t.delta.randomise(1, "delta", 0.7, 0.1);
    t.gain.randomise(1, "gain", 0.3, 1);
    t.dy.randomise(1, "dy");
    t.dres.randomise(1, "dres", 0.5);
    t.dgain.randomise(1, "dgain");
    t.ds.fill(-9);
    t.ds_act.fill(-9);
    return t;
  }

  Data in_double() const {
    const DType f64 = DType::f64;
    return {x.to(f64),  delta.to(f64), gain.to(f64), s.to(f64),      y.to(f64),    rstd.to(f64),
            dy.to(f64), dres.to(f64),  ds.to(f64),   ds_act.to(f64), dgain.to(f64)};
  }

  void forward(const Case& c, Device device = Device::cpu) const {
    OnDevice on(device);
    rmsnorm_forward(on.exec(), on(x), c.delta ? on(delta) : Tensor{}, on(gain), kEps,
                    on(c.in_place && !c.one_row ? x : s), on(y), on(rstd), on.ids(c.pick));
  }
  void backward(const Case& c, Device device = Device::cpu) const {
    OnDevice on(device);
    rmsnorm_backward(on.exec(), on(dy), on(c.in_place && !c.one_row ? x : s), on(gain), on(rstd),
                     c.residual ? on(dres) : Tensor{}, on(c.in_place && c.residual ? dres : ds),
                     c.copy ? on(ds_act) : Tensor{}, on(dgain), on.ids(c.pick));
  }
};

TEST(RmsNorm, HandComputedRow) {
  Matrix x(DType::f64, 1, 2), gain(DType::f64, 1, 2), s(DType::f64, 1, 2), y(DType::f64, 1, 2),
      rstd(DType::f64, 1, 1);
  x.set(0, 0, 3), x.set(0, 1, 4);  // mean square 12.5
  gain.set(0, 0, 2), gain.set(0, 1, -1);
  rmsnorm_forward({}, x, {}, gain, 0, s, y, rstd);
  EXPECT_NEAR(rstd.get(0, 0), 1 / std::sqrt(12.5), 1e-15);
  EXPECT_NEAR(y.get(0, 0), 6 / std::sqrt(12.5), 1e-15);
  EXPECT_NEAR(y.get(0, 1), -4 / std::sqrt(12.5), 1e-15);
}

TEST(RmsNorm, GradientMatchesCentralDifferences) {
  for (Case c : {Case{7, 6}, Case{.rows = 1, .d = 11}, Case{.rows = 4, .d = 5, .one_row = true},
                 Case{.rows = 9, .d = 4, .residual = false, .pick = {0, 3, 4, 8}},
                 Case{.rows = 5, .d = 6, .one_row = true, .residual = false, .pick = {1, 4}}}) {
    SCOPED_TRACE(describe(c, DType::f64));
    Data t = Data::of(c, DType::f64);
    t.dgain.fill(0);
    t.forward(c);
    t.backward(c);
    const auto loss = [&] {  // dy . y + dres . s
      t.forward(c);
      double sum = 0;
      for (int64_t r = 0; r < c.out_rows(); ++r)
        for (int64_t i = 0; i < c.d; ++i)
          sum += t.dy.get(r, i) * t.y.get(r, i) + (c.residual ? t.dres.get(r, i) * t.s.get(r, i) : 0);
      return sum;
    };
    expect_gradient(loss, t.delta, t.ds, "ddelta");
    expect_gradient(loss, t.gain, t.dgain, "dgain");
    Matrix dx(DType::f64, t.x->rows, c.d);  // one row of x collects the gradients of all
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t i = 0; i < c.d; ++i) {
        const int64_t to = c.one_row ? 0 : r;
        dx.set(to, i, dx.get(to, i) + t.ds.get(r, i));
      }
    expect_gradient(loss, t.x, dx, "dx");
    EXPECT_EQ(bits(t.ds), bits(t.ds_act));
  }
}

TEST(RmsNorm, FastMatchesReference) {
  for (const auto& [device, act] : fast_backends())
    for (const Case& c : cases()) {
      SCOPED_TRACE(describe(c, act));
      Data fast = Data::of(c, act);
      Data want = fast.in_double();
      fast.forward(c, device);
      want.forward(c);
      SPS_EXPECT_CLOSE(fast.y, want.y, tolerance(act));
      SPS_EXPECT_CLOSE(fast.rstd, want.rstd, tolerance(DType::f32));
      SPS_EXPECT_CLOSE(fast.s, want.s, tolerance(DType::f32));
      SPS_EXPECT_CLOSE(fast.x, want.x, tolerance(DType::f32));
      fast.backward(c, device);
      want.backward(c);
      SPS_EXPECT_CLOSE(fast.ds, want.ds, tolerance(DType::f32));
      SPS_EXPECT_CLOSE(fast.dres, want.dres, tolerance(DType::f32));
      SPS_EXPECT_CLOSE(fast.dgain, want.dgain, tolerance(DType::f32));
      SPS_EXPECT_CLOSE(fast.ds_act, want.ds_act, tolerance(act));
    }
}

TEST(RmsNorm, GatherIsTheNormOfTheGatheredRows) {
  for (const auto& [device, act] : all_backends()) {
    const Case c{.rows = 200, .d = 48, .residual = false, .pick = every_third(200)};
    const Case plain{.rows = 200, .d = 48, .residual = false};
    Data picked = Data::of(c, act), all = Data::of(plain, act);
    picked.forward(c, device);
    all.forward(plain, device);
    for (int64_t r = 0; r < c.out_rows(); ++r)
      for (int64_t i = 0; i < c.d; ++i) {
        ASSERT_EQ(picked.y.get(r, i), all.y.get(c.pick[size_t(r)], i));
        ASSERT_EQ(picked.s.get(r, i), all.s.get(c.pick[size_t(r)], i));
      }
    picked.backward(c, device);
    size_t next = 0;
    for (int64_t r = 0; r < c.rows; ++r) {
      const bool zero = next >= c.pick.size() || c.pick[next] != r;
      if (!zero) ++next;
      for (int64_t i = 0; i < c.d; ++i) {
        ASSERT_EQ(picked.ds.get(r, i) == 0, zero) << r;
        ASSERT_EQ(picked.ds_act.get(r, i) == 0, zero) << r;
      }
    }
  }
}

TEST(RmsNorm, PickingNoRowGivesZeroGradient) {
  for (const auto& [device, act] : all_backends()) {
    const DType wide = act == DType::f64 ? DType::f64 : DType::f32;
    Matrix x(wide, 5, 8), gain(wide, 1, 8), ds(wide, 5, 8), ds_act(act, 5, 8), dgain(wide, 1, 8);
    ds.fill(3);
    ds_act.fill(3);
    dgain.fill(2);
    const Tensor none{nullptr, 0, 8, 8, wide}, none_act{nullptr, 0, 8, 8, act},
        no_rstd{nullptr, 0, 1, 1, wide};
    {
      OnDevice on(device);
      rmsnorm_forward(on.exec(), on(x), {}, on(gain), kEps, none, none_act, no_rstd);
      rmsnorm_backward(on.exec(), none_act, none, on(gain), no_rstd, {}, on(ds), on(ds_act), on(dgain));
    }
    for (int64_t c = 0; c < 8; ++c) {
      for (int64_t r = 0; r < 5; ++r) {
        EXPECT_EQ(ds.get(r, c), 0);
        EXPECT_EQ(ds_act.get(r, c), 0);
      }
      EXPECT_EQ(dgain.get(0, c), 2);
    }
  }
}

TEST(RmsNorm, ResidualGradientMayBeInPlace) {
  for (const Device device : test_devices())
    for (const bool wide : {false, true}) {
      const Case apart{.rows = 70, .d = 72, .wide = wide},
          in_place{.rows = 70, .d = 72, .in_place = true, .wide = wide};
      Data a = Data::of(apart, DType::bf16), b = Data::of(in_place, DType::bf16);
      a.forward(apart, device);
      b.forward(in_place, device);
      EXPECT_EQ(bits(a.s), bits(b.x));
      EXPECT_EQ(bits(a.y), bits(b.y));
      a.backward(apart, device);
      b.backward(in_place, device);
      EXPECT_EQ(bits(a.ds), bits(b.dres));
      EXPECT_EQ(bits(a.ds_act), bits(b.ds_act));
    }
}

TEST(RmsNorm, RowsOfZerosAndOfExtremesStayFinite) {
  Matrix x(DType::f32, 3, 32), gain(DType::f32, 1, 32), s(DType::f32, 3, 32), y(DType::f32, 3, 32),
      rstd(DType::f32, 3, 1);
  Matrix dy(DType::f32, 3, 32), ds(DType::f32, 3, 32), dgain(DType::f32, 1, 32);
  gain.fill(1);
  dy.randomise(1, "dy");
  for (int64_t c = 0; c < 32; ++c) x.set(1, c, 1e15), x.set(2, c, 1e-15);
  for (const Device device : test_devices()) {
    {
      OnDevice on(device);
      rmsnorm_forward(on.exec(), on(x), {}, on(gain), kEps, on(s), on(y), on(rstd));
      rmsnorm_backward(on.exec(), on(dy), on(s), on(gain), on(rstd), {}, on(ds), {}, on(dgain));
    }
    EXPECT_NEAR(rstd.get(0, 0), 1e3, 1e-2);  // eps alone
    for (int64_t c = 0; c < 32; ++c) {
      EXPECT_EQ(y.get(0, c), 0);
      EXPECT_NEAR(y.get(1, c), 1, 1e-5);
      EXPECT_NEAR(y.get(2, c) * 1e12, 1, 1e-5);
      for (int64_t r = 0; r < 3; ++r) EXPECT_TRUE(std::isfinite(ds.get(r, c)));
    }
  }
}

// A number divided by its own size is its sign: the gradient cancels, up to rounding of the terms.
TEST(RmsNorm, WidthOneIsTheSign) {
  Matrix x(DType::f32, 3, 1), gain(DType::f32, 1, 1), s(DType::f32, 3, 1), y(DType::f32, 3, 1),
      rstd(DType::f32, 3, 1);
  Matrix dy(DType::f32, 3, 1), ds(DType::f32, 3, 1), dgain(DType::f32, 1, 1);
  gain.fill(1);
  dy.fill(1);
  x.set(0, 0, 2), x.set(1, 0, -3), x.set(2, 0, 5);
  rmsnorm_forward({}, x, {}, gain, kEps, s, y, rstd);
  rmsnorm_backward({}, dy, s, gain, rstd, {}, ds, {}, dgain);
  for (int64_t r = 0; r < 3; ++r) {
    EXPECT_NEAR(y.get(r, 0), x.get(r, 0) > 0 ? 1 : -1, 1e-6);
    EXPECT_NEAR(ds.get(r, 0), 0, 1e-6);
  }
  EXPECT_NEAR(dgain.get(0, 0), 1, 1e-6);
}

TEST(RmsNorm, SameBitsForAnyThreads) {
  for (const Case& c : {Case{.rows = 1000, .d = 192},
                        Case{.rows = 700, .d = 513, .residual = false, .pick = every_third(700)}})
    expect_same_bits_for_any_threads([&] {
      Data t = Data::of(c, DType::bf16);
      t.forward(c);
      t.backward(c);
      return bits(t.s) + bits(t.y) + bits(t.rstd) + bits(t.ds) + bits(t.ds_act) + bits(t.dgain);
    });
}

TEST(RmsNorm, SameBitsEveryTime) {
  for (const Device device : test_devices())
    for (const Case& c : {Case{.rows = 1000, .d = 192, .wide = true}, Case{.rows = 300, .d = 513}}) {
      const auto run = [&] {
        Data t = Data::of(c, DType::bf16);
        t.forward(c, device);
        t.backward(c, device);
        return bits(t.s) + bits(t.y) + bits(t.rstd) + bits(t.ds) + bits(t.ds_act) + bits(t.dgain);
      };
      const std::string once = run();
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(run() == once);
    }
}

TEST(RmsNormDeathTest, RefusesPickOutOfOrder) {
  const Case good{.rows = 6, .d = 4, .residual = false, .pick = {1, 2}};
  Data t = Data::of(good, DType::f32);
  Case bad = good;
  bad.pick = {2, 2};
  EXPECT_DEATH(t.forward(bad), "row > above");
  bad.pick = {2, 6};
  EXPECT_DEATH(t.forward(bad), "row < rows");
}

}  // namespace
}  // namespace sps::ops
