// Rotary position embedding, with the optional RMS norm of each head before it (QK-norm).
//   u = qk_norm ? x * rsqrt(mean(x^2) + eps) * gain : x     per head of head_dim numbers
//   (a, b) -> (a cos f - b sin f, a sin f + b cos f)        for each rotated pair m, f = position * theta_m
//   theta_m = base^(-2m / width)                            width = rotated part of the head, even
// Pairs: adjacent (2m, 2m+1), the papers' convention, or half-split (m, m + width/2). Dimensions from `width`
// on pass unrotated; theta is taken from the rotated width, not from head_dim. Evaluated in f32, rounded once
// at the end.
// Source: model spec "RoPE", "QK-norm"; second paper, section on architecture (partial rotary).
//
// Shapes   x [rows, heads*head_dim] with head_dim <= 1024, or one row read for every position (a constant
//          start of the prediction stream); y [rows, heads*head_dim]; row r has position positions[r] <
//          table.cos.rows; gain [1, head_dim] or empty; rstd [rows of x, heads] (written if gain is given).
//          y may be x itself when there is no gain.
// Gradient rotate dy back by the same angles, sum over rows if x is one row, then through the norm:
//          du = gain * dn, dx = rstd * (du - xhat * mean(du * xhat)),
//          dgain += sum over rows and heads of dn * xhat.
//          dx may be dy itself when both have the same rows and dtype. Without a gain x, rstd and dgain are
//          not looked at.
// Types    x, y, dx act dtype; dy act dtype or f32; gain, rstd, dgain, tables f32. f64 throughout in the
//          reference.
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

enum class RopePairs : uint8_t { adjacent, half_split };

struct RopeTable {
  Tensor cos, sin;  // [positions, width/2]
  RopePairs pairs = RopePairs::adjacent;
  int64_t width() const { return cos.cols * 2; }
};

// Fills cos and sin (already allocated, f32 or f64) from double-precision angles.
void rope_fill(RopeTable table, double base);

struct QkNorm {
  Tensor gain;  // empty: no norm
  float eps = 1e-6F;
};

void rope_forward(const Exec& ex, Tensor x, int64_t heads, const RopeTable& table,
                  std::span<const int32_t> positions, const QkNorm& norm, Tensor rstd, Tensor y);
void rope_backward(const Exec& ex, Tensor dy, int64_t heads, const RopeTable& table,
                   std::span<const int32_t> positions, const QkNorm& norm, Tensor x, Tensor rstd, Tensor dx,
                   Tensor dgain);

}  // namespace sps::ops
