#include "tensor/arena.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace sps {

namespace {

constexpr size_t kAlign = 256;  // what both a cache line and the GPU's widest accesses ask for

size_t align_up(size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

std::atomic<size_t> scratch_growths{0}, scratch_bytes{0};

struct ThreadBuffer {
  Bytes bytes;
  ~ThreadBuffer() { scratch_bytes -= bytes.size(); }
};

}  // namespace

Arena::Arena(size_t bytes, Device device) : memory_(bytes, memory_of(device)), device_(device) {}

Tensor Arena::take(DType dtype, int64_t rows, int64_t cols) {
  SPS_CHECK(rows >= 0 && cols >= 0);
  const size_t bytes = align_up(size_t(rows) * size_t(cols) * dtype_size(dtype));
  Tensor t{nullptr, rows, cols, cols, dtype, device_};
  if (!planning()) {
    SPS_CHECK(used_ + bytes <= memory_.size());
    t.data = memory_.data() + used_;
  }
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return t;
}

std::byte* thread_scratch(ScratchSlot slot, size_t bytes) {
  thread_local std::array<ThreadBuffer, 2> buffers;
  Bytes& held = buffers[size_t(slot)].bytes;
  if (held.size() < bytes) {
    scratch_bytes -= held.size();
    held = {};  // the next line may throw
    held = Bytes(align_up(bytes), Memory::host);
    scratch_bytes += held.size();
    ++scratch_growths;
  }
  return held.data();
}

size_t thread_scratch_growths() {
  return scratch_growths;
}
size_t thread_scratch_bytes() {
  return scratch_bytes;
}

}  // namespace sps
