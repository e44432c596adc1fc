// RMSNorm fused with the residual addition before it (model spec, "Common backbone"):
//   s = x + delta          rstd = 1 / sqrt(mean(s^2) + eps)          y = s * rstd * gain
// The norm is evaluated in f32; y is rounded once, to its own dtype, after the gain.
//
// Shapes   x [rows, d], or one row read for all rows; delta [rows, d] or empty; s [rows, d] (may be x itself
//          unless rows are gathered or x is one row for several); gain [1, d]; y [rows, d]; rstd [rows, 1]
// Gather   With `pick` (row numbers, strictly ascending), row r of s, y and rstd belongs to row pick[r] of x
//          and delta: s, y, rstd have pick.size() rows. The head norm uses it for the rows that carry a loss.
//          No pick and s, y, rstd (in backward dy) of 0 rows means that no row was picked.
// Types    x, s, gain, rstd f32; delta, y act dtype (f32 or bf16). f64 throughout in the reference.
//
// Backward, with u = dy * gain and xhat = s * rstd:
//   ds = rstd * (u - xhat * mean(u * xhat)) + dres         dgain += sum_rows dy * xhat
// dres [rows, d] f32 or empty is the gradient that reaches s past the norm (it may be ds itself). ds is the
// gradient of x and of delta both; ds_act, if not empty, receives a copy in the act dtype for the matrix
// products behind delta. With `pick`, ds and ds_act have x's rows, rows that were not picked get zero, and
// dres must be empty.
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

void rmsnorm_forward(const Exec& ex, Tensor x, Tensor delta, Tensor gain, float eps, Tensor s, Tensor y,
                     Tensor rstd, std::span<const int32_t> pick = {});
void rmsnorm_backward(const Exec& ex, Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds,
                      Tensor ds_act, Tensor dgain, std::span<const int32_t> pick = {});

}  // namespace sps::ops
