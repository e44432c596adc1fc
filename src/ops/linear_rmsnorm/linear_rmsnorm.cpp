#include "ops/linear_rmsnorm/linear_rmsnorm.h"

#include "ops/linear/linear.h"
#include "ops/linear/row_product.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rmsnorm/rmsnorm_lanes.h"
#include "ops/rowwise.h"

namespace sps::ops {

#ifdef SPS_AMX

namespace {

using namespace tiles;

// The product's last 64 rows, rounded as they would have been stored. A line of space between them: rows of
// 4 KiB would meet in one set of the first-level cache.
class Strip {
 public:
  explicit Strip(int64_t d) : stride_(d + kSide) {}
  size_t bytes() const { return size_t(kRows * stride_) * sizeof(bf16); }
  void place(std::byte* at) { at_ = reinterpret_cast<bf16*>(at); }
  bf16* row(int64_t row) const { return at_ + (row & (kRows - 1)) * stride_; }

 private:
  static constexpr int64_t kRows = 2 * kSide;
  int64_t stride_;
  bf16* at_ = nullptr;
};

struct Product {
  static constexpr int64_t kPanels = 1;
  Strip strip;
  int64_t begin_row = 0;

  explicit Product(int64_t d) : strip(d) {}
  static int64_t panel(int64_t unit, int64_t) { return unit; }
  size_t scratch_bytes() const { return strip.bytes(); }
  void begin(int64_t row, std::byte* scratch) {
    begin_row = row;
    strip.place(scratch);
  }
  void row(const float* const* sums, int64_t row, int64_t unit, int64_t r) const {
    _mm512_store_si512(strip.row(row - begin_row) + unit * kSide, rounded_row(sums[0], r));
  }
  const bf16* made(int64_t row) const { return strip.row(row - begin_row); }
};

struct Forward : Product {
  Tensor residual, gain, s, y, rstd;
  float eps;

  Forward(Tensor residual, Tensor gain, float eps, Tensor s, Tensor y, Tensor rstd)
      : Product(s.cols), residual(residual), gain(gain), s(s), y(y), rstd(rstd), eps(eps) {}
  static int64_t granule() { return kSide; }
  void whole_row(int64_t row) const {
    *rstd.row<float>(row) = rmsnorm_row<bf16>(residual.row<float>(row), made(row), gain.as<float>(), eps,
                                              s.row<float>(row), y.row<bf16>(row), s.cols);
  }
  void ahead(int64_t row, int64_t unit) const {
    const int64_t col = unit * kSide;
    if (s.data != residual.data) prefetch(residual.row<float>(row) + col, kSide);
    prefetch<true>(s.row<float>(row) + col, kSide);
    prefetch<true>(y.row<bf16>(row) + col, kSide);
  }
};

template <bool Residual, bool Copy>
struct Backward : Product {
  Tensor s, gain, rstd, dres, ds, ds_act;
  const PartialSums* sums;

  Backward(Tensor s, Tensor gain, Tensor rstd, Tensor dres, Tensor ds, Tensor ds_act, const PartialSums& sums)
      : Product(s.cols), s(s), gain(gain), rstd(rstd), dres(dres), ds(ds), ds_act(ds_act), sums(&sums) {}
  int64_t granule() const { return sums->chunk(); }
  void whole_row(int64_t row) const {
    const int64_t chunk = row / sums->chunk();
    if (row % sums->chunk() == 0) sums->clear(chunk);
    rmsnorm_gradient_row<bf16, Residual, Copy>(
        made(row), s.row<float>(row), gain.as<float>(), *rstd.row<float>(row),
        Residual ? dres.row<float>(row) : nullptr, ds.row<float>(row), Copy ? ds_act.row<bf16>(row) : nullptr,
        sums->of_chunk(chunk), s.cols);
  }
  void ahead(int64_t row, int64_t unit) const {
    const int64_t col = unit * kSide;
    prefetch(s.row<float>(row) + col, kSide);
    if (Residual && dres.data != ds.data) prefetch(dres.row<float>(row) + col, kSide);
    prefetch<true>(ds.row<float>(row) + col, kSide);
    if (Copy) prefetch<true>(ds_act.row<bf16>(row) + col, kSide);
  }
};

// made [rows, d] = x times a matrix: a row of it meets all of that matrix while that stays in cache.
bool is_fast(Tensor x, Tensor made) {
  return row_product_is_fast(x) && made.dtype == DType::bf16 && made.cols > 0 && made.cols % kSide == 0 &&
         panels_stay_in_cache(made.cols, x.cols);
}

bool is_f32(Tensor t, int64_t rows, int64_t cols) {
  return t.dtype == DType::f32 && is_shape(t, rows, cols);
}

}  // namespace

#endif

void linear_rmsnorm_forward(const Exec& ex, Tensor x, Tensor w, Tensor residual, Tensor gain, float eps,
                            Tensor delta, Tensor s, Tensor y, Tensor rstd) {
#ifdef SPS_AMX
  const int64_t rows = x.rows, d = s.cols;
  if (ex.device == Device::cpu && is_fast(x, y) && residual.rows == rows) {
    SPS_CHECK(w.dtype == DType::bf16 && is_shape(w, d, x.cols) && is_f32(gain, 1, d));
    SPS_CHECK(is_f32(residual, rows, d) && is_f32(s, rows, d) && is_f32(rstd, rows, 1) &&
              is_shape(y, rows, d));
    SPS_CHECK(s.data != residual.data || s.stride == residual.stride);
    return tiles::row_product(x, w, true, d, d / kSide, Forward(residual, gain, eps, s, y, rstd));
  }
#endif
  linear_forward(ex, x, w, delta);
  rmsnorm_forward(ex, residual, delta, gain, eps, s, y, rstd);
}

void linear_rmsnorm_backward(const Exec& ex, Tensor dy, Tensor w, Tensor dn, Tensor s, Tensor gain,
                             Tensor rstd, Tensor dres, Tensor ds, Tensor ds_act, Tensor dgain) {
#ifdef SPS_AMX
  const int64_t rows = dy.rows, d = s.cols;
  if (ex.device == Device::cpu && is_fast(dy, dn)) {
    SPS_CHECK(w.dtype == DType::bf16 && is_shape(w, dy.cols, d) && is_shape(dn, rows, d));
    SPS_CHECK(is_f32(s, rows, d) && is_f32(gain, 1, d) && is_f32(rstd, rows, 1) && is_f32(ds, rows, d) &&
              is_f32(dgain, 1, d));
    if (dres) SPS_CHECK(is_f32(dres, rows, d));
    if (ds_act) SPS_CHECK(ds_act.dtype == DType::bf16 && is_shape(ds_act, rows, d));
    const PartialSums sums(rows, d);
    const auto run = [&]<bool Residual, bool Copy>() {
      tiles::row_product(dy, w, false, d, d / kSide,
                         Backward<Residual, Copy>(s, gain, rstd, dres, ds, ds_act, sums));
    };
    if (dres)
      ds_act ? run.operator()<true, true>() : run.operator()<true, false>();
    else
      ds_act ? run.operator()<false, true>() : run.operator()<false, false>();
    const float* total = sums.total();
    for (int64_t c = 0; c < d; ++c) dgain.as<float>()[c] += total[c];
    return;
  }
#endif
  linear_backward_input(ex, dy, w, dn);
  rmsnorm_backward(ex, dn, s, gain, rstd, dres, ds, ds_act, dgain);
}

}  // namespace sps::ops
