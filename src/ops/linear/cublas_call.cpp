#include <algorithm>
#include <cstdint>

#include "ops/linear/cublas.h"

namespace sps::ops {

namespace {

// No kernel loads more than 16 bytes at once. Telling more would make the algorithm, and with it the bits,
// depend on where an arena happens to begin.
constexpr uintptr_t kMostAlignment = 16;

int alignment_of(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return int(std::min(address & (~address + 1), kMostAlignment));
}

// A single row may have any stride.
int64_t leading_dimension(const Tensor& t) {
  return t.rows > 1 ? t.stride : t.cols;
}

}  // namespace

CublasCall cublas_call(Tensor a, Transposed a_transposed, Tensor b, Transposed b_transposed, Tensor c,
                       Accumulate acc) {
  CublasCall call;
  CublasShape& s = call.shape;
  s.m = c.cols, s.n = c.rows;
  s.k = a_transposed == Transposed::yes ? a.rows : a.cols;
  SPS_CHECK(s.m > 0 && s.n > 0 && s.k > 0);
  call.first = b.data, s.first_ld = leading_dimension(b), s.first_alignment = alignment_of(b.data);
  call.second = a.data, s.second_ld = leading_dimension(a), s.second_alignment = alignment_of(a.data);
  call.result = c.data, s.result_ld = leading_dimension(c), s.result_alignment = alignment_of(c.data);
  s.first_transposed = b_transposed == Transposed::yes;
  s.second_transposed = a_transposed == Transposed::yes;
  s.accumulate = acc == Accumulate::yes;
  s.act = a.dtype, s.out = c.dtype;
  return call;
}

}  // namespace sps::ops
