#include "ops/cross_entropy/cross_entropy.h"

#include "ops/cross_entropy/cross_entropy_kernels.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

void run(const Exec& ex, const HeadLoss& l) {
  const DType act = l.x.dtype, sum = act == DType::f64 ? DType::f64 : DType::f32;
  SPS_CHECK(act == DType::f64 || act == DType::f32 || act == DType::bf16);
  SPS_CHECK(l.x.cols == l.w.cols && l.w.rows > 0 && l.w.dtype == act);
  SPS_CHECK(int64_t(l.targets.size()) == l.x.rows);
  SPS_CHECK(l.nll.rows == l.x.rows && l.nll.cols == 1 && l.nll.dtype == sum);
  SPS_CHECK(l.x.device == ex.device && l.w.device == ex.device && l.nll.device == ex.device);
  if (l.train) {
    SPS_CHECK(l.dx.rows == l.x.rows && l.dx.cols == l.x.cols && l.dx.dtype == act);
    SPS_CHECK(l.dw.rows == l.w.rows && l.dw.cols == l.w.cols && l.dw.dtype == sum);
    SPS_CHECK(l.dx.device == ex.device && l.dw.device == ex.device);
    SPS_CHECK(l.scale.dtype == DType::f32 && l.scale.count() == 1 && l.scale.device == ex.device);
  }
  if (l.x.rows == 0) return;
  SPS_CHECK(l.x.cols > 0);
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) {
      SPS_CHECK(act != DType::f64);
      return head_loss_cuda(ex, l);
    }
  SPS_CHECK(ex.device == Device::cpu);
  for (const int32_t target : l.targets) SPS_CHECK(target < l.w.rows);
  if (act == DType::f64) return head_loss_ref(l);
  head_loss_cpu(l);
}

}  // namespace

void head_loss_forward(const Exec& ex, Tensor x, Tensor w, std::span<const int32_t> targets, Tensor nll) {
  HeadLoss l;
  l.x = x, l.w = w, l.targets = targets, l.nll = nll;
  run(ex, l);
}

void head_loss_train(const Exec& ex, Tensor x, Tensor w, std::span<const int32_t> targets, Tensor scale,
                     Tensor nll, Tensor dx, Tensor dw) {
  run(ex, {x, w, targets, nll, scale, dx, dw, true});
}

}  // namespace sps::ops
