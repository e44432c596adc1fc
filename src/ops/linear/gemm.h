// One matrix product on one thread, made by oneDNN once per shape and kept: C[m, n] (+)= A[m, k] B[k, n].
// A and C are rows with a stride. B is either used where it lies or packed first into the layout that the
// product reads fastest; a packed B serves any number of products. The kernel behind a shape never depends on
// the number of threads, so neither do its bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tensor/tensor.h"

namespace sps::ops {

struct GemmShape {
  int64_t m = 0, n = 0, k = 0;        // all > 0
  int64_t lda = 0, ldb = 0, ldc = 0;  // elements from one stored row to the next
  DType act = DType::f32;             // of A and B: f32 or bf16
  DType out = DType::f32;             // of C: f32 or bf16
  bool b_transposed = false;          // B is stored as [n, k]
  bool b_packed = false;
  bool accumulate = false;  // C += instead of C =
  auto operator<=>(const GemmShape&) const = default;
};

class Gemm {
 public:
  virtual ~Gemm() = default;

  // Packing: `packed` holds packed_bytes() (a multiple of 64, 64-byte aligned); `scratch`
  // pack_scratch_bytes().
  virtual size_t packed_bytes() const = 0;
  virtual size_t pack_scratch_bytes() const = 0;
  virtual void pack(const void* b, void* packed, std::byte* scratch) const = 0;

  // `b` is packed if the shape says so. `scratch` holds scratch_bytes(). Thread-safe.
  virtual size_t scratch_bytes() const = 0;
  virtual void run(const void* a, const void* b, void* c, std::byte* scratch) const = 0;
};

// The product of this shape, made on the first call (milliseconds) and then found in a cache. Thread-safe.
std::shared_ptr<const Gemm> find_gemm(const GemmShape& shape);

// Makes find_gemm convert bf16 operands to f32 and multiply those, as it does on CPUs without bf16
// instructions.
class ForceBf16Fallback {
 public:
  ForceBf16Fallback();
  ~ForceBf16Fallback();
  ForceBf16Fallback(const ForceBf16Fallback&) = delete;
  ForceBf16Fallback& operator=(const ForceBf16Fallback&) = delete;
};

bool cpu_multiplies_bf16();  // AVX-512 bf16 or AMX instructions are there and not forced away

}  // namespace sps::ops
