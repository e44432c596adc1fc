// The implementations behind clip.h; arguments as there, already checked.
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

double sum_of_squares_ref(Tensor x);
double sum_of_squares_cpu(Tensor x);
void sums_of_squares_cuda(const Exec& ex, std::span<const Tensor> xs, std::span<double> sums);

}  // namespace sps::ops
