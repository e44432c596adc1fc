#include "ops/fold_gain/fold_gain_kernels.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops {

void fold_gain_forward_cpu(Tensor w, Tensor gain, Tensor y) {
  const float* g = gain.as<float>();
  with_type(y.dtype, [&](auto zero) {
    using Act = decltype(zero);
    parallel_chunks(w.rows, chunk_rows(w.cols), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const float* wn = w.row<float>(n);
        Act* yn = y.row<Act>(n);
        for_lanes(w.cols, [&](int64_t k, auto mask) {
          store_lanes(yn + k, load_lanes(wn + k, mask) * load_lanes(g + k, mask), mask);
        });
      }
    });
  });
}

void fold_gain_backward_cpu(Tensor dy, Tensor w, Tensor gain, Tensor dw, Tensor dgain) {
  const int64_t cols = w.cols;
  const float* g = gain.as<float>();
  const float* sums = sum_over_rows(w.rows, cols, [&](int64_t begin, int64_t end, float* partial) {
    for (int64_t n = begin; n < end; ++n) {
      const float *dyn = dy.row<float>(n), *wn = w.row<float>(n);
      float* dwn = dw.row<float>(n);
#pragma omp simd
      for (int64_t k = 0; k < cols; ++k) {
        dwn[k] += dyn[k] * g[k];
        partial[k] += dyn[k] * wn[k];
      }
    }
  });
  float* dg = dgain.as<float>();
#pragma omp simd
  for (int64_t k = 0; k < cols; ++k) dg[k] += sums[k];
}

}  // namespace sps::ops
