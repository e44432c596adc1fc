// The implementations behind gates.h; arguments as there, shapes already checked.
#pragma once

#include "ops/gates/gates.h"

namespace sps::ops {

void pool_forward_ref(Tensor a, Tensor p, const GateWeights& w, const GateRows& gates, Tensor m);
void pool_backward_ref(Tensor dm, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates,
                       const GateRows& t, Tensor da, Tensor dp, const GateWeights& dw);
void scatter_forward_ref(Tensor f, const GateRows& gates, Tensor out_a, Tensor out_p);
void scatter_backward_ref(Tensor d_out_a, Tensor d_out_p, Tensor f, const GateRows& gates, Tensor df,
                          const GateRows& t);

void pool_forward_cpu(Tensor a, Tensor p, const GateWeights& w, const GateRows& gates, Tensor m);
void pool_backward_cpu(Tensor dm, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates,
                       const GateRows& t, Tensor da, Tensor dp, const GateWeights& dw);
void scatter_forward_cpu(Tensor f, const GateRows& gates, Tensor out_a, Tensor out_p);
void scatter_backward_cpu(Tensor d_out_a, Tensor d_out_p, Tensor f, const GateRows& gates, Tensor df,
                          const GateRows& t);

void pool_forward_cuda(const Exec& ex, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates,
                       Tensor m);
void pool_backward_cuda(const Exec& ex, Tensor dm, Tensor a, Tensor p, const GateWeights& w,
                        const GateRows& gates, const GateRows& t, Tensor da, Tensor dp,
                        const GateWeights& dw);
void scatter_forward_cuda(const Exec& ex, Tensor f, const GateRows& gates, Tensor out_a, Tensor out_p);
void scatter_backward_cuda(const Exec& ex, Tensor d_out_a, Tensor d_out_p, Tensor f, const GateRows& gates,
                           Tensor df, const GateRows& t);

}  // namespace sps::ops
