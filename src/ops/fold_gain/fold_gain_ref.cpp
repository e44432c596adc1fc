#include "ops/fold_gain/fold_gain_kernels.h"

namespace sps::ops {

void fold_gain_forward_ref(Tensor w, Tensor gain, Tensor y) {
  for (int64_t n = 0; n < w.rows; ++n)
    for (int64_t k = 0; k < w.cols; ++k) y.row<double>(n)[k] = w.row<double>(n)[k] * gain.as<double>()[k];
}

void fold_gain_backward_ref(Tensor dy, Tensor w, Tensor gain, Tensor dw, Tensor dgain) {
  for (int64_t n = 0; n < w.rows; ++n)
    for (int64_t k = 0; k < w.cols; ++k) {
      dw.row<double>(n)[k] += dy.row<double>(n)[k] * gain.as<double>()[k];
      dgain.as<double>()[k] += dy.row<double>(n)[k] * w.row<double>(n)[k];
    }
}

}  // namespace sps::ops
