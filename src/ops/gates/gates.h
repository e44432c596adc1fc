// The gates of the pooled feed-forward layer (second paper, "shared gated FFN"; model spec 9.1; two-tower
// spec 1.7). With a, p the normed rows of the state and the prediction stream:
//   pool:    g = sigmoid(w_in . [a ; p])           m = g * a + (1 - g) * p            then f = FFN(m), once
//            s_a = sigmoid(w_a . a)                s_p = sigmoid(w_p . p)
//   scatter: da = s_a * f                          dp = s_p * f           added to the two residuals
// All gates are one number per row, no bias; pool computes all three, since it holds both rows anyway.
//
// Shapes   a, p, m, f, out_a, out_p [rows, d]; w_in [1, 2d] (state half first); w_a, w_p [1, d]; g, s_a, s_p
// [rows, 1]
//          The state's output may be absent (w_a, s_a, out_a empty: its gate is dead work on the last layer).
// Types    rows act dtype (f32, bf16; f64 in the reference); weights, gates and their gradients f32
//
// Backward of scatter, given d_a = gradient of out_a (or empty) and d_p of out_p:
//   df = s_a d_a + s_p d_p;    t_a = (d_a . f) s_a (1 - s_a);    t_p likewise    (t_a untouched if d_a is
//   empty)
// Backward of pool, given dm and the t of both output gates (t_a empty: none):
//   t = (dm . (a - p)) g (1 - g);   da = g dm + t w_in[:d] + t_a w_a;   dp = (1 - g) dm + t w_in[d:] + t_p
//   w_p dw_in += sum t [a ; p];         dw_a += sum t_a a;                   dw_p += sum t_p p
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

// The gates' weights, and what belongs to each: their gradients.
struct GateWeights {
  Tensor in, a, p;
};
// One number a row: of the gates (pool_forward writes them), or the t of the output gates (in is empty
// there).
struct GateRows {
  Tensor in, a, p;
};

void pool_forward(const Exec& ex, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates, Tensor m);
void pool_backward(const Exec& ex, Tensor dm, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates,
                   const GateRows& t, Tensor da, Tensor dp, const GateWeights& dw);

void scatter_forward(const Exec& ex, Tensor f, const GateRows& gates, Tensor out_a, Tensor out_p);
void scatter_backward(const Exec& ex, Tensor d_out_a, Tensor d_out_p, Tensor f, const GateRows& gates,
                      Tensor df, const GateRows& t);

}  // namespace sps::ops
