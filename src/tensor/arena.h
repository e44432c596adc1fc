// Arena: all memory of a training step, planned once. The owner describes its tensors twice with the same
// code: first against a planning arena, which hands out shapes without memory and adds up the bytes, then
// against the real one. Tensors are cache-line aligned, and nothing is freed one by one; `Scope` gives back
// everything that was taken inside it, so memory that is only needed for a moment is shared.
#pragma once

#include <cstddef>

#include "tensor/memory.h"

namespace sps {

class Arena {
 public:
  Arena() = default;                   // plans: tensors have null data
  Arena(size_t bytes, Device device);  // holds `bytes`, zeroed
  Arena(Arena&&) = default;
  Arena& operator=(Arena&&) = default;

  // Uninitialised. Fails the process if the plan was for less (SPS_CHECK: the two passes differ).
  Tensor take(DType dtype, int64_t rows, int64_t cols);

  bool planning() const { return memory_.data() == nullptr; }
  size_t used() const { return used_; }
  size_t peak() const { return peak_; }  // bytes that a real arena needs

  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), mark_(arena.used_) {}
    ~Scope() { arena_.used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    size_t mark_;
  };

 private:
  Bytes memory_;
  Device device_ = Device::cpu;
  size_t used_ = 0, peak_ = 0;
};

// Per-thread scratch for the insides of CPU kernels: grows to the largest request and stays, so the second
// step allocates nothing. Valid until the same thread asks for the same slot again.
enum class ScratchSlot { gemm, kernel };
std::byte* thread_scratch(ScratchSlot slot, size_t bytes);
size_t thread_scratch_growths();  // how often any thread's scratch has grown: constant once a step has run
size_t thread_scratch_bytes();    // held by all threads together

}  // namespace sps
