#include "ops/fold_gain/fold_gain.h"

#include "base/error.h"
#include "base/threads.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

const Exec ex;

struct Case {
  Matrix w, gain, y, dy, dw, dgain;
  Case(DType act, int64_t rows, int64_t cols, int64_t pad = 0) : Case(act, rows, cols, pad, wide_of(act)) {}
  void run(Device device = Device::cpu) {
    OnDevice on(device);
    fold_gain_forward(on.exec(), on(w), on(gain), on(y));
    fold_gain_backward(on.exec(), on(dy), on(w), on(gain), on(dw), on(dgain));
  }
  Case in_f64() const {
    Case c(DType::f64, w->rows, w->cols);
    c.w = w.to(DType::f64), c.gain = gain.to(DType::f64), c.dy = dy.to(DType::f64);
    c.dw = dw.to(DType::f64), c.dgain = dgain.to(DType::f64);
    return c;
  }

 private:
  static DType wide_of(DType act) { return act == DType::f64 ? DType::f64 : DType::f32; }
  Case(DType act, int64_t rows, int64_t cols, int64_t pad, DType wide)
      : w(wide, rows, cols, cols + pad),
        gain(wide, 1, cols),
        y(act, rows, cols, cols + 2 * pad),
        dy(wide, rows, cols, cols + pad),
        dw(wide, rows, cols, cols + 3 * pad),
        dgain(wide, 1, cols) {
    w.randomise(1, "w"), gain.randomise(1, "gain", 0.3, 1), dy.randomise(1, "dy");
    dw.randomise(1, "dw"), dgain.randomise(1, "dgain");  // both are added to
  }
};

TEST(FoldGain, ReferenceGradientsMatchCentralDifferences) {
  Case c(DType::f64, 5, 6);
  c.dw.fill(0), c.dgain.fill(0);
  c.run();
  const auto loss = [&] {
    fold_gain_forward(ex, c.w, c.gain, c.y);
    double sum = 0;
    for (int64_t n = 0; n < 5; ++n)
      for (int64_t k = 0; k < 6; ++k) sum += c.dy.get(n, k) * c.y.get(n, k);
    return sum;
  };
  expect_gradient(loss, c.w, c.dw, "w");
  expect_gradient(loss, c.gain, c.dgain, "gain");
}

TEST(FoldGain, FastCodeMatchesReference) {
  for (const Device device : test_devices())
    for (const DType act : {DType::f32, DType::bf16})
      for (const int64_t rows : {1, 3, 100, 257, 4500})
        for (const int64_t cols : {1, 8, 48, 200, 513})
          for (const int64_t pad : {0, 5, 8}) {
            if (rows * cols > 200'000) continue;
            SCOPED_TRACE(fmt::format("{} {} x {} pad {}", dtype_name(act), rows, cols, pad));
            Case fast(act, rows, cols, pad), ref = fast.in_f64();
            fast.run(device), ref.run();
            SPS_EXPECT_CLOSE(fast.y, ref.y, tolerance(act));
            SPS_EXPECT_CLOSE(fast.dw, ref.dw, tolerance(DType::f32));
            SPS_EXPECT_CLOSE(fast.dgain, ref.dgain, tolerance(DType::f32));
          }
}

TEST(FoldGain, SameBitsEveryTime) {
  for (const Device device : test_devices()) {
    const auto run = [&] {
      Case c(DType::bf16, 1000, 200);
      c.run(device);
      return bits(c.y) + bits(c.dw) + bits(c.dgain);
    };
    const std::string once = run();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(run() == once);
  }
}

TEST(FoldGain, SameBitsForAnyNumberOfThreads) {
  const int threads = thread_count();
  Case one(DType::bf16, 1000, 200), two(DType::bf16, 1000, 200);
  set_thread_count(1);
  one.run();
  set_thread_count(2);
  two.run();
  set_thread_count(threads);
  EXPECT_EQ(relative_error(one.y, two.y), 0);
  EXPECT_EQ(relative_error(one.dw, two.dw), 0);
  EXPECT_EQ(relative_error(one.dgain, two.dgain), 0);
}

TEST(FoldGainDeathTest, WrongShapesAbort) {
  Case c(DType::f32, 3, 8);
  Matrix gain(DType::f32, 1, 7);
  EXPECT_DEATH(fold_gain_forward(ex, c.w, gain, c.y), "internal error");
}

}  // namespace
}  // namespace sps::ops
