// The implementations behind rows.h; arguments as there, shapes already checked.
#pragma once

#include "tensor/exec.h"

namespace sps::ops {

void copy_rows_ref(Tensor x, Tensor y);
void add_rows_ref(Tensor a, Tensor b, Tensor y);
void sum_rows_ref(Tensor x, Tensor y);
void fill_ref(Tensor y, double value);

void copy_rows_cpu(Tensor x, Tensor y);
void add_rows_cpu(Tensor a, Tensor b, Tensor y);
void sum_rows_cpu(Tensor x, Tensor y);
void fill_cpu(Tensor y, float value);

void copy_rows_cuda(const Exec& ex, Tensor x, Tensor y);
void add_rows_cuda(const Exec& ex, Tensor a, Tensor b, Tensor y);
void sum_rows_cuda(const Exec& ex, Tensor x, Tensor y);
void fill_cuda(const Exec& ex, Tensor y, float value);

}  // namespace sps::ops
