// One pass over all tensors: 28 bytes a weight, 30 with the bf16 copy.
#include "ops/adamw/adamw_kernels.h"
#include "ops/cuda.cuh"

namespace sps::ops {

namespace {

constexpr int kThreads = 256, kWidth = 4, kAtOnce = 2, kBlockNumbers = kThreads * kWidth * kAtOnce;

struct Update {
  AdamWStep step;
  unsigned first_block;
  const float* grad;
  float *w, *m, *v;
  bf16* w_act;  // null: no copy
  int64_t n;
  bool wide;  // everything in steps of kWidth numbers
};

// What one launch has room for: its arguments go up to 4 KB.
struct Updates {
  static constexpr int kMost = 36;
  Update at[kMost];
  int count = 0;
  const AdamWStep* steps = nullptr;  // of these updates, in place of their own
  const float* scale = nullptr;
};
static_assert(sizeof(Updates) <= 4000);

__device__ void update(const AdamWStep& s, float grad, float& w, float& m, float& v) {
  const float g = s.scale * grad;
  const float m1 = s.beta1 * m + s.grad1 * g, v1 = s.beta2 * v + s.grad2 * g * g;
  // The comparisons let NaN through. The decay joins the step before the weight does, as on the CPU.
  m = fabsf(m1) < kVanished ? 0.0F : m1;
  v = v1 < kVanished ? 0.0F : v1;
  w -= s.rate * m / (sqrtf(v) * s.correct + s.eps) + s.decay * w;
}

__device__ AdamWStep step_of(const Updates& updates, int which) {
  if (updates.steps == nullptr) return updates.at[which].step;
  AdamWStep step = updates.steps[which];
  step.scale = *updates.scale;
  return step;
}
__device__ bool skipped(const Updates& updates, const AdamWStep& step) {
  return updates.steps != nullptr && step.scale < 0;
}

__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ Updates updates) {
  int which = 0;
  while (which + 1 < updates.count && updates.at[which + 1].first_block <= blockIdx.x) ++which;
  const Update& u = updates.at[which];
  const int64_t begin = int64_t(blockIdx.x - u.first_block) * kBlockNumbers;
  if (!u.wide || begin + kBlockNumbers > u.n) {
    const AdamWStep step = step_of(updates, which);
    if (skipped(updates, step)) return;
    const int64_t end = begin + kBlockNumbers < u.n ? begin + kBlockNumbers : u.n;
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      float w = u.w[i], m = u.m[i], v = u.v[i];
      update(step, u.grad[i], w, m, v);
      u.w[i] = w, u.m[i] = m, u.v[i] = v;
      if (u.w_act != nullptr) u.w_act[i] = from_float<bf16>(w);
    }
    return;
  }
  float grad[kAtOnce][kWidth], w[kAtOnce][kWidth], m[kAtOnce][kWidth], v[kAtOnce][kWidth];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = begin + (k * kThreads + threadIdx.x) * kWidth;
    load(u.grad + i, grad[k]);
    load(u.w + i, w[k]);
    load(u.m + i, m[k]);
    load(u.v + i, v[k]);
  }
  const AdamWStep step = step_of(updates, which);  // beside what is under way
  if (skipped(updates, step)) return;
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = begin + (k * kThreads + threadIdx.x) * kWidth;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) update(step, grad[k][j], w[k][j], m[k][j], v[k][j]);
    store(u.w + i, w[k]);
    store(u.m + i, m[k]);
    store(u.v + i, v[k]);
    if (u.w_act != nullptr) store(u.w_act + i, w[k]);
  }
}

}  // namespace

void adamw_cuda(const Exec& ex, std::span<const AdamWUpdate> updates, const AdamWStep* steps,
                const float* scale) {
  Updates batch{};
  batch.steps = steps, batch.scale = scale;
  int64_t blocks = 0;
  const auto launch = [&] {
    if (blocks > 0) {
      update_kernel<<<unsigned(blocks), kThreads, 0, stream_of(ex)>>>(batch);
      SPS_LAUNCHED();
    }
    if (steps != nullptr) batch.steps += batch.count;
    batch.count = 0, blocks = 0;
  };
  for (const auto& [settings, w, grad, m, v, w_act] : updates) {
    const bool aligned = [](auto... t) {
      return ((reinterpret_cast<uintptr_t>(t.data) % (kWidth * dtype_size(t.dtype)) == 0) && ...);
    }(w, grad, m, v, w_act);
    batch.at[batch.count++] = {AdamWStep(settings),
                               unsigned(blocks),
                               grad.as<float>(),
                               w.as<float>(),
                               m.as<float>(),
                               v.as<float>(),
                               w_act ? w_act.as<bf16>() : nullptr,
                               w.cols,
                               aligned};
    blocks += ceil_div(w.cols, kBlockNumbers);
    SPS_CHECK(blocks < INT32_MAX);
    if (batch.count == Updates::kMost) launch();
  }
  launch();
}

}  // namespace sps::ops
