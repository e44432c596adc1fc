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

double& at(const Tensor& t, int64_t row) {
  return *t.row<double>(row);
}

}  // namespace

void pool_forward_ref(Tensor a, Tensor p, const GateWeights& w, const GateRows& gates, Tensor m) {
  const int64_t d = a.cols;
  const double* w_in = w.in.as<double>();
  for (int64_t r = 0; r < a.rows; ++r) {
    const double *ar = a.row<double>(r), *pr = p.row<double>(r);
    const double g = at(gates.in, r) = sigmoid(dot(w_in, ar, d) + dot(w_in + d, pr, d));
    at(gates.p, r) = sigmoid(dot(w.p.as<double>(), pr, d));
    if (w.a) at(gates.a, r) = sigmoid(dot(w.a.as<double>(), ar, d));
    for (int64_t c = 0; c < d; ++c) m.row<double>(r)[c] = g * ar[c] + (1 - g) * pr[c];
  }
}

void pool_backward_ref(Tensor dm, Tensor a, Tensor p, const GateWeights& w, const GateRows& gates,
                       const GateRows& t, Tensor da, Tensor dp, const GateWeights& dw) {
  const int64_t d = a.cols;
  const double* w_in = w.in.as<double>();
  double* dw_in = dw.in.as<double>();
  for (int64_t r = 0; r < a.rows; ++r) {
    const double *ar = a.row<double>(r), *pr = p.row<double>(r), *dmr = dm.row<double>(r);
    const double g = at(gates.in, r), t_in = (dot(dmr, ar, d) - dot(dmr, pr, d)) * g * (1 - g);
    for (int64_t c = 0; c < d; ++c) {
      da.row<double>(r)[c] = g * dmr[c] + t_in * w_in[c];
      dp.row<double>(r)[c] = (1 - g) * dmr[c] + t_in * w_in[d + c] + at(t.p, r) * w.p.as<double>()[c];
      dw_in[c] += t_in * ar[c];
      dw_in[d + c] += t_in * pr[c];
      dw.p.as<double>()[c] += at(t.p, r) * pr[c];
      if (!t.a) continue;
      da.row<double>(r)[c] += at(t.a, r) * w.a.as<double>()[c];
      dw.a.as<double>()[c] += at(t.a, r) * ar[c];
    }
  }
}

void scatter_forward_ref(Tensor f, const GateRows& gates, Tensor out_a, Tensor out_p) {
  for (int64_t r = 0; r < f.rows; ++r)
    for (int64_t c = 0; c < f.cols; ++c) {
      out_p.row<double>(r)[c] = at(gates.p, r) * f.row<double>(r)[c];
      if (out_a) out_a.row<double>(r)[c] = at(gates.a, r) * f.row<double>(r)[c];
    }
}

void scatter_backward_ref(Tensor d_out_a, Tensor d_out_p, Tensor f, const GateRows& gates, Tensor df,
                          const GateRows& t) {
  const int64_t d = f.cols;
  for (int64_t r = 0; r < f.rows; ++r) {
    const double *fr = f.row<double>(r), *d_p = d_out_p.row<double>(r);
    const double s_p = at(gates.p, r);
    at(t.p, r) = dot(d_p, fr, d) * s_p * (1 - s_p);
    for (int64_t c = 0; c < d; ++c) df.row<double>(r)[c] = s_p * d_p[c];
    if (!d_out_a) continue;
    const double* d_a = d_out_a.row<double>(r);
    const double s_a = at(gates.a, r);
    at(t.a, r) = dot(d_a, fr, d) * s_a * (1 - s_a);
    for (int64_t c = 0; c < d; ++c) df.row<double>(r)[c] += s_a * d_a[c];
  }
}

}  // namespace sps::ops
