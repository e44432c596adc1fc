#include "ops/linear_rmsnorm/linear_rmsnorm.h"

#include "base/error.h"
#include "base/threads.h"
#include "ops/check.h"
#include "ops/linear/linear.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace sps::ops {
namespace {

constexpr float kEps = 1e-5F;

// What aliases, and which optional tensors are there.
struct Form {
  bool in_place, dres, copy;
};

struct Case {
  Form form;
  Matrix x, w_in, residual, gain, delta, s, y, rstd;  // forward
  Matrix dy, w_out, dn, dres, ds, ds_act, dgain;      // backward
  Case(DType act, int64_t rows, int64_t d, int64_t in, int64_t out, int64_t pad, Form f)
      : form(f),
        x(act, rows, in, in + pad),
        w_in(act, d, in),
        residual(wide(act), rows, d, d + pad),
        gain(wide(act), 1, d),
        delta(act, rows, d, d + pad),
        s(wide(act), rows, d, d + 2 * pad),
        y(act, rows, d, d + 3 * pad),
        rstd(wide(act), rows, 1),
        dy(act, rows, out, out + pad),
        w_out(act, out, d),
        dn(act, rows, d),
        dres(wide(act), rows, d, d + pad),
        ds(wide(act), rows, d, d + 2 * pad),
        ds_act(act, rows, d, d + pad),
        dgain(wide(act), 1, d) {
    uint64_t seed = 0;
    for (Matrix* m : {&x, &w_in, &residual, &gain, &dy, &w_out, &dres, &dgain}) m->randomise(++seed, "case");
    ds.fill(0), ds_act.fill(0);
  }
  static DType wide(DType act) { return act == DType::f64 ? act : DType::f32; }
  const Matrix& sum() const { return form.in_place ? residual : s; }
  const Matrix& gradient() const { return form.in_place && form.dres ? dres : ds; }
  void one_after_the_other(Device device = Device::cpu) {
    OnDevice on(device);
    linear_forward(on.exec(), on(x), on(w_in), on(delta));
    rmsnorm_forward(on.exec(), on(residual), on(delta), on(gain), kEps, on(sum()), on(y), on(rstd));
    linear_backward_input(on.exec(), on(dy), on(w_out), on(dn));
    rmsnorm_backward(on.exec(), on(dn), on(sum()), on(gain), on(rstd), past(on), on(gradient()), copy(on),
                     on(dgain));
  }
  void together(Device device = Device::cpu) {
    OnDevice on(device);
    linear_rmsnorm_forward(on.exec(), on(x), on(w_in), on(residual), on(gain), kEps, on(delta), on(sum()),
                           on(y), on(rstd));
    linear_rmsnorm_backward(on.exec(), on(dy), on(w_out), on(dn), on(sum()), on(gain), on(rstd), past(on),
                            on(gradient()), copy(on), on(dgain));
  }

 private:
  Tensor past(OnDevice& on) const { return form.dres ? on(dres) : Tensor{}; }
  Tensor copy(OnDevice& on) const { return form.copy ? on(ds_act) : Tensor{}; }
};

void expect_same(const Case& a, const Case& b) {
  EXPECT_TRUE(bits(a.sum()) == bits(b.sum())) << "s";
  EXPECT_TRUE(bits(a.y) == bits(b.y)) << "y";
  EXPECT_TRUE(bits(a.rstd) == bits(b.rstd)) << "rstd";
  EXPECT_TRUE(bits(a.gradient()) == bits(b.gradient())) << "ds";
  EXPECT_TRUE(bits(a.ds_act) == bits(b.ds_act)) << "ds_act";
  EXPECT_TRUE(bits(a.dgain) == bits(b.dgain)) << "dgain";
}

constexpr Form kForms[] = {{false, true, true},
                           {true, true, true},
                           {false, false, true},
                           {true, true, false},
                           {false, false, false}};

void expect_same_as_two(DType act, int64_t rows, int64_t d, int64_t in, int64_t out, int64_t pad, Form f) {
  SCOPED_TRACE(fmt::format("{} rows {} d {} in {} out {} pad {} form {}{}{}", dtype_name(act), rows, d, in,
                           out, pad, f.in_place, f.dres, f.copy));
  for (const Device device : act == DType::f64 ? std::vector{Device::cpu} : test_devices()) {
    SCOPED_TRACE((Backend{device, act}.name()));
    Case a(act, rows, d, in, out, pad, f), b(act, rows, d, in, out, pad, f);
    a.one_after_the_other(device);
    b.together(device);
    expect_same(a, b);
  }
}

TEST(LinearRmsnorm, SameBitsAsTheTwoOperations) {
  size_t form = 0;
  for (const DType act : {DType::f64, DType::f32, DType::bf16})
    for (const int64_t rows : {1, 31, 32, 33, 100, 300})
      for (const int64_t d : {1, 32, 48, 96, 160})
        for (const int64_t pad : {0, 7})
          for (const auto& [in, out] : {std::pair<int64_t, int64_t>{64, 64}, {40, 24}, {1, 200}})
            expect_same_as_two(act, rows, d, in, out, pad, kForms[form++ % std::size(kForms)]);
}

// Chunks of the gain's gradient (85 rows of width 768) end within 32 rows; panels too large to stay in cache.
TEST(LinearRmsnorm, SameBitsForWideAndManyRows) {
  for (const Form form : kForms) {
    expect_same_as_two(DType::bf16, 700, 768, 64, 96, 0, form);
    expect_same_as_two(DType::bf16, 2500, 768, 32, 32, 0, form);
    expect_same_as_two(DType::bf16, 2500, 64, 96, 64, 5, form);
    expect_same_as_two(DType::bf16, 60, 4096, 32, 64, 0, form);
    expect_same_as_two(DType::bf16, 70, 512, 1024, 4100, 0, form);
  }
}

TEST(LinearRmsnorm, OneRowForAllAsResidual) {
  for (const DType act : {DType::f64, DType::f32, DType::bf16}) {
    Case a(act, 70, 64, 32, 64, 0, {}), b(act, 70, 64, 32, 64, 0, {});
    for (Case* c : {&a, &b}) {
      c->residual = Matrix(Case::wide(act), 1, 64);
      c->residual.randomise(9, "row");
    }
    a.one_after_the_other();
    b.together();
    expect_same(a, b);
  }
}

TEST(LinearRmsnorm, SameBitsWithAnyNumberOfThreads) {
  const int threads = thread_count();
  for (const DType act : {DType::f32, DType::bf16})
    for (const int64_t d : {96, 768}) {
      Case a(act, 1100, d, 64, 64, 0, kForms[0]), b(act, 1100, d, 64, 64, 0, kForms[0]);
      set_thread_count(1);
      a.together();
      set_thread_count(3);
      b.together();
      expect_same(a, b);
    }
  set_thread_count(threads);
}

}  // namespace
}  // namespace sps::ops
