// Bytes: a block of memory that somebody owns, on the CPU, pinned for copies by the GPU, or on the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tensor/tensor.h"

namespace sps {

enum class Memory : uint8_t {
  host,
  pinned,  // host memory that the GPU copies from and to by itself, without holding up the caller
  device,
};

struct FreeBytes {
  Memory kind = Memory::host;
  size_t bytes = 0;
  void operator()(std::byte* p) const;
};

class Bytes {
 public:
  Bytes() = default;
  // Zeroed, aligned for any use. Error if there is not that much, or no GPU for the kinds that need one.
  Bytes(size_t bytes, Memory kind);
  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<std::byte, FreeBytes> data_;
  size_t size_ = 0;
};

// Bytes of Memory::device that are allocated, and the most that ever were at once.
size_t device_bytes();
size_t device_peak_bytes();

inline Memory memory_of(Device device) {
  return device == Device::cuda ? Memory::device : Memory::host;
}

}  // namespace sps
