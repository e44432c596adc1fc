#include <algorithm>

#include "base/threads.h"
#include "ops/clip/clip_kernels.h"
#include "tensor/arena.h"

namespace sps::ops {

namespace {

double square_sum(const float* x, int64_t n) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += double(x[i]) * double(x[i]);
  return sum;
}

}  // namespace

double sum_of_squares_cpu(Tensor x) {
  if (x.empty()) return 0;
  if (x.dense()) x = x.reshaped(1, x.count());
  // A block is a piece of a row, or several rows where they are short.
  constexpr int64_t kBlock = 1 << 15;
  const int64_t per_row = (x.cols + kBlock - 1) / kBlock;
  const int64_t rows_at_once = std::max<int64_t>(1, kBlock / x.cols);
  const int64_t blocks = (x.rows + rows_at_once - 1) / rows_at_once * per_row;
  auto* partials =
      reinterpret_cast<double*>(thread_scratch(ScratchSlot::kernel, size_t(blocks) * sizeof(double)));
  parallel_for(blocks, [&](int64_t b) {
    const int64_t first = b / per_row * rows_at_once, from = b % per_row * kBlock;
    double sum = 0;
    for (int64_t r = first; r < std::min(x.rows, first + rows_at_once); ++r)
      sum += square_sum(x.row<float>(r) + from, std::min(kBlock, x.cols - from));
    partials[b] = sum;
  });
  double sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += partials[b];
  return sum;
}

}  // namespace sps::ops
