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

// On a GPU, the same for nobody to wait: everything stays there.
//   sums    [1, n] f64, one sum of squares of each of n tensors
//   flag    [1, 1] f32, 0; becomes 1 where a number of x is not finite
//   factor  [1, 1] f32, clip_factor of the square root of all sums added up in order, to the same bit; -1,
//   and
//           the step must be skipped, where that root is not finite or the flag has been set
void sums_of_squares(const Exec& ex, std::span<const Tensor> xs, Tensor sums);
void flag_not_finite(const Exec& ex, Tensor x, Tensor flag);
void clip_factor(const Exec& ex, Tensor sums, Tensor flag, double limit, Tensor factor);

}  // namespace sps::ops
