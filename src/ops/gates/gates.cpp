#include "ops/gates/gates.h"

#include "ops/gates/gates_kernels.h"
#include "ops/rowwise.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

struct Types {
  DType act, wide;
};

Types types_of(const Exec& ex, const Tensor& rows) {
  SPS_CHECK(is_act(rows.dtype) || (rows.dtype == DType::f64 && ex.device == Device::cpu));
  return {rows.dtype, rows.dtype == DType::f64 ? DType::f64 : DType::f32};
}

bool is(const Tensor& t, DType dtype, int64_t rows, int64_t cols) {
  return t.dtype == dtype && is_shape(t, rows, cols);
}

// Of both output gates, or of the prediction's alone.
bool are(const GateWeights& w, DType wide, int64_t d) {
  return is(w.in, wide, 1, 2 * d) && is(w.p, wide, 1, d) && (!w.a || is(w.a, wide, 1, d));
}
bool are(const GateRows& g, DType wide, int64_t rows) {
  return is(g.p, wide, rows, 1) && (!g.a || is(g.a, wide, rows, 1));
}

}  // namespace

void pool_forward(const Exec& ex, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates, Tensor m) {
  const auto [act, wide] = types_of(ex, a);
  const int64_t rows = a.rows, d = a.cols;
  SPS_CHECK(is(p, act, rows, d) && is(m, act, rows, d) && are(w, wide, d));
  SPS_CHECK(is(gates.in, wide, rows, 1) && are(gates, wide, rows));
  SPS_CHECK(rows == 0 || !w.a == !gates.a);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return pool_forward_cuda(ex, a, p, w, gates, m);
  (wide == DType::f64 ? pool_forward_ref : pool_forward_cpu)(a, p, w, gates, m);
}

void pool_backward(const Exec& ex, Tensor dm, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates,
                   const GateRows& t, Tensor da, Tensor dp, const GateWeights& dw) {
  const auto [act, wide] = types_of(ex, a);
  const int64_t rows = a.rows, d = a.cols;
  SPS_CHECK(is(dm, act, rows, d) && is(p, act, rows, d) && is(da, act, rows, d) && is(dp, act, rows, d));
  SPS_CHECK(are(w, wide, d) && are(dw, wide, d) && is(gates.in, wide, rows, 1) && are(t, wide, rows));
  SPS_CHECK(!t.a || (w.a && dw.a));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return pool_backward_cuda(ex, dm, a, p, w, gates, t, da, dp, dw);
  (wide == DType::f64 ? pool_backward_ref : pool_backward_cpu)(dm, a, p, w, gates, t, da, dp, dw);
}

void scatter_forward(const Exec& ex, Tensor f, const GateRows& gates, Tensor out_a, Tensor out_p) {
  const auto [act, wide] = types_of(ex, f);
  const int64_t rows = f.rows, d = f.cols;
  SPS_CHECK(is(out_p, act, rows, d) && are(gates, wide, rows));
  if (out_a) SPS_CHECK(is(out_a, act, rows, d) && gates.a);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return scatter_forward_cuda(ex, f, gates, out_a, out_p);
  (wide == DType::f64 ? scatter_forward_ref : scatter_forward_cpu)(f, gates, out_a, out_p);
}

void scatter_backward(const Exec& ex, Tensor d_out_a, Tensor d_out_p, Tensor f, const GateRows& gates,
                      Tensor df, const GateRows& t) {
  const auto [act, wide] = types_of(ex, f);
  const int64_t rows = f.rows, d = f.cols;
  SPS_CHECK(is(d_out_p, act, rows, d) && is(df, act, rows, d) && are(gates, wide, rows) &&
            are(t, wide, rows));
  if (d_out_a) SPS_CHECK(is(d_out_a, act, rows, d) && gates.a && t.a);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return scatter_backward_cuda(ex, d_out_a, d_out_p, f, gates, df, t);
  (wide == DType::f64 ? scatter_backward_ref : scatter_backward_cpu)(d_out_a, d_out_p, f, gates, df, t);
}

}  // namespace sps::ops
