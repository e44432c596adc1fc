// The implementations behind rope.h; arguments as there, shapes already checked.
#pragma once

#include "ops/rope/rope.h"

namespace sps::ops {

// The CPU code keeps one head in f32 on the stack.
inline constexpr int64_t kRopeMaxHeadDim = 1024;

void rope_forward_ref(Tensor x, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                      const QkNorm& norm, Tensor rstd, Tensor y);
void rope_backward_ref(Tensor dy, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                       const QkNorm& norm, Tensor x, Tensor rstd, Tensor dx, Tensor dgain);

void rope_forward_cpu(Tensor x, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                      const QkNorm& norm, Tensor rstd, Tensor y);
void rope_backward_cpu(Tensor dy, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                       const QkNorm& norm, Tensor x, Tensor rstd, Tensor dx, Tensor dgain);

void rope_forward_cuda(const Exec& ex, Tensor x, int64_t heads, const RopeTable& table,
                       std::span<const int32_t> positions, const QkNorm& norm, Tensor rstd, Tensor y);
void rope_backward_cuda(const Exec& ex, Tensor dy, int64_t heads, const RopeTable& table,
                        std::span<const int32_t> positions, const QkNorm& norm, Tensor x, Tensor rstd,
                        Tensor dx, Tensor dgain);

}  // namespace sps::ops
