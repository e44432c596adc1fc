#include "tensor/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "tensor/device.h"
#ifdef SPS_HAS_CUDA
#include "tensor/cuda.h"
#endif

namespace sps {

namespace {

std::atomic<size_t> device_held{0}, device_peak{0};

void count_device(size_t bytes) {
  const size_t now = device_held += bytes;
  for (size_t most = device_peak; most < now && !device_peak.compare_exchange_weak(most, now);) {
  }
}

// Memory of some size comes in huge pages where the system has any: a step walks over a hundred megabytes in
// rows of a few kilobytes, and each miss in the table of small pages costs more than the line itself.
std::byte* host_bytes(size_t bytes) {
  constexpr size_t kLine = 64, kHugePage = size_t{2} << 20;
  const size_t align = bytes >= kHugePage / 2 ? kHugePage : kLine;
  const size_t size = (std::max<size_t>(bytes, 1) + align - 1) / align * align;
  auto* p = static_cast<std::byte*>(std::aligned_alloc(align, size));
  if (p == nullptr) fail("out of memory: {:.1f} MiB could not be allocated", double(bytes) / (1 << 20));
  if (align == kHugePage) ::madvise(p, size, MADV_HUGEPAGE);  // a wish: what it answers does not matter
  std::memset(p, 0, bytes);
  return p;
}

std::byte* gpu_bytes([[maybe_unused]] size_t bytes, [[maybe_unused]] Memory kind) {
  open_gpu();
#ifdef SPS_HAS_CUDA
  void* p = nullptr;
  const size_t size = std::max<size_t>(bytes, 1);
  const cudaError_t status = kind == Memory::device ? cudaMalloc(&p, size) : cudaMallocHost(&p, size);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // reported here; later calls start clean
    size_t free = 0, total = 0;
    SPS_CUDA(cudaMemGetInfo(&free, &total));
    fail("out of {} memory: {:.1f} MiB could not be allocated ({:.1f} of the GPU's {:.1f} MiB are free)",
         kind == Memory::device ? "GPU" : "pinned", double(bytes) / (1 << 20), double(free) / (1 << 20),
         double(total) / (1 << 20));
  }
  SPS_CUDA(status);
  if (kind == Memory::device) {
    SPS_CUDA(cudaMemset(p, 0, size));
    SPS_CUDA(cudaDeviceSynchronize());  // our stream does not wait for the one that memset runs on
  } else {
    std::memset(p, 0, size);
  }
  return static_cast<std::byte*>(p);
#else
  return nullptr;  // open_gpu has thrown
#endif
}

}  // namespace

Bytes::Bytes(size_t bytes, Memory kind)
    : data_(kind == Memory::host ? host_bytes(bytes) : gpu_bytes(bytes, kind), FreeBytes{kind, bytes}),
      size_(bytes) {
  if (kind == Memory::device) count_device(bytes);
}

size_t device_bytes() {
  return device_held;
}
size_t device_peak_bytes() {
  return device_peak;
}

void FreeBytes::operator()(std::byte* p) const {
  if (kind == Memory::host) std::free(p);
  if (kind == Memory::device) device_held -= bytes;
#ifdef SPS_HAS_CUDA
  // A failure here means that the process is ending: there is nobody to tell.
  if (kind == Memory::device) cudaFree(p);
  if (kind == Memory::pinned) cudaFreeHost(p);
#endif
}

}  // namespace sps
