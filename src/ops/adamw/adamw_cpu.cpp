// One pass: 28 bytes a weight, 30 with the bf16 copy.
#include <algorithm>
#include <cmath>

#include "base/threads.h"
#include "ops/adamw/adamw_kernels.h"
#include "ops/vec.h"

namespace sps::ops {

namespace {

void update(const AdamWStep& s, const float* grad, float* w, float* m, float* v, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float g = s.scale * grad[i];
    const float m1 = s.beta1 * m[i] + s.grad1 * g;
    const float v1 = s.beta2 * v[i] + s.grad2 * g * g;
    // The comparisons let NaN through.
    const float mi = std::fabs(m1) < kVanished ? 0.0F : m1;
    const float vi = v1 < kVanished ? 0.0F : v1;
    // Adding the decay to the step first keeps it exact to the weight's last bit; 1 - lr * decay would be
    // rounded.
    const float wi = w[i] - (s.rate * mi / (std::sqrt(vi) * s.correct + s.eps) + s.decay * w[i]);
    m[i] = mi;
    v[i] = vi;
    w[i] = wi;
  }
}

}  // namespace

void adamw_cpu(const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act) {
  constexpr int64_t kBlock = 1 << 15, kStrip = 1 << 11;
  const AdamWStep s(p);
  parallel_chunks(w.cols, kBlock, [&](int64_t begin, int64_t end) {
    // The copy follows in strips that are still in the first-level cache.
    for (int64_t i = begin; i < end; i += kStrip) {
      const int64_t n = std::min(kStrip, end - i);
      float* wi = w.as<float>() + i;
      update(s, grad.as<float>() + i, wi, m.as<float>() + i, v.as<float>() + i, n);
      if (w_act) {
        bf16* copy = w_act.as<bf16>() + i;
        for_lanes(n, [&](int64_t c, auto mask) { store_lanes(copy + c, load_lanes(wi + c, mask), mask); });
      }
    }
  });
}

}  // namespace sps::ops
