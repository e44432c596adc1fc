// Bound by memory: a row is read once from memory (sum of squares, with the addition and the store of s), the
// second pass finds it in the first-level cache.
#include "ops/rmsnorm/rmsnorm_kernels.h"
#include "ops/rmsnorm/rmsnorm_lanes.h"
#include "ops/rowwise.h"

namespace sps::ops {

namespace {

void zero_row(Tensor t, int64_t r) {
  std::memset(static_cast<std::byte*>(t.data) + size_t(r * t.stride) * dtype_size(t.dtype), 0,
              size_t(t.cols) * dtype_size(t.dtype));
}

void zero_unpicked(Tensor ds, Tensor ds_act, std::span<const int32_t> pick) {
  parallel_chunks(ds.rows, chunk_rows(ds.cols), [&](int64_t begin, int64_t end) {
    auto next = std::lower_bound(pick.begin(), pick.end(), begin);
    for (int64_t r = begin; r < end; ++r) {
      if (next != pick.end() && *next == r) {
        ++next;
        continue;
      }
      zero_row(ds, r);
      if (ds_act) zero_row(ds_act, r);
    }
  });
}

template <class Act, bool Residual, bool Copy>
void backward(Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds, Tensor ds_act,
              Tensor dgain, std::span<const int32_t> pick) {
  const int64_t d = s.cols;
  const float* g = gain.as<float>();
  const float* sums = sum_over_rows(dy.rows, d, [&](int64_t begin, int64_t end, float* partial) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t to = pick.empty() ? r : pick[size_t(r)];
      rmsnorm_gradient_row<Act, Residual, Copy>(dy.row<Act>(r), s.row<float>(r), g, *rstd.row<float>(r),
                                                Residual ? dres.row<float>(r) : nullptr, ds.row<float>(to),
                                                Copy ? ds_act.row<Act>(to) : nullptr, partial, d);
    }
  });
  float* dg = dgain.as<float>();
  for (int64_t c = 0; c < d; ++c) dg[c] += sums[c];
}

}  // namespace

void rmsnorm_forward_cpu(Tensor x, Tensor delta, Tensor gain, float eps, Tensor s, Tensor y, Tensor rstd,
                         std::span<const int32_t> pick) {
  const int64_t d = s.cols;
  const float* g = gain.as<float>();
  with_type(y.dtype, [&](auto zero) {
    using Act = decltype(zero);
    parallel_chunks(s.rows, chunk_rows(d), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t from = pick.empty() ? r : pick[size_t(r)];
        *rstd.row<float>(r) =
            rmsnorm_row<Act>(x.row<float>(x.rows == 1 ? 0 : from), delta ? delta.row<Act>(from) : nullptr, g,
                             eps, s.row<float>(r), y.row<Act>(r), d);
      }
    });
  });
}

void rmsnorm_backward_cpu(Tensor dy, Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds,
                          Tensor ds_act, Tensor dgain, std::span<const int32_t> pick) {
  if (ds.rows != dy.rows) zero_unpicked(ds, ds_act, pick);
  with_type(dy.dtype, [&](auto zero) {
    using Act = decltype(zero);
    const auto run = dres ? (ds_act ? backward<Act, true, true> : backward<Act, true, false>)
                          : (ds_act ? backward<Act, false, true> : backward<Act, false, false>);
    run(dy, s, gain, rstd, dres, ds, ds_act, dgain, pick);
  });
}

}  // namespace sps::ops
