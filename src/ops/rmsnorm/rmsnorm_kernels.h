// The implementations behind rmsnorm.h; arguments as there, shapes already checked.
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

void rmsnorm_forward_ref(Tensor x, Tensor delta, Tensor gain, double eps, Tensor s, Tensor y, Tensor rstd,
                         std::span<const int32_t> pick);
void rmsnorm_backward_ref(Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds,
                          Tensor ds_act, Tensor dgain, std::span<const int32_t> pick);

void rmsnorm_forward_cpu(Tensor x, Tensor delta, Tensor gain, float eps, Tensor s, Tensor y, Tensor rstd,
                         std::span<const int32_t> pick);
void rmsnorm_backward_cpu(Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds,
                          Tensor ds_act, Tensor dgain, std::span<const int32_t> pick);

void rmsnorm_forward_cuda(const Exec& ex, Tensor x, Tensor delta, Tensor gain, float eps, Tensor s, Tensor y,
                          Tensor rstd, std::span<const int32_t> pick);
void rmsnorm_backward_cuda(const Exec& ex, Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres,
                           Tensor ds, Tensor ds_act, Tensor dgain, std::span<const int32_t> pick);

}  // namespace sps::ops
