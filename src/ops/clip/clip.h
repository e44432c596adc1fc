// Global-norm clipping: the norm of all gradients together, and the factor that brings it down to `limit`.
//   factor = limit > 0 and norm > limit ? limit / norm : 1        (training spec, section 4)
// Sums of squares are taken over blocks of a fixed size in double, so the norm has the same bits for any
// number of threads. A NaN or infinity anywhere makes the norm non-finite; its factor is 1, which is no cure:
// the caller checks the norm and skips the step.
#pragma once

#include <span>
#include <vector>

#include "tensor/exec.h"

namespace sps::ops {

double sum_of_squares(const Exec& ex, Tensor x);  // x: any number of rows, f32 or f64
// Of several tensors at once: on a GPU in a few launches, and the host waits for it once.
std::vector<double> sums_of_squares(const Exec& ex, std::span<const Tensor> xs);
double clip_factor(double norm, double limit);

}  // namespace sps::ops
