#include "ops/gates/gates.h"

#include "base/error.h"
#include "base/threads.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

const Exec ex;

DType wide_of(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

double weighted_sum(const Matrix& x, const Matrix& weight) {
  double sum = 0;
  for (int64_t r = 0; r < x->rows; ++r)
    for (int64_t c = 0; c < x->cols; ++c) sum += x.get(r, c) * weight.get(r, c);
  return sum;
}

// f is given instead of computed from m, so that every gradient has one source: loss = m . dm + out_a .
// d_out_a + out_p . d_out_p.
struct Case {
  Matrix a, p, f, w_in, w_a, w_p, dm, d_out_a, d_out_p;  // given
  Matrix g, s_a, s_p, m, out_a, out_p;                   // forward
  Matrix t_a, t_p, df, da, dp, dw_in, dw_a, dw_p;        // backward
  Case(DType dtype, int64_t rows, int64_t d, int64_t pad = 0)
      : a(dtype, rows, d, d + pad),
        p(dtype, rows, d, d + 2 * pad),
        f(dtype, rows, d, d + pad),
        w_in(wide_of(dtype), 1, 2 * d),
        w_a(wide_of(dtype), 1, d),
        w_p(wide_of(dtype), 1, d),
        dm(dtype, rows, d, d + pad),
        d_out_a(dtype, rows, d, d + pad),
        d_out_p(dtype, rows, d, d + 3 * pad),
        g(wide_of(dtype), rows, 1, 1 + pad),
        s_a(wide_of(dtype), rows, 1, 1 + pad),
        s_p(wide_of(dtype), rows, 1),
        m(dtype, rows, d, d + 3 * pad),
        out_a(dtype, rows, d, d + 2 * pad),
        out_p(dtype, rows, d),
        t_a(wide_of(dtype), rows, 1),
        t_p(wide_of(dtype), rows, 1, 1 + pad),
        df(dtype, rows, d, d + pad),
        da(dtype, rows, d, d + 2 * pad),
        dp(dtype, rows, d, d + pad),
        dw_in(wide_of(dtype), 1, 2 * d),
        dw_a(wide_of(dtype), 1, d),
        dw_p(wide_of(dtype), 1, d) {
    a.randomise(1, "a"), p.randomise(1, "p"), f.randomise(1, "f");
    dm.randomise(1, "dm"), d_out_a.randomise(1, "d_out_a"), d_out_p.randomise(1, "d_out_p");
    for (Matrix* w : {&w_in, &w_a, &w_p})
      w->randomise(w == &w_in ? 1 : w == &w_a ? 2 : 3, "w", 1 / std::sqrt(double(d)));
  }
  Case in_f64() const {
    Case q(DType::f64, a->rows, a->cols);
    const auto copy = [&](Matrix Case::*x) { q.*x = (this->*x).to(DType::f64); };
    for (Matrix Case::*x : {&Case::a, &Case::p, &Case::f, &Case::w_in, &Case::w_a, &Case::w_p, &Case::dm,
                            &Case::d_out_a, &Case::d_out_p, &Case::dw_in, &Case::dw_a, &Case::dw_p})
      copy(x);
    return q;
  }
  // Without the state's output where `both` is false.
  void forward(Device device = Device::cpu, bool both = true) {
    OnDevice on(device);
    const auto of_state = [&](Matrix& x) { return both ? on(x) : Tensor{}; };
    const GateRows gates{on(g), of_state(s_a), on(s_p)};
    pool_forward(on.exec(), on(a), on(p), {on(w_in), of_state(w_a), on(w_p)}, gates, on(m));
    scatter_forward(on.exec(), on(f), gates, of_state(out_a), on(out_p));
  }
  void run(Device device = Device::cpu, bool both = true) {
    forward(device, both);
    OnDevice on(device);
    const auto of_state = [&](Matrix& x) { return both ? on(x) : Tensor{}; };
    const GateRows gates{on(g), of_state(s_a), on(s_p)}, t{{}, of_state(t_a), on(t_p)};
    scatter_backward(on.exec(), of_state(d_out_a), on(d_out_p), on(f), gates, on(df), t);
    pool_backward(on.exec(), on(dm), on(a), on(p), {on(w_in), of_state(w_a), on(w_p)}, gates, t, on(da),
                  on(dp), {on(dw_in), of_state(dw_a), on(dw_p)});
  }
  std::string all_bits() const {
    std::string all;
    for (const Matrix* x :
         {&g, &s_a, &s_p, &m, &out_a, &out_p, &t_a, &t_p, &df, &da, &dp, &dw_in, &dw_a, &dw_p})
      all += bits(*x);
    return all;
  }
};

TEST(Gates, ReferenceGradientsMatchCentralDifferences) {
  Case c(DType::f64, 4, 7);
  c.run();
  const auto loss = [&] {
    c.forward();
    return weighted_sum(c.m, c.dm) + weighted_sum(c.out_a, c.d_out_a) + weighted_sum(c.out_p, c.d_out_p);
  };
  expect_gradient(loss, c.a, c.da, "a");
  expect_gradient(loss, c.p, c.dp, "p");
  expect_gradient(loss, c.f, c.df, "f");
  expect_gradient(loss, c.w_in, c.dw_in, "w_in");
  expect_gradient(loss, c.w_a, c.dw_a, "w_a");
  expect_gradient(loss, c.w_p, c.dw_p, "w_p");
}

// The gate weighs the state row, 1 - gate the prediction row, and the state half of w_in comes first.
TEST(Gates, PoolOpensTowardsTheState) {
  for (const auto& [device, dtype] : all_backends()) {
    Case c(dtype, 1, 2);
    c.a.set(0, 0, 3), c.a.set(0, 1, 1);
    c.p.set(0, 0, 5), c.p.set(0, 1, 2);
    c.w_in.fill(0);
    c.forward(device);
    EXPECT_NEAR(c.g.get(0, 0), 0.5, 1e-7);
    EXPECT_NEAR(c.m.get(0, 0), 4, 1e-6);
    c.w_in.set(0, 0, 20);  // reads a[0] = 3
    c.forward(device);
    EXPECT_NEAR(c.m.get(0, 0), 3, 1e-6);
    c.w_in.set(0, 0, 0);
    c.w_in.set(0, 3, -40);  // reads p[1] = 2
    c.forward(device);
    EXPECT_NEAR(c.m.get(0, 0), 5, 1e-6);
  }
}

TEST(Gates, FastCodeMatchesReference) {
  for (const auto& [device, dtype] : fast_backends())
    for (const int64_t rows : {1, 3, 100, 257, 2200})
      for (const int64_t d : {1, 8, 48, 200, 513, 520, 1032, 1096, 2056, 1025})
        for (const int64_t pad : {0, 3, 8}) {
          if (rows * d > 60'000 || (d > 1000 && rows > 3)) continue;
          SCOPED_TRACE(fmt::format("{} rows {} d {} pad {}", dtype_name(dtype), rows, d, pad));
          Case c(dtype, rows, d, pad);
          c.da.fill(9), c.dp.fill(9), c.df.fill(9);  // overwritten
          c.dw_in.randomise(4, "dw_in"), c.dw_a.randomise(4, "dw_a"),
              c.dw_p.randomise(4, "dw_p");  // added to
          Case ref = c.in_f64();
          c.run(device), ref.run();
          for (Matrix Case::*x : {&Case::g, &Case::s_a, &Case::s_p, &Case::t_a, &Case::t_p, &Case::dw_in,
                                  &Case::dw_a, &Case::dw_p})
            SPS_EXPECT_CLOSE(c.*x, ref.*x, tolerance(DType::f32));
          for (Matrix Case::*x : {&Case::m, &Case::out_a, &Case::out_p, &Case::df, &Case::da, &Case::dp})
            SPS_EXPECT_CLOSE(c.*x, ref.*x, tolerance(dtype));
        }
}

// The state output of the last layer is dead: without it all else is the same as with a zero gradient for the
// state, and nothing of its gate is touched.
TEST(Gates, StateOutputMayBeAbsent) {
  for (const auto& [device, dtype] : all_backends())
    for (const int64_t d : {21, 24}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)));
      Case with(dtype, 19, d), without(dtype, 19, d);
      with.d_out_a.fill(0);
      with.run(device);
      for (Matrix Case::*x : {&Case::s_a, &Case::out_a, &Case::t_a, &Case::dw_a}) (without.*x).fill(9);
      without.run(device, false);
      for (Matrix Case::*x :
           {&Case::m, &Case::out_p, &Case::df, &Case::da, &Case::dp, &Case::dw_in, &Case::dw_p})
        EXPECT_EQ(relative_error(without.*x, with.*x), 0);
      for (Matrix Case::*x : {&Case::s_a, &Case::out_a, &Case::t_a, &Case::dw_a})
        EXPECT_EQ((without.*x).get(0, 0), 9);
    }
}

TEST(Gates, ExtremeGatesSaturateWithoutNan) {
  for (const auto& [device, dtype] : all_backends())
    for (const double sign : {-1.0, 1.0}) {
      Case c(dtype, 2, 20);
      c.a.fill(1), c.p.fill(2), c.dm.fill(1), c.f.fill(3), c.d_out_a.fill(1), c.d_out_p.fill(1);
      c.w_in.fill(0), c.w_a.fill(0), c.w_p.fill(0);
      c.w_in.set(0, 4, sign * 1e4);
      c.w_a.set(0, 19, sign * 1e4), c.w_p.set(0, 0, -sign * 1e4);
      c.run(device);
      for (int64_t col = 0; col < 20; ++col) {
        EXPECT_NEAR(c.m.get(1, col), sign > 0 ? 1 : 2, 1e-30);
        EXPECT_NEAR(c.da.get(1, col), sign > 0 ? 1 : 0, 1e-30);
        EXPECT_NEAR(c.dp.get(1, col), sign > 0 ? 0 : 1, 1e-30);
        EXPECT_NEAR(c.out_a.get(1, col), sign > 0 ? 3 : 0, 1e-30);
        EXPECT_NEAR(c.out_p.get(1, col), sign > 0 ? 0 : 3, 1e-30);
        EXPECT_NEAR(c.df.get(1, col), 1, 1e-30);
        EXPECT_NEAR(c.dw_in.get(0, col), 0, 1e-30);
        EXPECT_NEAR(c.dw_p.get(0, col), 0, 1e-30);
      }
    }
}

TEST(Gates, SameBitsForAnyNumberOfThreads) {
  const int threads = thread_count();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case one(dtype, 1000, 200), two(dtype, 1000, 200);
    set_thread_count(1);
    one.run();
    set_thread_count(2);
    two.run();
    EXPECT_TRUE(one.all_bits() == two.all_bits());
  }
  set_thread_count(threads);
}

TEST(Gates, SameBitsEveryTime) {
  for (const Device device : test_devices()) {
    const auto run = [&] {
      Case c(DType::bf16, 1000, 64);
      c.run(device);
      return c.all_bits();
    };
    const std::string once = run();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(run() == once);
  }
}

TEST(Gates, NoRowsAddNothing) {
  for (const Device device : test_devices()) {
    Case c(DType::f32, 0, 8);
    c.dw_in.fill(5), c.dw_p.fill(5);
    c.run(device);
    for (int64_t col = 0; col < 8; ++col) {
      EXPECT_EQ(c.dw_in.get(0, col), 5);
      EXPECT_EQ(c.dw_p.get(0, col), 5);
    }
  }
}

TEST(GatesDeathTest, WrongShapesAbort) {
  Case c(DType::f32, 3, 8);
  const Matrix half(DType::f32, 1, 8), other(DType::bf16, 3, 8);
  const GateRows gates{c.g, c.s_a, c.s_p};
  EXPECT_DEATH(pool_forward(ex, c.a, c.p, {half, c.w_a, c.w_p}, gates, c.m), "internal error");
  EXPECT_DEATH(pool_forward(ex, c.a, other, {c.w_in, c.w_a, c.w_p}, gates, c.m), "internal error");
  EXPECT_DEATH(pool_forward(ex, c.a, c.p, {c.w_in, c.w_a, c.w_p}, {c.g, {}, c.s_p}, c.m), "internal error");
}

}  // namespace
}  // namespace sps::ops
