#include "ops/clip/clip.h"

#include <cmath>

#include "ops/clip/clip_kernels.h"
#include "tensor/device.h"

namespace sps::ops {

double sum_of_squares(const Exec& ex, Tensor x) {
  return sums_of_squares(ex, std::span(&x, 1)).front();
}

std::vector<double> sums_of_squares(const Exec& ex, std::span<const Tensor> xs) {
  for (const Tensor& x : xs)
    SPS_CHECK(x.dtype == DType::f32 || (x.dtype == DType::f64 && ex.device == Device::cpu));
  std::vector<double> sums(xs.size(), 0);
  if constexpr (kCudaBuilt) {
    if (ex.device == Device::cuda) {
      sums_of_squares_cuda(ex, xs, sums);
      return sums;
    }
  }
  for (size_t i = 0; i < xs.size(); ++i)
    sums[i] = xs[i].dtype == DType::f64 ? sum_of_squares_ref(xs[i]) : sum_of_squares_cpu(xs[i]);
  return sums;
}

double clip_factor(double norm, double limit) {
  return std::isfinite(norm) && limit > 0 && norm > limit ? limit / norm : 1;
}

}  // namespace sps::ops
