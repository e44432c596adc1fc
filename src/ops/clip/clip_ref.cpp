#include "ops/clip/clip_kernels.h"

namespace sps::ops {

double sum_of_squares_ref(Tensor x) {
  double sum = 0;
  for (int64_t r = 0; r < x.rows; ++r)
    for (int64_t c = 0; c < x.cols; ++c) sum += x.row<double>(r)[c] * x.row<double>(r)[c];
  return sum;
}

}  // namespace sps::ops
