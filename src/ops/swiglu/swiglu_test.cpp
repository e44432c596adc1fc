#include "ops/swiglu/swiglu.h"

#include <array>
#include <cstring>

#include "base/error.h"
#include "base/threads.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

const Exec ex;

struct Case {
  Matrix gate_up, dh, h, d_gate_up;
  Case(DType dtype, int64_t rows, int64_t width, int64_t pad = 0)
      : gate_up(dtype, rows, 2 * width, 2 * width + pad),
        dh(dtype, rows, width, width + pad),
        h(dtype, rows, width, width + 2 * pad),
        d_gate_up(dtype, rows, 2 * width, 2 * width + 3 * pad) {
    gate_up.randomise(1, "gate_up", 2);
    dh.randomise(2, "dh");
  }
  void run(Device device = Device::cpu) {
    OnDevice on(device);
    swiglu_forward(on.exec(), on(gate_up), on(h));
    swiglu_backward(on.exec(), on(gate_up), on(dh), on(d_gate_up));
  }
};

TEST(Swiglu, ReferenceGradientMatchesCentralDifferences) {
  Case c(DType::f64, 3, 8);
  c.run();
  const auto loss = [&] {
    swiglu_forward(ex, c.gate_up, c.h);
    double sum = 0;
    for (int64_t r = 0; r < 3; ++r)
      for (int64_t k = 0; k < 8; ++k) sum += c.dh.get(r, k) * c.h.get(r, k);
    return sum;
  };
  expect_gradient(loss, c.gate_up, c.d_gate_up, "gate_up");
}

TEST(Swiglu, ReferenceValue) {
  Matrix gate_up(DType::f64, 1, 2), h(DType::f64, 1, 1);
  gate_up.set(0, 0, 1.5);
  gate_up.set(0, 1, -2);
  swiglu_forward(ex, gate_up, h);
  EXPECT_DOUBLE_EQ(h.get(0, 0), -3 / (1 + std::exp(-1.5)));
}

TEST(Swiglu, FastCodeMatchesReference) {
  for (const Device device : test_devices())
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int64_t rows : {1, 3, 100, 257})
        for (const int64_t width : {1, 8, 48, 200, 513, 2816})
          for (const int64_t pad : {0, 5, 8}) {
            if (rows * width > 200'000) continue;
            SCOPED_TRACE(fmt::format("{} rows {} width {} pad {}", dtype_name(dtype), rows, width, pad));
            Case fast(dtype, rows, width, pad);
            fast.run(device);
            Case ref(DType::f64, rows, width);
            ref.gate_up = fast.gate_up.to(DType::f64);
            ref.dh = fast.dh.to(DType::f64);
            ref.run();
            SPS_EXPECT_CLOSE(fast.h, ref.h, tolerance(dtype));
            SPS_EXPECT_CLOSE(fast.d_gate_up, ref.d_gate_up, tolerance(dtype));
          }
}

// Every element on its own scale: the error of f32 stays within a few roundings even where the gate is far
// negative.
TEST(Swiglu, EachElementIsAccurate) {
  constexpr int64_t n = 1001;
  Matrix gate_up(DType::f32, 1, 2 * n), h(DType::f32, 1, n);
  for (int64_t c = 0; c < n; ++c) {
    gate_up.set(0, c, -80 + 0.16 * double(c));
    gate_up.set(0, n + c, 1);
  }
  for (const Device device : test_devices()) {
    {
      OnDevice on(device);
      swiglu_forward(on.exec(), on(gate_up), on(h));
    }
    for (int64_t c = 0; c < n; ++c) {
      const double z = gate_up.get(0, c), want = z / (1 + std::exp(-z));
      ASSERT_NEAR(h.get(0, c), want, 6e-7 * std::abs(want)) << "gate " << z;
    }
  }
}

TEST(Swiglu, BackwardMayOverwriteItsInput) {
  for (const auto& [device, dtype] : all_backends())
    for (const int64_t width : {75, 72}) {
      Case c(dtype, 37, width, 3 * (width % 8) + 8);
      c.run(device);
      {
        OnDevice on(device);
        swiglu_backward(on.exec(), on(c.gate_up), on(c.dh), on(c.gate_up));
      }
      EXPECT_EQ(relative_error(c.gate_up, c.d_gate_up), 0) << dtype_name(dtype);
    }
}

// Apart, and over the gradient that it was asked with: neither changes d_gate_up.
TEST(Swiglu, BackwardMakesTheForwardValueAgain) {
  for (const auto& [device, dtype] : all_backends())
    for (const int64_t width : {75, 72})
      for (const int64_t pad : {0, 8}) {
        SCOPED_TRACE(fmt::format("{} width {} pad {}", dtype_name(dtype), width, pad));
        Case c(dtype, 37, width, pad);
        c.run(device);
        Matrix apart(dtype, 37, width, width + pad), first(dtype, 37, 2 * width),
            second(dtype, 37, 2 * width);
        {
          OnDevice on(device);
          swiglu_backward(on.exec(), on(c.gate_up), on(c.dh), on(first), on(apart));
          swiglu_backward(on.exec(), on(c.gate_up), on(c.dh), on(second), on(c.dh));
        }
        EXPECT_EQ(relative_error(apart, c.h), 0);
        EXPECT_EQ(relative_error(c.dh, c.h), 0);
        EXPECT_EQ(relative_error(first, c.d_gate_up), 0);
        EXPECT_EQ(relative_error(second, c.d_gate_up), 0);
      }
}

TEST(Swiglu, ColumnsBesideTheViewStayUntouched) {
  constexpr int64_t rows = 4, width = 19, beside = 7;
  for (const Device device : test_devices())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Case c(dtype, rows, width);
      Matrix wide(dtype, rows, 2 * width + beside), h(dtype, rows, width + beside);
      wide.fill(7), h.fill(7);
      {
        OnDevice on(device);
        swiglu_forward(on.exec(), on(c.gate_up), on(h).cols_from(0, width));
        swiglu_backward(on.exec(), on(c.gate_up), on(c.dh), on(wide).cols_from(0, 2 * width));
      }
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t k = 0; k < beside; ++k) {
          EXPECT_EQ(h.get(r, width + k), 7);
          EXPECT_EQ(wide.get(r, 2 * width + k), 7);
        }
    }
}

TEST(Swiglu, ExtremeGatesGiveLimitsNotNan) {
  const std::array<double, 6> gates{-1e4, -100, -87.5, 87.5, 100, 1e4};
  for (const auto& [device, dtype] : all_backends()) {
    Case c(dtype, 1, int64_t(gates.size()));
    for (size_t i = 0; i < gates.size(); ++i) {
      c.gate_up.set(0, int64_t(i), gates[i]);
      c.gate_up.set(0, int64_t(i + gates.size()), 2);
      c.dh.set(0, int64_t(i), 1);
    }
    c.run(device);
    for (size_t i = 0; i < gates.size(); ++i) {
      const double z = c.gate_up.get(0, int64_t(i));
      const bool open = z > 0;
      SCOPED_TRACE(fmt::format("{} gate {}", dtype_name(dtype), z));
      EXPECT_NEAR(c.h.get(0, int64_t(i)), open ? 2 * z : 0, 1e-30);
      EXPECT_NEAR(c.d_gate_up.get(0, int64_t(i)), open ? 2 : 0, 1e-30);
      EXPECT_NEAR(c.d_gate_up.get(0, int64_t(i + gates.size())), open ? z : 0, 1e-30);
    }
  }
}

TEST(Swiglu, NanIsPassedOn) {
  for (const auto& [device, dtype] : all_backends()) {
    Case c(dtype, 1, 20);
    c.gate_up.set(0, 3, NAN);
    c.gate_up.set(0, 20 + 17, NAN);
    c.run(device);
    for (int64_t k = 0; k < 20; ++k) EXPECT_EQ(std::isnan(c.h.get(0, k)), k == 3 || k == 17) << k;
  }
}

TEST(Swiglu, SameBitsForAnyNumberOfThreads) {
  const int threads = thread_count();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case one(dtype, 257, 200), two(dtype, 257, 200);
    set_thread_count(1);
    one.run();
    set_thread_count(2);
    two.run();
    EXPECT_EQ(relative_error(one.h, two.h), 0);
    EXPECT_EQ(relative_error(one.d_gate_up, two.d_gate_up), 0);
  }
  set_thread_count(threads);
}

TEST(Swiglu, NoRowsIsFine) {
  for (const Device device : test_devices()) {
    Case c(DType::f32, 0, 8);
    c.run(device);
  }
}

TEST(SwigluDeathTest, WrongShapesAbort) {
  Case c(DType::f32, 3, 8);
  Matrix short_h(DType::f32, 3, 7), other(DType::bf16, 3, 8);
  EXPECT_DEATH(swiglu_forward(ex, c.gate_up, short_h), "internal error");
  EXPECT_DEATH(swiglu_forward(ex, c.gate_up, other), "internal error");
}

}  // namespace
}  // namespace sps::ops
