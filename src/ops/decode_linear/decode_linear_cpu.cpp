// Every number of y is one dot product along k in the lanes of one vector, in order, and the lanes are added
// up in a fixed order: how many rows and columns are computed side by side changes nothing.
#include <algorithm>

#include "base/threads.h"
#include "ops/decode_linear/decode_linear_kernels.h"
#include "ops/dot_lanes.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops {

namespace {

constexpr int64_t kRows = 64, kCols = 32;  // of a piece of work

// sums[r * (kFloats / Rows) + c] = x[r] . w[c]. Asks for what lies `ahead` of the weights.
template <class T, int Rows>
void dots(const T* x, int64_t x_stride, const T* const* w, int64_t k, int64_t ahead, float* sums) {
  constexpr int cols = kFloats / Rows;
  Floats sum[kFloats] = {};
  const auto step = [&](auto&& load, int64_t i) __attribute__((always_inline)) {
    Floats a[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) a[r] = load(x + r * x_stride + i);
#pragma GCC unroll 16
    for (int c = 0; c < cols; ++c) {
      const Floats b = load(w[c] + i);
      __builtin_prefetch(w[c] + ahead + i);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) sum[r * cols + c] += a[r] * b;
    }
  };
  int64_t i = 0;
  for (; i + kFloats <= k; i += kFloats)
    step(
        [](const T* p) __attribute__((always_inline)) { return load_floats(p); }, i);
  if (i < k)
    step(
        [&](const T* p) __attribute__((always_inline)) { return load_floats(p, k - i); }, i);
  store_floats(sums, sums_of_vectors(sum));
}

template <class T, class Y, int Rows>
void columns(Tensor x, Tensor w, Tensor y, int64_t row, int64_t begin, int64_t end) {
  constexpr int cols = kFloats / Rows;
  float sums[kFloats];
  const T* weights[cols];
  for (int64_t col = begin; col < end; col += cols) {
    // Past the last column the last one is computed again and not stored.
    for (int64_t c = 0; c < cols; ++c) weights[c] = w.row<T>(std::min(col + c, end - 1));
    dots<T, Rows>(x.row<T>(row), x.stride, weights, x.cols, cols * w.stride, sums);
    for (int64_t r = 0; r < Rows; ++r)
      for (int64_t c = 0; c < std::min<int64_t>(cols, end - col); ++c)
        y.row<Y>(row + r)[col + c] = from_f32<Y>(sums[r * cols + c]);
  }
}

template <class T, class Y>
void product(Tensor x, Tensor w, Tensor y) {
  const auto pieces = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const int64_t row_pieces = pieces(x.rows, kRows);
  parallel_for(row_pieces * pieces(w.rows, kCols), [&](int64_t i) {
    const int64_t first = i % row_pieces * kRows, last = std::min(first + kRows, x.rows);
    const int64_t begin = i / row_pieces * kCols, end = std::min(begin + kCols, w.rows);
    // Few columns at a time meet all rows, so that they come from memory once and stay in the first-level
    // cache.
    const int64_t fours = (last - first) / 4 * 4 + first;
    for (int64_t col = begin; col < end; col += kFloats) {
      const int64_t stop = std::min<int64_t>(col + kFloats, end);
      for (int64_t c = col; c < stop; c += kFloats / 4)
        for (int64_t row = first; row < fours; row += 4)
          columns<T, Y, 4>(x, w, y, row, c, std::min<int64_t>(c + kFloats / 4, stop));
      int64_t row = fours;
      if (row + 2 <= last) columns<T, Y, 2>(x, w, y, row, col, stop), row += 2;
      if (row < last) columns<T, Y, 1>(x, w, y, row, col, stop);
    }
  });
}

}  // namespace

void decode_linear_cpu(Tensor x, Tensor w, Tensor y) {
  if (x.dtype == DType::f32) return product<float, float>(x, w, y);
  if (y.dtype == DType::f32) return product<bf16, float>(x, w, y);
  product<bf16, bf16>(x, w, y);
}

}  // namespace sps::ops
