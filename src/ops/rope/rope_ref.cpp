#include <cmath>
#include <vector>

#include "ops/rope/rope_kernels.h"

namespace sps::ops {

namespace {

// Turns the pairs of one head by +angle or, with sign = -1, back.
void rotate(std::vector<double>& u, const RopeTable& table, int64_t position, double sign) {
  const int64_t pairs = table.cos.cols;
  const bool adjacent = table.pairs == RopePairs::adjacent;
  for (int64_t m = 0; m < pairs; ++m) {
    double& a = u[size_t(adjacent ? 2 * m : m)];
    double& b = u[size_t(adjacent ? 2 * m + 1 : m + pairs)];
    const double c = table.cos.row<double>(position)[m], s = sign * table.sin.row<double>(position)[m];
    const double turned_a = a * c - b * s, turned_b = a * s + b * c;
    a = turned_a, b = turned_b;
  }
}

}  // namespace

void rope_forward_ref(Tensor x, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                      const QkNorm& norm, Tensor rstd, Tensor y) {
  const int64_t hd = y.cols / heads;
  std::vector<double> u(static_cast<size_t>(hd));
  for (int64_t r = 0; r < y.rows; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t from = x.rows == 1 ? 0 : r;
      const double* xh = x.row<double>(from) + h * hd;
      double k = 1;
      if (norm.gain) {
        double sum = 0;
        for (int64_t c = 0; c < hd; ++c) sum += xh[c] * xh[c];
        k = 1 / std::sqrt(sum / double(hd) + double(norm.eps));
        rstd.row<double>(from)[h] = k;
      }
      for (int64_t c = 0; c < hd; ++c)
        u[size_t(c)] = norm.gain ? xh[c] * k * norm.gain.as<double>()[c] : xh[c];
      rotate(u, table, positions[size_t(r)], 1);
      for (int64_t c = 0; c < hd; ++c) y.row<double>(r)[h * hd + c] = u[size_t(c)];
    }
}

void rope_backward_ref(Tensor dy, int64_t heads, const RopeTable& table, std::span<const int32_t> positions,
                       const QkNorm& norm, Tensor x, Tensor rstd, Tensor dx, Tensor dgain) {
  const int64_t hd = dy.cols / heads;
  std::vector<double> back(static_cast<size_t>(hd)), dn(static_cast<size_t>(hd));
  for (int64_t to = 0; to < dx.rows; ++to)
    for (int64_t h = 0; h < heads; ++h) {
      std::fill(dn.begin(), dn.end(), 0);
      for (int64_t r = dx.rows == 1 ? 0 : to; r < (dx.rows == 1 ? dy.rows : to + 1); ++r) {
        for (int64_t c = 0; c < hd; ++c) back[size_t(c)] = dy.row<double>(r)[h * hd + c];
        rotate(back, table, positions[size_t(r)], -1);
        for (int64_t c = 0; c < hd; ++c) dn[size_t(c)] += back[size_t(c)];
      }
      double* dxh = dx.row<double>(to) + h * hd;
      if (!norm.gain) {
        for (int64_t c = 0; c < hd; ++c) dxh[c] = dn[size_t(c)];
        continue;
      }
      const double* xh = x.row<double>(to) + h * hd;
      const double* g = norm.gain.as<double>();
      const double k = rstd.row<double>(to)[h];
      double mean = 0;
      for (int64_t c = 0; c < hd; ++c) mean += g[c] * dn[size_t(c)] * xh[c] * k / double(hd);
      for (int64_t c = 0; c < hd; ++c) {
        const double xhat = xh[c] * k;
        dgain.as<double>()[c] += dn[size_t(c)] * xhat;
        dxh[c] = k * (g[c] * dn[size_t(c)] - xhat * mean);
      }
    }
}

}  // namespace sps::ops
