// Small operations on whole rows that the blocks are joined with.
// Types: f64 (reference), f32 and bf16 in any combination; evaluated in f32.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

// y = x, converted. x may be one row: it is copied to every row of y.
void copy_rows(const Exec& ex, Tensor x, Tensor y);
// y = a + b. a may be one row; y may be a or b.
void add_rows(const Exec& ex, Tensor a, Tensor b, Tensor y);
// y [1, cols] += sum of the rows of x. Fixed order of addition whatever the number of threads.
void sum_rows(const Exec& ex, Tensor x, Tensor y);
void fill(const Exec& ex, Tensor y, float value);

}  // namespace sps::ops
