#include <cmath>

#include "ops/swiglu/swiglu_kernels.h"

namespace sps::ops {

namespace {

double sigmoid(double z) {
  return 1 / (1 + std::exp(-z));
}

}  // namespace

void swiglu_forward_ref(Tensor gate_up, Tensor h) {
  for (int64_t r = 0; r < h.rows; ++r)
    for (int64_t c = 0; c < h.cols; ++c) {
      const double gate = gate_up.row<double>(r)[c], up = gate_up.row<double>(r)[h.cols + c];
      h.row<double>(r)[c] = gate * sigmoid(gate) * up;
    }
}

void swiglu_backward_ref(Tensor gate_up, Tensor dh, Tensor d_gate_up, Tensor h) {
  for (int64_t r = 0; r < dh.rows; ++r)
    for (int64_t c = 0; c < dh.cols; ++c) {
      const double gate = gate_up.row<double>(r)[c], up = gate_up.row<double>(r)[dh.cols + c];
      const double s = sigmoid(gate), d = dh.row<double>(r)[c];
      if (h) h.row<double>(r)[c] = gate * s * up;
      d_gate_up.row<double>(r)[c] = d * up * s * (1 + gate * (1 - s));
      d_gate_up.row<double>(r)[dh.cols + c] = d * gate * s;
    }
}

}  // namespace sps::ops
