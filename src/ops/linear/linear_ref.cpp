#include <algorithm>

#include "ops/linear/linear_kernels.h"

namespace sps::ops {

void linear_forward_ref(Tensor x, Tensor w, Tensor y, Accumulate acc) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const double* xr = x.row<double>(r);
    double* yr = y.row<double>(r);
    for (int64_t o = 0; o < w.rows; ++o) {
      const double* wo = w.row<double>(o);
      double sum = acc == Accumulate::yes ? yr[o] : 0;
      for (int64_t i = 0; i < x.cols; ++i) sum += xr[i] * wo[i];
      yr[o] = sum;
    }
  }
}

void linear_backward_input_ref(Tensor dy, Tensor w, Tensor dx, Accumulate acc) {
  for (int64_t r = 0; r < dy.rows; ++r) {
    const double* dyr = dy.row<double>(r);
    double* dxr = dx.row<double>(r);
    if (acc == Accumulate::no) std::fill_n(dxr, dx.cols, 0.0);
    for (int64_t o = 0; o < w.rows; ++o) {
      const double* wo = w.row<double>(o);
      for (int64_t i = 0; i < w.cols; ++i) dxr[i] += dyr[o] * wo[i];
    }
  }
}

void linear_backward_weight_ref(Tensor dy, Tensor x, Tensor dw) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const double* xr = x.row<double>(r);
    const double* dyr = dy.row<double>(r);
    for (int64_t o = 0; o < dy.cols; ++o) {
      double* dwo = dw.row<double>(o);
      for (int64_t i = 0; i < x.cols; ++i) dwo[i] += dyr[o] * xr[i];
    }
  }
}

}  // namespace sps::ops
