#include <cmath>

#include "ops/rmsnorm/rmsnorm_kernels.h"

namespace sps::ops {

void rmsnorm_forward_ref(Tensor x, Tensor delta, Tensor gain, double eps, Tensor s, Tensor y, Tensor rstd,
                         std::span<const int32_t> pick) {
  const int64_t d = s.cols;
  const double* g = gain.as<double>();
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t from = pick.empty() ? r : pick[size_t(r)];
    const double* xr = x.row<double>(x.rows == 1 ? 0 : from);
    double* sr = s.row<double>(r);
    double sum = 0;
    for (int64_t c = 0; c < d; ++c) {
      sr[c] = xr[c] + (delta ? delta.row<double>(from)[c] : 0);
      sum += sr[c] * sr[c];
    }
    const double k = 1 / std::sqrt(sum / double(d) + eps);
    *rstd.row<double>(r) = k;
    for (int64_t c = 0; c < d; ++c) y.row<double>(r)[c] = sr[c] * k * g[c];
  }
}

void rmsnorm_backward_ref(Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds,
                          Tensor ds_act, Tensor dgain, std::span<const int32_t> pick) {
  const int64_t d = s.cols;
  const double* g = gain.as<double>();
  if (ds.rows != dy.rows) {
    for (int64_t r = 0; r < ds.rows; ++r)
      for (int64_t c = 0; c < d; ++c) {
        ds.row<double>(r)[c] = 0;
        if (ds_act) ds_act.row<double>(r)[c] = 0;
      }
  }
  for (int64_t r = 0; r < dy.rows; ++r) {
    const int64_t to = pick.empty() ? r : pick[size_t(r)];
    const double* dyr = dy.row<double>(r);
    const double* sr = s.row<double>(r);
    const double k = *rstd.row<double>(r);
    double mean = 0;
    for (int64_t c = 0; c < d; ++c) mean += dyr[c] * g[c] * sr[c] * k / double(d);
    for (int64_t c = 0; c < d; ++c) {
      const double xhat = sr[c] * k;
      dgain.as<double>()[c] += dyr[c] * xhat;
      const double v = k * (dyr[c] * g[c] - xhat * mean) + (dres ? dres.row<double>(r)[c] : 0);
      ds.row<double>(to)[c] = v;
      if (ds_act) ds_act.row<double>(to)[c] = v;
    }
  }
}

}  // namespace sps::ops
