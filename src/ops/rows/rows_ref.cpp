#include "ops/rows/rows_kernels.h"

namespace sps::ops {

void copy_rows_ref(Tensor x, Tensor y) {
  for (int64_t r = 0; r < y.rows; ++r)
    for (int64_t c = 0; c < y.cols; ++c) y.row<double>(r)[c] = x.row<double>(x.rows == 1 ? 0 : r)[c];
}

void add_rows_ref(Tensor a, Tensor b, Tensor y) {
  for (int64_t r = 0; r < y.rows; ++r)
    for (int64_t c = 0; c < y.cols; ++c)
      y.row<double>(r)[c] = a.row<double>(a.rows == 1 ? 0 : r)[c] + b.row<double>(r)[c];
}

void sum_rows_ref(Tensor x, Tensor y) {
  for (int64_t r = 0; r < x.rows; ++r)
    for (int64_t c = 0; c < x.cols; ++c) y.as<double>()[c] += x.row<double>(r)[c];
}

void fill_ref(Tensor y, double value) {
  for (int64_t r = 0; r < y.rows; ++r)
    for (int64_t c = 0; c < y.cols; ++c) y.row<double>(r)[c] = value;
}

}  // namespace sps::ops
