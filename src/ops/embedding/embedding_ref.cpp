#include "ops/embedding/embedding_kernels.h"

namespace sps::ops {

void embedding_forward_ref(std::span<const int32_t> ids, Tensor table, Tensor vector, Tensor y) {
  for (int64_t r = 0; r < y.rows; ++r)
    for (int64_t c = 0; c < y.cols; ++c)
      y.row<double>(r)[c] = table.row<double>(ids[size_t(r)])[c] + (vector ? vector.as<double>()[c] : 0);
}

void embedding_backward_ref(std::span<const int32_t> ids, Tensor dy, Tensor dtable, Tensor dvector) {
  for (int64_t r = 0; r < dy.rows; ++r)
    for (int64_t c = 0; c < dy.cols; ++c) {
      dtable.row<double>(ids[size_t(r)])[c] += dy.row<double>(r)[c];
      if (dvector) dvector.as<double>()[c] += dy.row<double>(r)[c];
    }
}

}  // namespace sps::ops
