#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/cross_entropy/cross_entropy_kernels.h"

namespace sps::ops {

void head_loss_ref(const HeadLoss& l) {
  const int64_t vocab = l.w.rows, d = l.x.cols;
  const double scale = l.train ? double(*l.scale.as<float>()) : 0;
  std::vector<double> logits(static_cast<size_t>(vocab));
  for (int64_t r = 0; r < l.x.rows; ++r) {
    const int32_t target = l.targets[size_t(r)];
    const double* x = l.x.row<double>(r);
    double* dx = l.train ? l.dx.row<double>(r) : nullptr;
    if (l.train) std::fill_n(dx, d, 0.0);
    l.nll.row<double>(r)[0] = 0;
    if (target < 0) continue;

    for (int64_t v = 0; v < vocab; ++v) {
      logits[size_t(v)] = 0;
      for (int64_t i = 0; i < d; ++i) logits[size_t(v)] += x[i] * l.w.row<double>(v)[i];
    }
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - most);
    l.nll.row<double>(r)[0] = std::log(sum) + most - logits[size_t(target)];
    if (!l.train) continue;

    for (int64_t v = 0; v < vocab; ++v) {
      const double d_logit = scale * (std::exp(logits[size_t(v)] - most) / sum - (v == target ? 1 : 0));
      for (int64_t i = 0; i < d; ++i) {
        dx[i] += d_logit * l.w.row<double>(v)[i];
        l.dw.row<double>(v)[i] += d_logit * x[i];
      }
    }
  }
}

}  // namespace sps::ops
