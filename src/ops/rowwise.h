// What the CPU kernels that walk rows share: how rows are cut into pieces of work, sums over rows that have
// the same bits with any number of threads, and the step from a dtype to a C++ type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/threads.h"
#include "tensor/arena.h"
#include "tensor/tensor.h"

namespace sps::ops {

// Rows of one piece of work: enough to outweigh handing it to a thread, few enough to keep many cores busy.
// Depends on the problem alone.
inline int64_t chunk_rows(int64_t cols) {
  constexpr int64_t kElements = 1 << 16;
  return std::clamp<int64_t>(kElements / std::max<int64_t>(cols, 1), 16, 128);
}

// Calls body(begin, end, partial) for each chunk of rows, where `partial` holds `cols` zeros to which the
// body adds what its rows contribute; the partials are then added in the order of the chunks. Returns the
// sums: they lie in the calling thread's kernel scratch (so the body must not ask for that slot) until its
// next request.
template <class Body>
const float* sum_over_rows(int64_t rows, int64_t cols, Body&& body) {
  const int64_t size = chunk_rows(cols), chunks = std::max<int64_t>(1, (rows + size - 1) / size);
  auto* partials =
      reinterpret_cast<float*>(thread_scratch(ScratchSlot::kernel, size_t(chunks * cols) * sizeof(float)));
  parallel_for(chunks, [&](int64_t i) {
    float* partial = partials + i * cols;
    std::memset(partial, 0, size_t(cols) * sizeof(float));
    body(i * size, std::min(rows, (i + 1) * size), partial);
  });
  constexpr int64_t kWorthThreads = 1 << 16, kSlice = 256;
  parallel_chunks(cols, chunks * cols > kWorthThreads ? kSlice : cols, [&](int64_t begin, int64_t end) {
    for (int64_t i = 1; i < chunks; ++i) {
      const float* partial = partials + i * cols;
#pragma omp simd
      for (int64_t c = begin; c < end; ++c) partials[c] += partial[c];
    }
  });
  return partials;
}

// Calls f with a zero of the C++ type behind f32 or bf16.
template <class F>
void with_type(DType dtype, F&& f) {
  SPS_CHECK(dtype == DType::f32 || dtype == DType::bf16);
  dtype == DType::f32 ? f(float{}) : f(bf16{});
}

// Shapes as the operations check them.
inline bool is_shape(const Tensor& t, int64_t rows, int64_t cols) {
  return t.rows == rows && t.cols == cols;
}
inline bool is_act(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16;
}

}  // namespace sps::ops
