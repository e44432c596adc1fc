// The implementations behind clip.h; arguments as there, already checked.
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

double sum_of_squares_ref(Tensor x);
double sum_of_squares_cpu(Tensor x);
void sums_of_squares_cuda(const Exec& ex, std::span<const Tensor> xs, Tensor sums);
void flag_not_finite_cuda(const Exec& ex, Tensor x, Tensor flag);
void clip_factor_cuda(const Exec& ex, Tensor sums, Tensor flag, double limit, Tensor factor);

}  // namespace sps::ops
