#include <array>

#include "ops/embedding/embedding_kernels.h"
#include "ops/rowwise.h"

namespace sps::ops {

void embedding_forward_cpu(std::span<const int32_t> ids, Tensor table, Tensor vector, Tensor y) {
  const int64_t d = y.cols;
  const float* v = vector ? vector.as<float>() : nullptr;
  parallel_chunks(y.rows, chunk_rows(d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = table.row<float>(ids[size_t(r)]);
      float* to = y.row<float>(r);
      if (v == nullptr) {
        std::memcpy(to, from, size_t(d) * sizeof(float));
        continue;
      }
#pragma omp simd
      for (int64_t c = 0; c < d; ++c) to[c] = from[c] + v[c];
    }
  });
}

void embedding_backward_cpu(std::span<const int32_t> ids, Tensor dy, Tensor dtable, Tensor dvector) {
  const int64_t d = dy.cols;
  // Pieces own ids, so equal ids meet in one piece and add in row order. Cutting by columns instead would
  // share the work evenly even if one id dominates, but touches each page of a large table once per piece:
  // three to four times slower at vocab 50304, d 1024.
  constexpr int64_t kPieces = 16;
  const auto rows =
      std::span(reinterpret_cast<int32_t*>(thread_scratch(ScratchSlot::kernel, ids.size() * sizeof(int32_t))),
                ids.size());
  std::array<int64_t, kPieces + 1> begin{};
  for (const int32_t id : ids) ++begin[size_t(id % kPieces + 1)];
  for (size_t p = 0; p < kPieces; ++p) begin[p + 1] += begin[p];
  auto next = begin;
  for (size_t r = 0; r < ids.size(); ++r) rows[size_t(next[size_t(ids[r] % kPieces)]++)] = int32_t(r);
  parallel_for(kPieces, [&](int64_t p) {
    for (int64_t i = begin[size_t(p)]; i < begin[size_t(p) + 1]; ++i) {
      const int32_t r = rows[size_t(i)];
      const float* from = dy.row<float>(r);
      float* to = dtable.row<float>(ids[size_t(r)]);
#pragma omp simd
      for (int64_t c = 0; c < d; ++c) to[c] += from[c];
    }
  });
  if (!dvector) return;
  const float* sums = sum_over_rows(dy.rows, d, [&](int64_t begin, int64_t end, float* partial) {
    for (int64_t r = begin; r < end; ++r) {
      const float* from = dy.row<float>(r);
#pragma omp simd
      for (int64_t c = 0; c < d; ++c) partial[c] += from[c];
    }
  });
  float* dv = dvector.as<float>();
  for (int64_t c = 0; c < d; ++c) dv[c] += sums[c];
}

}  // namespace sps::ops
