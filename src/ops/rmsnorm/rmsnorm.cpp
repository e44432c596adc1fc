#include "ops/rmsnorm/rmsnorm.h"

#include "ops/rmsnorm/rmsnorm_kernels.h"
#include "ops/rowwise.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

void check_pick(const Exec& ex, std::span<const int32_t> pick, int64_t picked, int64_t rows) {
  if (pick.empty()) return;
  SPS_CHECK(int64_t(pick.size()) == picked && picked <= rows);
  if (ex.device == Device::cuda) return;  // the numbers stand in the GPU's memory
  int32_t above = -1;
  for (const int32_t row : pick) {
    SPS_CHECK(row > above && row < rows);
    above = row;
  }
}

}  // namespace

void rmsnorm_forward(const Exec& ex, Tensor x, Tensor delta, Tensor gain, float eps, Tensor s, Tensor y,
                     Tensor rstd, std::span<const int32_t> pick) {
  const DType wide = y.dtype == DType::f64 ? DType::f64 : DType::f32;
  const int64_t rows = s.rows, d = x.cols;
  SPS_CHECK(is_act(y.dtype) || (y.dtype == DType::f64 && ex.device == Device::cpu));
  SPS_CHECK(x.dtype == wide && gain.dtype == wide && s.dtype == wide && rstd.dtype == wide);
  SPS_CHECK(is_shape(gain, 1, d) && is_shape(s, rows, d) && is_shape(y, rows, d) && is_shape(rstd, rows, 1));
  if (rows == 0 || d == 0) return;
  const bool gathers = !pick.empty();
  if (delta) {
    SPS_CHECK(delta.dtype == y.dtype && delta.cols == d && (x.rows == 1 || delta.rows == x.rows));
    check_pick(ex, pick, rows, delta.rows);
    SPS_CHECK(gathers || delta.rows == rows);
  } else {
    check_pick(ex, pick, rows, x.rows == 1 ? INT32_MAX : x.rows);
  }
  SPS_CHECK(x.rows == 1 || gathers || x.rows == rows);
  SPS_CHECK(s.data != x.data || (!gathers && x.rows == rows && (rows == 1 || x.stride == s.stride)));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return rmsnorm_forward_cuda(ex, x, delta, gain, eps, s, y, rstd, pick);
  if (wide == DType::f64) {
    rmsnorm_forward_ref(x, delta, gain, double(eps), s, y, rstd, pick);
  } else {
    rmsnorm_forward_cpu(x, delta, gain, eps, s, y, rstd, pick);
  }
}

void rmsnorm_backward(const Exec& ex, Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds,
                      Tensor ds_act, Tensor dgain, std::span<const int32_t> pick) {
  const DType wide = dy.dtype == DType::f64 ? DType::f64 : DType::f32;
  const int64_t rows = dy.rows, d = dy.cols;
  SPS_CHECK(is_act(dy.dtype) || (dy.dtype == DType::f64 && ex.device == Device::cpu));
  SPS_CHECK(s.dtype == wide && gain.dtype == wide && rstd.dtype == wide && ds.dtype == wide &&
            dgain.dtype == wide);
  SPS_CHECK(is_shape(s, rows, d) && is_shape(gain, 1, d) && is_shape(rstd, rows, 1) && is_shape(dgain, 1, d));
  // No rows of dy for some rows of ds: a gather that picked none.
  const bool gathers = !pick.empty() || (rows == 0 && ds.rows > 0);
  SPS_CHECK(ds.cols == d && (gathers || ds.rows == rows));
  check_pick(ex, pick, rows, ds.rows);
  if (dres) SPS_CHECK(!gathers && dres.dtype == wide && is_shape(dres, rows, d));
  if (ds_act) SPS_CHECK(ds_act.dtype == dy.dtype && is_shape(ds_act, ds.rows, d));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda)
      return rmsnorm_backward_cuda(ex, dy, s, gain, rstd, dres, ds, ds_act, dgain, pick);
  if (wide == DType::f64) {
    rmsnorm_backward_ref(dy, s, gain, rstd, dres, ds, ds_act, dgain, pick);
  } else {
    rmsnorm_backward_cpu(dy, s, gain, rstd, dres, ds, ds_act, dgain, pick);
  }
}

}  // namespace sps::ops
