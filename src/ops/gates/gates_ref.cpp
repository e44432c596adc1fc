#include <cmath>

#include "ops/gates/gates_kernels.h"

namespace sps::ops {

namespace {

double sigmoid(double z) {
  return 1 / (1 + std::exp(-z));
}

double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += x[c] * y[c];
  return sum;
}

// What one stream contributes: df (+)= s d, dx = t w, dw += t x.
void scatter_backward_stream(const double* d, const double* x, const double* f, const double* w, double s,
                             bool first, double* df, double* dx, double* dw, int64_t n) {
  const double t = dot(d, f, n) * s * (1 - s);
  for (int64_t c = 0; c < n; ++c) {
    df[c] = (first ? 0 : df[c]) + s * d[c];
    dx[c] = t * w[c];
    dw[c] += t * x[c];
  }
}

}  // namespace

void pool_forward_ref(Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor m) {
  const int64_t d = a.cols;
  const double* w = w_in.as<double>();
  for (int64_t r = 0; r < a.rows; ++r) {
    const double *ar = a.row<double>(r), *pr = p.row<double>(r);
    const double gate = sigmoid(dot(w, ar, d) + dot(w + d, pr, d));
    *g.row<double>(r) = gate;
    for (int64_t c = 0; c < d; ++c) m.row<double>(r)[c] = gate * ar[c] + (1 - gate) * pr[c];
  }
}

void pool_backward_ref(Tensor dm, Tensor a, Tensor p, Tensor w_in, Tensor g, Tensor da, Tensor dp,
                       Tensor dw_in) {
  const int64_t d = a.cols;
  const double* w = w_in.as<double>();
  double* dw = dw_in.as<double>();
  for (int64_t r = 0; r < a.rows; ++r) {
    const double *ar = a.row<double>(r), *pr = p.row<double>(r), *dmr = dm.row<double>(r);
    const double gate = *g.row<double>(r);
    const double t = (dot(dmr, ar, d) - dot(dmr, pr, d)) * gate * (1 - gate);
    for (int64_t c = 0; c < d; ++c) {
      da.row<double>(r)[c] += gate * dmr[c] + t * w[c];
      dp.row<double>(r)[c] += (1 - gate) * dmr[c] + t * w[d + c];
      dw[c] += t * ar[c];
      dw[d + c] += t * pr[c];
    }
  }
}

void scatter_forward_ref(Tensor x, Tensor f, Tensor w, Tensor s, Tensor out) {
  for (int64_t r = 0; r < f.rows; ++r) {
    const double gate = sigmoid(dot(w.as<double>(), x.row<double>(r), f.cols));
    *s.row<double>(r) = gate;
    for (int64_t c = 0; c < f.cols; ++c) out.row<double>(r)[c] = gate * f.row<double>(r)[c];
  }
}

void scatter_backward_ref(Tensor d_out_a, Tensor d_out_p, Tensor a, Tensor p, Tensor f, Tensor w_a,
                          Tensor w_p, Tensor s_a, Tensor s_p, Tensor df, Tensor da, Tensor dp, Tensor dw_a,
                          Tensor dw_p) {
  const int64_t d = f.cols;
  for (int64_t r = 0; r < f.rows; ++r) {
    scatter_backward_stream(d_out_p.row<double>(r), p.row<double>(r), f.row<double>(r), w_p.as<double>(),
                            *s_p.row<double>(r), true, df.row<double>(r), dp.row<double>(r),
                            dw_p.as<double>(), d);
    if (d_out_a) {
      scatter_backward_stream(d_out_a.row<double>(r), a.row<double>(r), f.row<double>(r), w_a.as<double>(),
                              *s_a.row<double>(r), false, df.row<double>(r), da.row<double>(r),
                              dw_a.as<double>(), d);
    } else {
      for (int64_t c = 0; c < d; ++c) da.row<double>(r)[c] = 0;
    }
  }
}

}  // namespace sps::ops
