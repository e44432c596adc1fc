#include "ops/rows/rows_kernels.h"
#include "ops/rowwise.h"
#include "ops/vec.h"

namespace sps::ops {

void copy_rows_cpu(Tensor x, Tensor y) {
  const int64_t cols = y.cols;
  with_type(x.dtype, [&](auto zero_x) {
    with_type(y.dtype, [&](auto zero_y) {
      using X = decltype(zero_x);
      using Y = decltype(zero_y);
      parallel_chunks(y.rows, chunk_rows(cols), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const X* from = x.row<X>(x.rows == 1 ? 0 : r);
          Y* to = y.row<Y>(r);
          if constexpr (std::is_same_v<X, Y>) {
            std::memcpy(to, from, size_t(cols) * sizeof(X));
          } else {
            for_lanes(cols,
                      [&](int64_t c, auto mask) { store_lanes(to + c, load_lanes(from + c, mask), mask); });
          }
        }
      });
    });
  });
}

void add_rows_cpu(Tensor a, Tensor b, Tensor y) {
  const int64_t cols = y.cols;
  with_type(a.dtype, [&](auto zero_a) {
    with_type(b.dtype, [&](auto zero_b) {
      with_type(y.dtype, [&](auto zero_y) {
        using A = decltype(zero_a);
        using B = decltype(zero_b);
        using Y = decltype(zero_y);
        parallel_chunks(y.rows, chunk_rows(cols), [&](int64_t begin, int64_t end) {
          for (int64_t r = begin; r < end; ++r) {
            const A* pa = a.row<A>(a.rows == 1 ? 0 : r);
            const B* pb = b.row<B>(r);
            Y* to = y.row<Y>(r);
            for_lanes(cols, [&](int64_t c, auto mask) {
              store_lanes(to + c, load_lanes(pa + c, mask) + load_lanes(pb + c, mask), mask);
            });
          }
        });
      });
    });
  });
}

void sum_rows_cpu(Tensor x, Tensor y) {
  const int64_t cols = x.cols;
  const float* sums = nullptr;
  with_type(x.dtype, [&](auto zero) {
    using X = decltype(zero);
    sums = sum_over_rows(x.rows, cols, [&](int64_t begin, int64_t end, float* partial) {
      for (int64_t r = begin; r < end; ++r) {
        const X* from = x.row<X>(r);
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) partial[c] += to_f32(from[c]);
      }
    });
  });
  with_type(y.dtype, [&](auto zero) {
    using Y = decltype(zero);
    Y* to = y.as<Y>();
    for (int64_t c = 0; c < cols; ++c) to[c] = from_f32<Y>(to_f32(to[c]) + sums[c]);
  });
}

void fill_cpu(Tensor y, float value) {
  const int64_t cols = y.cols;
  with_type(y.dtype, [&](auto zero) {
    using Y = decltype(zero);
    const Y v = from_f32<Y>(value);
    parallel_chunks(y.rows, chunk_rows(cols), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) std::fill_n(y.row<Y>(r), cols, v);
    });
  });
}

}  // namespace sps::ops
