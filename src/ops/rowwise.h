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

// Sums over rows that are cut into chunks of chunk_rows(cols): a partial sum of `cols` floats for each chunk,
// added in the order of the chunks. All of it lies in the calling thread's kernel scratch, until its next
// request.
class PartialSums {
 public:
  PartialSums(int64_t rows, int64_t cols)
      : cols_(cols), chunk_(chunk_rows(cols)), chunks_(std::max<int64_t>(1, (rows + chunk_ - 1) / chunk_)) {
    const size_t bytes = size_t(chunks_ * cols) * sizeof(float);
    partials_ = reinterpret_cast<float*>(thread_scratch(ScratchSlot::kernel, bytes));
  }
  int64_t chunk() const { return chunk_; }
  int64_t chunks() const { return chunks_; }
  float* of_chunk(int64_t i) const { return partials_ + i * cols_; }
  void clear(int64_t i) const { std::memset(of_chunk(i), 0, size_t(cols_) * sizeof(float)); }

  // Once all chunks are done.
  const float* total() const {
    constexpr int64_t kWorthThreads = 1 << 16, kSlice = 256;
    parallel_chunks(cols_, chunks_ * cols_ > kWorthThreads ? kSlice : cols_, [&](int64_t begin, int64_t end) {
      float* total = partials_;
      for (int64_t i = 1; i < chunks_; ++i) {
        const float* partial = of_chunk(i);
#pragma omp simd
        for (int64_t c = begin; c < end; ++c) total[c] += partial[c];
      }
    });
    return partials_;
  }

 private:
  int64_t cols_, chunk_, chunks_;
  float* partials_;
};

// Calls body(begin, end, partial) for each chunk of rows, where `partial` holds `cols` zeros to which the
// body adds what its rows contribute. Returns the sums; for where they lie see PartialSums, whose scratch the
// body must not ask for.
template <class Body>
const float* sum_over_rows(int64_t rows, int64_t cols, Body&& body) {
  const PartialSums sums(rows, cols);
  parallel_for(sums.chunks(), [&](int64_t i) {
    sums.clear(i);
    body(i * sums.chunk(), std::min(rows, (i + 1) * sums.chunk()), sums.of_chunk(i));
  });
  return sums.total();
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
