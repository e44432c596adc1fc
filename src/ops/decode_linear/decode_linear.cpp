#include "ops/decode_linear/decode_linear.h"

#include <algorithm>

#include "ops/decode_linear/decode_linear_kernels.h"
#include "ops/linear/linear.h"
#include "ops/linear/tiles.h"
#include "ops/rowwise.h"

namespace sps::ops {

void decode_linear(const Exec& ex, Tensor x, Tensor w, Tensor y) {
  if (ex.device == Device::cuda || x.dtype == DType::f64) return linear_forward(ex, x, w, y);
  const auto is_matrix = [](const Tensor& t, int64_t rows, int64_t cols) {
    return is_shape(t, rows, cols) && (t.stride >= t.cols || t.rows <= 1);
  };
  SPS_CHECK(is_matrix(x, y.rows, w.cols) && is_matrix(w, y.cols, x.cols) && is_matrix(y, x.rows, w.rows));
  SPS_CHECK(is_act(x.dtype) && w.dtype == x.dtype && (y.dtype == x.dtype || y.dtype == DType::f32));
  if (y.empty()) return;
  SPS_CHECK(x.cols > 0);
#ifdef SPS_AMX
  if (x.dtype == DType::bf16 && tiles::usable()) return decode_linear_on_tiles(x, w, y);
#endif
  decode_linear_cpu(x, w, y);
}

}  // namespace sps::ops
