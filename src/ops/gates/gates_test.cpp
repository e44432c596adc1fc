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

struct Pool {
  Matrix a, p, w_in, dm, g, m, da, dp, dw_in;
  Pool(DType dtype, int64_t rows, int64_t d, int64_t pad = 0)
      : a(dtype, rows, d, d + pad),
        p(dtype, rows, d, d + 2 * pad),
        w_in(wide_of(dtype), 1, 2 * d),
        dm(dtype, rows, d, d + pad),
        g(wide_of(dtype), rows, 1, 1 + pad),
        m(dtype, rows, d, d + 3 * pad),
        da(dtype, rows, d, d + pad),
        dp(dtype, rows, d, d + 2 * pad),
        dw_in(wide_of(dtype), 1, 2 * d) {
    a.randomise(1, "a"), p.randomise(1, "p"), dm.randomise(1, "dm");
    w_in.randomise(1, "w_in", 1 / std::sqrt(double(d)));
  }
  Pool in_f64() const {
    Pool q(DType::f64, a->rows, a->cols);
    q.a = a.to(DType::f64), q.p = p.to(DType::f64), q.dm = dm.to(DType::f64), q.w_in = w_in.to(DType::f64);
    q.da = da.to(DType::f64), q.dp = dp.to(DType::f64), q.dw_in = dw_in.to(DType::f64);
    return q;
  }
  void forward(Device device = Device::cpu) {
    OnDevice on(device);
    pool_forward(on.exec(), on(a), on(p), on(w_in), on(g), on(m));
  }
  void run(Device device = Device::cpu) {
    forward(device);
    OnDevice on(device);
    pool_backward(on.exec(), on(dm), on(a), on(p), on(w_in), on(g), on(da), on(dp), on(dw_in));
  }
};

struct Scatter {
  Matrix a, p, f, w_a, w_p, d_out_a, d_out_p, s_a, s_p, out_a, out_p, df, da, dp, dw_a, dw_p;
  Scatter(DType dtype, int64_t rows, int64_t d, int64_t pad = 0)
      : a(dtype, rows, d, d + pad),
        p(dtype, rows, d, d + 2 * pad),
        f(dtype, rows, d, d + pad),
        w_a(wide_of(dtype), 1, d),
        w_p(wide_of(dtype), 1, d),
        d_out_a(dtype, rows, d, d + pad),
        d_out_p(dtype, rows, d, d + 3 * pad),
        s_a(wide_of(dtype), rows, 1, 1 + pad),
        s_p(wide_of(dtype), rows, 1),
        out_a(dtype, rows, d, d + 2 * pad),
        out_p(dtype, rows, d),
        df(dtype, rows, d, d + pad),
        da(dtype, rows, d, d + 2 * pad),
        dp(dtype, rows, d, d + pad),
        dw_a(wide_of(dtype), 1, d),
        dw_p(wide_of(dtype), 1, d) {
    a.randomise(2, "a"), p.randomise(2, "p"), f.randomise(2, "f");
    w_a.randomise(2, "w_a", 1 / std::sqrt(double(d))), w_p.randomise(2, "w_p", 1 / std::sqrt(double(d)));
    d_out_a.randomise(2, "d_out_a"), d_out_p.randomise(2, "d_out_p");
  }
  Scatter in_f64() const {
    Scatter q(DType::f64, f->rows, f->cols);
    q.a = a.to(DType::f64), q.p = p.to(DType::f64), q.f = f.to(DType::f64);
    q.w_a = w_a.to(DType::f64), q.w_p = w_p.to(DType::f64);
    q.d_out_a = d_out_a.to(DType::f64), q.d_out_p = d_out_p.to(DType::f64);
    q.dw_a = dw_a.to(DType::f64), q.dw_p = dw_p.to(DType::f64);
    return q;
  }
  void forward(Device device = Device::cpu) {
    OnDevice on(device);
    scatter_forward(on.exec(), on(a), on(p), on(f), on(w_a), on(w_p), on(s_a), on(s_p), on(out_a), on(out_p));
  }
  void run(Device device = Device::cpu) {
    forward(device);
    OnDevice on(device);
    scatter_backward(on.exec(), on(d_out_a), on(d_out_p), on(a), on(p), on(f), on(w_a), on(w_p), on(s_a),
                     on(s_p), on(df), on(da), on(dp), on(dw_a), on(dw_p));
  }
  void run_without_a(Device device) {
    OnDevice on(device);
    scatter_forward(on.exec(), {}, on(p), on(f), {}, on(w_p), {}, on(s_p), {}, on(out_p));
    scatter_backward(on.exec(), {}, on(d_out_p), {}, on(p), on(f), {}, on(w_p), {}, on(s_p), on(df), on(da),
                     on(dp), {}, on(dw_p));
  }
};

TEST(Pool, ReferenceGradientsMatchCentralDifferences) {
  Pool c(DType::f64, 4, 7);
  c.run();
  const auto loss = [&] {
    c.forward();
    return weighted_sum(c.m, c.dm);
  };
  expect_gradient(loss, c.a, c.da, "a");
  expect_gradient(loss, c.p, c.dp, "p");
  expect_gradient(loss, c.w_in, c.dw_in, "w_in");
}

TEST(Scatter, ReferenceGradientsMatchCentralDifferences) {
  Scatter c(DType::f64, 4, 7);
  c.run();
  const auto loss = [&] {
    c.forward();
    return weighted_sum(c.out_a, c.d_out_a) + weighted_sum(c.out_p, c.d_out_p);
  };
  expect_gradient(loss, c.f, c.df, "f");
  expect_gradient(loss, c.a, c.da, "a");
  expect_gradient(loss, c.p, c.dp, "p");
  expect_gradient(loss, c.w_a, c.dw_a, "w_a");
  expect_gradient(loss, c.w_p, c.dw_p, "w_p");
}

// The gate weighs the state row, 1 - gate the prediction row, and the state half of w_in comes first.
TEST(Pool, GateOpensTowardsTheState) {
  for (const auto& [device, dtype] : all_backends()) {
    Pool c(dtype, 1, 2);
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
          Pool pool(dtype, rows, d, pad);
          pool.da.randomise(3, "da"), pool.dp.randomise(3, "dp"),
              pool.dw_in.randomise(3, "dw_in");  // added to
          Pool pool_ref = pool.in_f64();
          pool.run(device), pool_ref.run();
          SPS_EXPECT_CLOSE(pool.g, pool_ref.g, tolerance(DType::f32));
          SPS_EXPECT_CLOSE(pool.m, pool_ref.m, tolerance(dtype));
          SPS_EXPECT_CLOSE(pool.da, pool_ref.da, tolerance(dtype));
          SPS_EXPECT_CLOSE(pool.dp, pool_ref.dp, tolerance(dtype));
          SPS_EXPECT_CLOSE(pool.dw_in, pool_ref.dw_in, tolerance(DType::f32));

          Scatter scatter(dtype, rows, d, pad);
          scatter.da.fill(9), scatter.dp.fill(9), scatter.df.fill(9);  // overwritten
          scatter.dw_a.randomise(4, "dw_a"), scatter.dw_p.randomise(4, "dw_p");
          Scatter scatter_ref = scatter.in_f64();
          scatter.run(device), scatter_ref.run();
          SPS_EXPECT_CLOSE(scatter.s_a, scatter_ref.s_a, tolerance(DType::f32));
          SPS_EXPECT_CLOSE(scatter.s_p, scatter_ref.s_p, tolerance(DType::f32));
          SPS_EXPECT_CLOSE(scatter.out_a, scatter_ref.out_a, tolerance(dtype));
          SPS_EXPECT_CLOSE(scatter.out_p, scatter_ref.out_p, tolerance(dtype));
          SPS_EXPECT_CLOSE(scatter.df, scatter_ref.df, tolerance(dtype));
          SPS_EXPECT_CLOSE(scatter.da, scatter_ref.da, tolerance(dtype));
          SPS_EXPECT_CLOSE(scatter.dp, scatter_ref.dp, tolerance(dtype));
          SPS_EXPECT_CLOSE(scatter.dw_a, scatter_ref.dw_a, tolerance(DType::f32));
          SPS_EXPECT_CLOSE(scatter.dw_p, scatter_ref.dw_p, tolerance(DType::f32));
        }
}

// The state output of the last layer is dead: without it the prediction's half is the same as with a zero
// gradient for the state, the state's gradient is zero, and its weights are not touched.
TEST(Scatter, StateOutputMayBeAbsent) {
  for (const auto& [device, dtype] : all_backends())
    for (const int64_t d : {21, 24}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)));
      Scatter with(dtype, 19, d), without(dtype, 19, d);
      with.d_out_a.fill(0);
      with.run(device);
      without.da.fill(9);
      without.run_without_a(device);
      EXPECT_EQ(relative_error(without.out_p, with.out_p), 0);
      EXPECT_EQ(relative_error(without.df, with.df), 0);
      EXPECT_EQ(relative_error(without.dp, with.dp), 0);
      EXPECT_EQ(relative_error(without.dw_p, with.dw_p), 0);
      EXPECT_EQ(relative_error(without.da, Matrix(dtype, 19, d)), 0);
    }
}

TEST(Gates, ExtremeGatesSaturateWithoutNan) {
  for (const auto& [device, dtype] : all_backends())
    for (const double sign : {-1.0, 1.0}) {
      Pool pool(dtype, 2, 20);
      pool.a.fill(1), pool.p.fill(2), pool.dm.fill(1);
      pool.w_in.fill(0);
      pool.w_in.set(0, 4, sign * 1e4);
      pool.run(device);
      Scatter scatter(dtype, 2, 20);
      scatter.a.fill(1), scatter.p.fill(1), scatter.f.fill(3), scatter.d_out_a.fill(1),
          scatter.d_out_p.fill(1);
      scatter.w_a.fill(0), scatter.w_p.fill(0);
      scatter.w_a.set(0, 19, sign * 1e4), scatter.w_p.set(0, 0, -sign * 1e4);
      scatter.run(device);
      for (int64_t c = 0; c < 20; ++c) {
        EXPECT_NEAR(pool.m.get(1, c), sign > 0 ? 1 : 2, 1e-30);
        EXPECT_NEAR(pool.da.get(1, c), sign > 0 ? 1 : 0, 1e-30);
        EXPECT_NEAR(pool.dp.get(1, c), sign > 0 ? 0 : 1, 1e-30);
        EXPECT_NEAR(scatter.out_a.get(1, c), sign > 0 ? 3 : 0, 1e-30);
        EXPECT_NEAR(scatter.out_p.get(1, c), sign > 0 ? 0 : 3, 1e-30);
        EXPECT_NEAR(scatter.df.get(1, c), 1, 1e-30);
        EXPECT_NEAR(scatter.da.get(1, c), 0, 1e-30);
        EXPECT_NEAR(pool.dw_in.get(0, c), 0, 1e-30);
        EXPECT_NEAR(scatter.dw_p.get(0, c), 0, 1e-30);
      }
    }
}

TEST(Gates, SameBitsForAnyNumberOfThreads) {
  const int threads = thread_count();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Pool pool1(dtype, 1000, 200), pool2(dtype, 1000, 200);
    Scatter scatter1(dtype, 1000, 200), scatter2(dtype, 1000, 200);
    set_thread_count(1);
    pool1.run(), scatter1.run();
    set_thread_count(2);
    pool2.run(), scatter2.run();
    EXPECT_EQ(relative_error(pool1.m, pool2.m), 0);
    EXPECT_EQ(relative_error(pool1.da, pool2.da), 0);
    EXPECT_EQ(relative_error(pool1.dw_in, pool2.dw_in), 0);
    EXPECT_EQ(relative_error(scatter1.df, scatter2.df), 0);
    EXPECT_EQ(relative_error(scatter1.da, scatter2.da), 0);
    EXPECT_EQ(relative_error(scatter1.dw_a, scatter2.dw_a), 0);
    EXPECT_EQ(relative_error(scatter1.dw_p, scatter2.dw_p), 0);
  }
  set_thread_count(threads);
}

TEST(Gates, SameBitsEveryTime) {
  for (const Device device : test_devices()) {
    const auto run = [&] {
      Pool pool(DType::bf16, 1000, 64);
      Scatter scatter(DType::bf16, 1000, 64);
      pool.run(device), scatter.run(device);
      return bits(pool.m) + bits(pool.da) + bits(pool.dw_in) + bits(scatter.df) + bits(scatter.dw_a) +
             bits(scatter.dw_p);
    };
    const std::string once = run();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(run() == once);
  }
}

TEST(Gates, NoRowsAddNothing) {
  for (const Device device : test_devices()) {
    Pool pool(DType::f32, 0, 8);
    Scatter scatter(DType::f32, 0, 8);
    pool.dw_in.fill(5), scatter.dw_p.fill(5);
    pool.run(device), scatter.run(device);
    for (int64_t c = 0; c < 8; ++c) {
      EXPECT_EQ(pool.dw_in.get(0, c), 5);
      EXPECT_EQ(scatter.dw_p.get(0, c), 5);
    }
  }
}

TEST(GatesDeathTest, WrongShapesAbort) {
  Pool c(DType::f32, 3, 8);
  Matrix half(DType::f32, 1, 8);
  EXPECT_DEATH(pool_forward(ex, c.a, c.p, half, c.g, c.m), "internal error");
  EXPECT_DEATH(pool_forward(ex, c.a, Matrix(DType::bf16, 3, 8), c.w_in, c.g, c.m), "internal error");
}

}  // namespace
}  // namespace sps::ops
