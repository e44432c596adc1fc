#include "ops/rope/rope.h"

#include <cmath>

#include "ops/rope/rope_kernels.h"
#include "ops/rowwise.h"
#include "tensor/device.h"

namespace sps::ops {

namespace {

void check_table(const Exec& ex, const RopeTable& table, DType wide, int64_t head_dim,
                 std::span<const int32_t> positions) {
  SPS_CHECK(table.cos.dtype == wide && table.sin.dtype == wide);
  SPS_CHECK(is_shape(table.sin, table.cos.rows, table.cos.cols) && table.width() <= head_dim);
  if (ex.device == Device::cuda) return;  // the positions stand in the GPU's memory
  for (const int32_t p : positions) SPS_CHECK(p >= 0 && p < table.cos.rows);
}

}  // namespace

void rope_fill(RopeTable table, double base) {
  SPS_CHECK(table.cos.dtype == table.sin.dtype &&
            (table.cos.dtype == DType::f32 || table.cos.dtype == DType::f64));
  SPS_CHECK(is_shape(table.sin, table.cos.rows, table.cos.cols));
  const bool f64 = table.cos.dtype == DType::f64;
  const auto width = double(table.width());
  parallel_chunks(table.cos.rows, chunk_rows(table.cos.cols), [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < table.cos.cols; ++m) {
      const double theta = std::pow(base, -2 * double(m) / width);
      for (int64_t p = begin; p < end; ++p) {
        const double angle = double(p) * theta;
        if (f64) {
          table.cos.row<double>(p)[m] = std::cos(angle);
          table.sin.row<double>(p)[m] = std::sin(angle);
        } else {
          table.cos.row<float>(p)[m] = float(std::cos(angle));
          table.sin.row<float>(p)[m] = float(std::sin(angle));
        }
      }
    }
  });
}

void rope_forward(const Exec& ex, Tensor x, int64_t heads, const RopeTable& table,
                  std::span<const int32_t> positions, const QkNorm& norm, Tensor rstd, Tensor y) {
  const bool f64 = y.dtype == DType::f64;
  const DType wide = f64 ? DType::f64 : DType::f32;
  SPS_CHECK(x.dtype == y.dtype && (is_act(y.dtype) || (f64 && ex.device == Device::cpu)));
  SPS_CHECK(heads > 0 && y.cols % heads == 0 && y.cols / heads <= kRopeMaxHeadDim);
  SPS_CHECK(x.cols == y.cols && (x.rows == y.rows || x.rows == 1) && y.rows == int64_t(positions.size()));
  check_table(ex, table, wide, y.cols / heads, positions);
  if (norm.gain) {
    SPS_CHECK(norm.gain.dtype == wide && is_shape(norm.gain, 1, y.cols / heads));
    SPS_CHECK(rstd.dtype == wide && is_shape(rstd, x.rows, heads));
    SPS_CHECK(x.data != y.data);  // backward needs x
  }
  SPS_CHECK(x.data != y.data || (x.rows == y.rows && (x.rows == 1 || x.stride == y.stride)));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return rope_forward_cuda(ex, x, heads, table, positions, norm, rstd, y);
  (f64 ? rope_forward_ref : rope_forward_cpu)(x, heads, table, positions, norm, rstd, y);
}

void rope_backward(const Exec& ex, Tensor dy, int64_t heads, const RopeTable& table,
                   std::span<const int32_t> positions, const QkNorm& norm, Tensor x, Tensor rstd, Tensor dx,
                   Tensor dgain) {
  const bool f64 = dx.dtype == DType::f64;
  const DType wide = f64 ? DType::f64 : DType::f32;
  SPS_CHECK(is_act(dx.dtype) || (f64 && ex.device == Device::cpu));
  SPS_CHECK(dy.dtype == dx.dtype || dy.dtype == wide);
  SPS_CHECK(heads > 0 && dy.cols % heads == 0 && dy.cols / heads <= kRopeMaxHeadDim);
  SPS_CHECK(dx.cols == dy.cols && (dx.rows == dy.rows || dx.rows == 1) &&
            dy.rows == int64_t(positions.size()));
  check_table(ex, table, wide, dy.cols / heads, positions);
  if (norm.gain) {
    SPS_CHECK(norm.gain.dtype == wide && is_shape(norm.gain, 1, dy.cols / heads));
    SPS_CHECK(dgain.dtype == wide && is_shape(dgain, 1, dy.cols / heads));
    SPS_CHECK(rstd.dtype == wide && is_shape(rstd, dx.rows, heads));
    SPS_CHECK(x.dtype == dx.dtype && is_shape(x, dx.rows, dx.cols));
  }
  SPS_CHECK(dx.data != dy.data ||
            (dx.dtype == dy.dtype && dx.rows == dy.rows && (dx.rows == 1 || dx.stride == dy.stride)));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda)
      return rope_backward_cuda(ex, dy, heads, table, positions, norm, x, rstd, dx, dgain);
  (f64 ? rope_backward_ref : rope_backward_cpu)(dy, heads, table, positions, norm, x, rstd, dx, dgain);
}

}  // namespace sps::ops
