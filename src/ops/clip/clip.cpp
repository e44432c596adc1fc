#include "ops/clip/clip.h"

#include <cmath>

#include "ops/clip/clip_kernels.h"

namespace sps::ops {

double sum_of_squares(const Exec& ex, Tensor x) {
  SPS_CHECK(ex.device == Device::cpu);
  SPS_CHECK(x.dtype == DType::f64 || x.dtype == DType::f32);
  return x.dtype == DType::f64 ? sum_of_squares_ref(x) : sum_of_squares_cpu(x);
}

double clip_factor(double norm, double limit) {
  return std::isfinite(norm) && limit > 0 && norm > limit ? limit / norm : 1;
}

}  // namespace sps::ops
