#include <cmath>

#include "ops/adamw/adamw_kernels.h"

namespace sps::ops {

void adamw_ref(const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act) {
  const double correct1 = 1 - std::pow(p.beta1, double(p.t)), correct2 = 1 - std::pow(p.beta2, double(p.t));
  for (int64_t i = 0; i < w.cols; ++i) {
    const double g = p.scale * grad.as<double>()[i];
    double &wi = w.as<double>()[i], &mi = m.as<double>()[i], &vi = v.as<double>()[i];
    mi = p.beta1 * mi + (1 - p.beta1) * g;
    vi = p.beta2 * vi + (1 - p.beta2) * g * g;
    wi -= p.lr * (mi / correct1 / (std::sqrt(vi / correct2) + p.eps) + p.decay * wi);
    if (w_act) w_act.as<bf16>()[i] = bf16(wi);
  }
}

}  // namespace sps::ops
