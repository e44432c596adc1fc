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

}  // namespace

void pool_forward(const Exec& ex, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor m) {
  const auto [act, wide] = types_of(ex, a);
  const int64_t rows = a.rows, d = a.cols;
  SPS_CHECK(is(p, act, rows, d) && is(m, act, rows, d) && is(w_in, wide, 1, 2 * d) && is(g, wide, rows, 1));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return pool_forward_cuda(ex, a, p, w_in, g, m);
  wide == DType::f64 ? pool_forward_ref(a, p, w_in, g, m) : pool_forward_cpu(a, p, w_in, g, m);
}

void pool_backward(const Exec& ex, Tensor dm, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor da, Tensor dp,
                   Tensor dw_in) {
  const auto [act, wide] = types_of(ex, a);
  const int64_t rows = a.rows, d = a.cols;
  SPS_CHECK(is(dm, act, rows, d) && is(p, act, rows, d) && is(da, act, rows, d) && is(dp, act, rows, d));
  SPS_CHECK(is(w_in, wide, 1, 2 * d) && is(dw_in, wide, 1, 2 * d) && is(g, wide, rows, 1));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return pool_backward_cuda(ex, dm, a, p, w_in, g, da, dp, dw_in);
  wide == DType::f64 ? pool_backward_ref(dm, a, p, w_in, g, da, dp, dw_in)
                     : pool_backward_cpu(dm, a, p, w_in, g, da, dp, dw_in);
}

void scatter_forward(const Exec& ex, Tensor a, Tensor p, Tensor f, Tensor w_a, Tensor w_p, Tensor s_a,
                     Tensor s_p, Tensor out_a, Tensor out_p) {
  const auto [act, wide] = types_of(ex, f);
  const int64_t rows = f.rows, d = f.cols;
  SPS_CHECK(is(p, act, rows, d) && is(out_p, act, rows, d) && is(w_p, wide, 1, d) && is(s_p, wide, rows, 1));
  if (out_a)
    SPS_CHECK(is(a, act, rows, d) && is(out_a, act, rows, d) && is(w_a, wide, 1, d) &&
              is(s_a, wide, rows, 1));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return scatter_forward_cuda(ex, a, p, f, w_a, w_p, s_a, s_p, out_a, out_p);
  const auto one = wide == DType::f64 ? scatter_forward_ref : scatter_forward_cpu;
  if (out_a) one(a, f, w_a, s_a, out_a);
  one(p, f, w_p, s_p, out_p);
}

void scatter_backward(const Exec& ex, Tensor d_out_a, Tensor d_out_p, Tensor a, Tensor p, Tensor f,
                      Tensor w_a, Tensor w_p, Tensor s_a, Tensor s_p, Tensor df, Tensor da, Tensor dp,
                      Tensor dw_a, Tensor dw_p) {
  const auto [act, wide] = types_of(ex, f);
  const int64_t rows = f.rows, d = f.cols;
  SPS_CHECK(is(d_out_p, act, rows, d) && is(p, act, rows, d) && is(df, act, rows, d) && is(dp, act, rows, d));
  SPS_CHECK(is(w_p, wide, 1, d) && is(dw_p, wide, 1, d) && is(s_p, wide, rows, 1) && is(da, act, rows, d));
  if (d_out_a) {
    SPS_CHECK(is(d_out_a, act, rows, d) && is(a, act, rows, d));
    SPS_CHECK(is(w_a, wide, 1, d) && is(dw_a, wide, 1, d) && is(s_a, wide, rows, 1));
  }
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda)
      return scatter_backward_cuda(ex, d_out_a, d_out_p, a, p, f, w_a, w_p, s_a, s_p, df, da, dp, dw_a, dw_p);
  const auto backward = wide == DType::f64 ? scatter_backward_ref : scatter_backward_cpu;
  backward(d_out_a, d_out_p, a, p, f, w_a, w_p, s_a, s_p, df, da, dp, dw_a, dw_p);
}

}  // namespace sps::ops
