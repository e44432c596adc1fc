#include "ops/swiglu_linear/swiglu_linear.h"

#include <cstring>

#include "base/error.h"
#include "base/threads.h"
#include "ops/check.h"
#include "ops/linear/linear.h"
#include "ops/swiglu/swiglu.h"

namespace sps::ops {
namespace {

struct Case {
  Matrix x, w_in, gate_up, h, dy, w_out, dh, d_gate_up;
  Case(DType dtype, int64_t rows, int64_t width, int64_t in, int64_t out, int64_t pad = 0)
      : x(dtype, rows, in, in + pad),
        w_in(dtype, 2 * width, in),
        gate_up(dtype, rows, 2 * width, 2 * width + pad),
        h(dtype, rows, width, width + 3 * pad),
        dy(dtype, rows, out, out + pad),
        w_out(dtype, out, width),
        dh(dtype, rows, width, width + pad),
        d_gate_up(dtype, rows, 2 * width, 2 * width + 2 * pad) {
    x.randomise(1, "x");
    w_in.randomise(2, "w_in");
    dy.randomise(3, "dy");
    w_out.randomise(4, "w_out");
  }
  void one_after_the_other(Device device = Device::cpu) {
    OnDevice on(device);
    linear_forward(on.exec(), on(x), on(w_in), on(gate_up));
    swiglu_forward(on.exec(), on(gate_up), on(h));
    linear_backward_input(on.exec(), on(dy), on(w_out), on(dh));
    swiglu_backward(on.exec(), on(gate_up), on(dh), on(d_gate_up));
  }
  void together(Device device = Device::cpu) { together(device, d_gate_up); }
  void together_in_place(Device device) { together(device, gate_up); }

 private:
  void together(Device device, const Matrix& gradient) {
    OnDevice on(device);
    swiglu_linear_forward(on.exec(), on(x), on(w_in), on(gate_up), on(h));
    swiglu_linear_backward(on.exec(), on(dy), on(w_out), on(gate_up), on(dh), on(gradient));
  }
};

void expect_same(const Matrix& a, const Matrix& b, const char* what) {
  EXPECT_EQ(relative_error(a, b), 0) << what;
}

std::vector<std::pair<Device, DType>> devices_and_types() {
  std::vector<std::pair<Device, DType>> all{{Device::cpu, DType::f64}};
  for (const Device device : test_devices())
    for (const DType dtype : {DType::f32, DType::bf16}) all.emplace_back(device, dtype);
  return all;
}

TEST(SwigluLinear, SameBitsAsTheTwoOperations) {
  for (const auto& [device, dtype] : devices_and_types())
    for (const int64_t rows : {1, 31, 32, 33, 100, 300})
      for (const int64_t width : {1, 32, 48, 96, 160})
        for (const int64_t pad : {0, 7}) {
          SCOPED_TRACE(fmt::format("{} rows {} width {} pad {}", dtype_name(dtype), rows, width, pad));
          for (const auto& [in, out] : {std::pair<int64_t, int64_t>{64, 64}, {40, 24}, {1, 200}}) {
            Case a(dtype, rows, width, in, out, pad), b(dtype, rows, width, in, out, pad);
            a.one_after_the_other(device);
            b.together(device);
            expect_same(a.gate_up, b.gate_up, "gate_up");
            expect_same(a.h, b.h, "h");
            expect_same(a.d_gate_up, b.d_gate_up, "d_gate_up");
          }
        }
}

TEST(SwigluLinear, GradientMayOverwriteItsInput) {
  for (const auto& [device, dtype] : devices_and_types()) {
    Case a(dtype, 70, 64, 32, 64, 5), b(dtype, 70, 64, 32, 64, 5);
    a.together(device);
    b.together_in_place(device);
    expect_same(a.d_gate_up, b.gate_up, dtype_name(dtype).data());
  }
}

// In the memory of dh, and with d_gate_up over gate_up: as the models ask for it.
TEST(SwigluLinear, BackwardMakesTheForwardValueAgain) {
  for (const auto& [device, dtype] : devices_and_types())
    for (const int64_t width : {48, 64}) {
      Case a(dtype, 70, width, 32, 64, 5), b(dtype, 70, width, 32, 64, 5);
      a.together(device);
      b.together(device);
      {
        OnDevice on(device);
        swiglu_linear_backward(on.exec(), on(b.dy), on(b.w_out), on(b.gate_up), on(b.dh), on(b.gate_up),
                               on(b.dh));
      }
      expect_same(b.dh, a.h, "h");
      expect_same(b.gate_up, a.d_gate_up, "d_gate_up");
    }
}

TEST(SwigluLinear, SameBitsWithAnyNumberOfThreads) {
  const int threads = thread_count();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case a(dtype, 700, 96, 64, 64), b(dtype, 700, 96, 64, 64);
    set_thread_count(1);
    a.together();
    set_thread_count(3);
    b.together();
    expect_same(a.h, b.h, "h");
    expect_same(a.d_gate_up, b.d_gate_up, "d_gate_up");
  }
  set_thread_count(threads);
}

}  // namespace
}  // namespace sps::ops
