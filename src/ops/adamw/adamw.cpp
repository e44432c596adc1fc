#include "ops/adamw/adamw.h"

#include "ops/adamw/adamw_kernels.h"
#include "ops/rowwise.h"
#include "tensor/device.h"

namespace sps::ops {

void adamw(const Exec& ex, const AdamW& p, Tensor w, Tensor grad, Tensor m, Tensor v, Tensor w_act) {
  const AdamWUpdate update{p, w, grad, m, v, w_act};
  adamw(ex, std::span(&update, 1));
}

namespace {

void check(const Exec& ex, std::span<const AdamWUpdate> updates) {
  for (const auto& [p, w, grad, m, v, w_act] : updates) {
    SPS_CHECK(p.t >= 1);
    SPS_CHECK(w.dtype == DType::f32 || (w.dtype == DType::f64 && ex.device == Device::cpu));
    for (const Tensor& t : {w, grad, m, v}) SPS_CHECK(t.dtype == w.dtype && is_shape(t, 1, w.cols));
    if (w_act) SPS_CHECK(w_act.dtype == DType::bf16 && is_shape(w_act, 1, w.cols));
  }
}

}  // namespace

void adamw(const Exec& ex, std::span<const AdamWUpdate> updates) {
  check(ex, updates);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return adamw_cuda(ex, updates, nullptr, nullptr);
  for (const auto& [p, w, grad, m, v, w_act] : updates)
    w.dtype == DType::f64 ? adamw_ref(p, w, grad, m, v, w_act) : adamw_cpu(p, w, grad, m, v, w_act);
}

void adamw(const Exec& ex, std::span<const AdamWUpdate> updates, std::span<const AdamWStep> steps,
           Tensor scale) {
  SPS_CHECK(ex.device == Device::cuda && scale.device == Device::cuda && scale.count() == 1);
  SPS_CHECK(steps.size() == updates.size());
  check(ex, updates);
  if constexpr (kCudaBuilt) adamw_cuda(ex, updates, steps.data(), scale.as<float>());
}

}  // namespace sps::ops
