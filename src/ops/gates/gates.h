// The gates of the pooled feed-forward layer (second paper, "shared gated FFN"; model spec 9.1; two-tower
// spec 1.7). With a, p the normed rows of the state and the prediction stream:
//   pool:    g = sigmoid(w_in . [a ; p])           m = g * a + (1 - g) * p            then f = FFN(m), once
//   scatter: da = sigmoid(w_a . a) * f             dp = sigmoid(w_p . p) * f          added to the two
//   residuals
// All gates are one number per row, no bias.
//
// Shapes   a, p, m, f, out_a, out_p [rows, d]; w_in [1, 2d] (state half first); w_a, w_p [1, d]; g, s_a, s_p
// [rows, 1]
//          In scatter the state output may be absent (out_a empty: its gate is dead work on the last layer).
// Types    rows act dtype (f32, bf16; f64 in the reference); weights, gates and their gradients f32
//
// Backward of scatter, given d_a = gradient of out_a (or empty) and d_p of out_p:
//   df = s_a d_a + s_p d_p;    t = (d_a . f) s_a (1 - s_a);    da = t w_a,  dw_a += sum t a;   the same for p
// Backward of pool, given dm:
//   t = (dm . (a - p)) g (1 - g);   da += g dm + t w_in[:d];   dp += (1 - g) dm + t w_in[d:];   dw_in += sum
//   t [a ; p]
// scatter's backward writes da, dp (zero da where out_a is absent), pool's backward adds to them.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void pool_forward(const Exec& ex, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor m);
void pool_backward(const Exec& ex, Tensor dm, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor da, Tensor dp,
                   Tensor dw_in);

void scatter_forward(const Exec& ex, Tensor a, Tensor p, Tensor f, Tensor w_a, Tensor w_p, Tensor s_a,
                     Tensor s_p, Tensor out_a, Tensor out_p);
void scatter_backward(const Exec& ex, Tensor d_out_a, Tensor d_out_p, Tensor a, Tensor p, Tensor f,
                      Tensor w_a, Tensor w_p, Tensor s_a, Tensor s_p, Tensor df, Tensor da, Tensor dp,
                      Tensor dw_a, Tensor dw_p);

}  // namespace sps::ops
