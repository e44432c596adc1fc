// The implementations behind gates.h; arguments as there, shapes already checked.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void pool_forward_ref(Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor m);
void pool_backward_ref(Tensor dm, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor da, Tensor dp,
                       Tensor dw_in);
void scatter_forward_ref(Tensor x, Tensor f, Tensor w, Tensor s, Tensor out);
void scatter_backward_ref(Tensor d_out_a, Tensor d_out_p, Tensor a, Tensor p, Tensor f, Tensor w_a,
                          Tensor w_p, Tensor s_a, Tensor s_p, Tensor df, Tensor da, Tensor dp, Tensor dw_a,
                          Tensor dw_p);

void pool_forward_cpu(Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor m);
void pool_backward_cpu(Tensor dm, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor da, Tensor dp,
                       Tensor dw_in);
// One stream x of the two: s = sigmoid(w . x), out = s f.
void scatter_forward_cpu(Tensor x, Tensor f, Tensor w, Tensor s, Tensor out);
void scatter_backward_cpu(Tensor d_out_a, Tensor d_out_p, Tensor a, Tensor p, Tensor f, Tensor w_a,
                          Tensor w_p, Tensor s_a, Tensor s_p, Tensor df, Tensor da, Tensor dp, Tensor dw_a,
                          Tensor dw_p);

void pool_forward_cuda(const Exec& ex, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor m);
void pool_backward_cuda(const Exec& ex, Tensor dm, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor da,
                        Tensor dp, Tensor dw_in);
// Both streams at once, so that f is read once; a's part may be absent.
void scatter_forward_cuda(const Exec& ex, Tensor a, Tensor p, Tensor f, Tensor w_a, Tensor w_p, Tensor s_a,
                          Tensor s_p, Tensor out_a, Tensor out_p);
void scatter_backward_cuda(const Exec& ex, Tensor d_out_a, Tensor d_out_p, Tensor a, Tensor p, Tensor f,
                           Tensor w_a, Tensor w_p, Tensor s_a, Tensor s_p, Tensor df, Tensor da, Tensor dp,
                           Tensor dw_a, Tensor dw_p);

}  // namespace sps::ops
