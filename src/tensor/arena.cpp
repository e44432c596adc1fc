#include "tensor/arena.h"
#include "base/error.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace sps {

namespace {

constexpr size_t kAlign = 64;

size_t align_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Memory of some size comes in huge pages where the system has any: a step walks over a hundred megabytes in
// rows of a few kilobytes, and each miss in the table of small pages costs more than the line itself.
std::byte* aligned_bytes(size_t bytes) {
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t align = bytes >= kHugePage / 2 ? kHugePage : kAlign, size = align_up(std::max<size_t>(bytes, 1), align);
  auto* p = static_cast<std::byte*>(std::aligned_alloc(align, size));
  if (p == nullptr) fail("out of memory: {:.1f} MiB could not be allocated", double(bytes) / (1 << 20));
  if (align == kHugePage) ::madvise(p, size, MADV_HUGEPAGE);  // a wish: what it answers does not matter
  return p;
}

std::atomic<size_t> scratch_growths{0}, scratch_bytes{0};

struct ThreadBuffer {
  std::byte* data = nullptr;
  size_t size = 0;
  ~ThreadBuffer() {
    scratch_bytes -= size;
    std::free(data);
  }
};

}  // namespace

void Arena::Free::operator()(std::byte* p) const { std::free(p); }

Arena::Arena(size_t bytes, Device device) : memory_(aligned_bytes(bytes)), device_(device), size_(bytes) {
  std::memset(memory_.get(), 0, bytes);
}

Tensor Arena::take(DType dtype, int64_t rows, int64_t cols) {
  SPS_CHECK(rows >= 0 && cols >= 0);
  const size_t bytes = align_up(size_t(rows) * size_t(cols) * dtype_size(dtype), kAlign);
  Tensor t{nullptr, rows, cols, cols, dtype, device_};
  if (!planning()) {
    SPS_CHECK(used_ + bytes <= size_);
    t.data = memory_.get() + used_;
  }
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return t;
}

std::byte* thread_scratch(ScratchSlot slot, size_t bytes) {
  thread_local std::array<ThreadBuffer, 2> buffers;
  ThreadBuffer& b = buffers[size_t(slot)];
  if (b.size < bytes) {
    std::free(b.data);
    scratch_bytes -= b.size;
    b.data = nullptr;  // the next line may throw
    b.size = 0;
    b.data = aligned_bytes(bytes);
    b.size = align_up(bytes, kAlign);
    scratch_bytes += b.size;
    ++scratch_growths;
  }
  return b.data;
}

size_t thread_scratch_growths() { return scratch_growths; }
size_t thread_scratch_bytes() { return scratch_bytes; }

}  // namespace sps
