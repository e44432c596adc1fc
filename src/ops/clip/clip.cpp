#include "ops/clip/clip.h"

#include <cmath>

#include "ops/clip/clip_kernels.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

void check_number(Tensor t) {
  SPS_CHECK(t.dtype == DType::f32 && t.count() == 1 && t.device == Device::cuda);
}

}  // namespace

double sum_of_squares(const Exec& ex, Tensor x) {
  return sums_of_squares(ex, std::span(&x, 1)).front();
}

std::vector<double> sums_of_squares(const Exec& ex, std::span<const Tensor> xs) {
  for (const Tensor& x : xs)
    SPS_CHECK(x.dtype == DType::f32 || (x.dtype == DType::f64 && ex.device == Device::cpu));
  std::vector<double> sums(xs.size(), 0);
  if (ex.device == Device::cuda) {
    if (xs.empty()) return sums;
    const auto n = int64_t(xs.size());
    const size_t bytes = xs.size() * sizeof(double);
    const Tensor there{device_scratch(ex, DeviceSlot::rows, bytes), 1, n, n, DType::f64, Device::cuda};
    sums_of_squares(ex, xs, there);
    copy_bytes(ex, sums.data(), there.data, bytes);
    synchronize(ex);
    return sums;
  }
  for (size_t i = 0; i < xs.size(); ++i)
    sums[i] = xs[i].dtype == DType::f64 ? sum_of_squares_ref(xs[i]) : sum_of_squares_cpu(xs[i]);
  return sums;
}

double clip_factor(double norm, double limit) {
  return std::isfinite(norm) && limit > 0 && norm > limit ? limit / norm : 1;
}

void sums_of_squares(const Exec& ex, std::span<const Tensor> xs, Tensor sums) {
  SPS_CHECK(ex.device == Device::cuda && sums.device == Device::cuda && sums.dtype == DType::f64);
  SPS_CHECK(sums.rows == 1 && sums.cols == int64_t(xs.size()));
  for (const Tensor& x : xs) SPS_CHECK(x.dtype == DType::f32 && x.device == Device::cuda);
  if constexpr (kCudaBuilt) sums_of_squares_cuda(ex, xs, sums);
}

void flag_not_finite(const Exec& ex, Tensor x, Tensor flag) {
  SPS_CHECK(ex.device == Device::cuda && x.device == Device::cuda && x.dtype == DType::f32 && x.dense());
  check_number(flag);
  if (x.empty()) return;
  if constexpr (kCudaBuilt) flag_not_finite_cuda(ex, x, flag);
}

void clip_factor(const Exec& ex, Tensor sums, Tensor flag, double limit, Tensor factor) {
  SPS_CHECK(ex.device == Device::cuda && sums.device == Device::cuda);
  SPS_CHECK(sums.dtype == DType::f64 && sums.rows == 1);
  check_number(flag), check_number(factor);
  if constexpr (kCudaBuilt) clip_factor_cuda(ex, sums, flag, limit, factor);
}

}  // namespace sps::ops
