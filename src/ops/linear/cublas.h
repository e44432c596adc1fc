// One matrix product as cuBLASLt is told of it, and the plans (descriptors and the chosen algorithm) made
// once for each such description and kept.
//
// cuBLASLt's matrices are column-major; ours lie row by row. Rows of `cols` elements, `stride` apart, are the
// columns of the transposed matrix with leading dimension `stride`. So what is asked for is C^T = op(B)^T
// op(A)^T: our b comes first, our a second, and cuBLASLt's m and n are our columns and rows of c.
//
//   ours                 cuBLASLt's operand     as stored, column-major     transposed there
//   b [k, n]             first  [m', k]         n x k, which is m' x k      no
//   b [n, k], op = T     first  [m', k]         k x n                       yes
//   a [m, k]             second [k, n']         k x m, which is k x n'      no
//   a [k, m], op = T     second [k, n']         m x k                       yes
//   c [m, n]             result [m', n']        n x m, which is m' x n'
//
// Which gives   x w^T: (T, N)     dy w: (N, N)     dy^T x: (N, T).
#pragma once

#include <compare>
#include <string>
#include <vector>

#include "ops/linear/linear_kernels.h"

namespace sps::ops {

struct CublasShape {
  int64_t m = 0, n = 0, k = 0;  // of the column-major product
  int64_t first_ld = 0, second_ld = 0, result_ld = 0;
  bool first_transposed = false, second_transposed = false;
  bool accumulate = false;  // result += instead of result =
  DType act = DType::f32;   // of the operands
  DType out = DType::f32;
  int first_alignment = 0, second_alignment = 0, result_alignment = 0;  // bytes, of the first elements
  auto operator<=>(const CublasShape&) const = default;
};

struct CublasCall {
  CublasShape shape;
  const void *first = nullptr, *second = nullptr;
  void* result = nullptr;
};

// c (+)= op(a) op(b), none empty.
CublasCall cublas_call(Tensor a, Transposed a_transposed, Tensor b, Transposed b_transposed, Tensor c,
                       Accumulate acc);

// Runs the product on ex.stream. False, and nothing done, if cuBLASLt has no algorithm for it. The algorithm
// is cuBLASLt's first proposal whose sums do not depend on the order in which blocks finish. It follows from
// the shape alone, so that a run which is resumed gets the bits that it would have had.
bool run_cublas(const Exec& ex, const CublasCall& call);

// With true, products that are seen for the first time from now on try cuBLASLt's best proposals and keep the
// fastest. What is fastest is a matter of chance where two are close: bits are then the same throughout the
// process, but not those of the next one. Not for runs that must be resumed bit by bit. Changes no result of
// the call that tries. A product that is first seen while a graph is captured is not tried.
void tune_cublas(bool on);

// One line for each plan of the process: the shape, the proposal that was taken and what is known of its
// algorithm, and, if it was tuned, the times of all proposals.
std::vector<std::string> cublas_plans();

}  // namespace sps::ops
