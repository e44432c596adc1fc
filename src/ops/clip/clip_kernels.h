// The implementations behind clip.h; arguments as there, already checked.
#pragma once

#include "tensor/tensor.h"

namespace sps::ops {

double sum_of_squares_ref(Tensor x);
double sum_of_squares_cpu(Tensor x);

}  // namespace sps::ops
