// The GPU as the rest of the program sees it: opening it, copies, scratch. Plain C++; a build without CUDA
// has the same functions, and open_gpu says in one sentence that there is none. Work on a GPU is issued in
// the order of one stream (Exec::stream) and runs behind the caller's back: only synchronize, and copies from
// and to memory that is not pinned, wait for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "tensor/exec.h"
#include "tensor/memory.h"

namespace sps {

#ifdef SPS_HAS_CUDA
inline constexpr bool kCudaBuilt = true;
#else
inline constexpr bool kCudaBuilt = false;
#endif

int gpu_count();  // GPUs that this build can use: 0 without CUDA, without a driver, without a device

// Makes the GPU the calling thread's and returns its stream, which lives as long as the process. The same
// stream for every call. Error (failure) if this build or this machine has no GPU.
Exec open_gpu();

inline Exec exec_on(Device device) {
  return device == Device::cuda ? open_gpu() : Exec{};
}

struct GpuInfo {
  std::string name;
  int multiprocessors = 0, major = 0, minor = 0;  // compute capability
  size_t memory = 0;                              // bytes
};
const GpuInfo& gpu_info();  // of the opened GPU

// What a process takes of a GPU besides what it allocates: the driver's context, the code of our kernels and
// of cuBLASLt's, local memory. A forecast; on an H200 with CUDA 13.
inline constexpr size_t kGpuContextBytes = size_t{560} << 20;
// Used of the opened GPU now, by all processes together, as its driver counts; 0 without one.
size_t gpu_memory_used();

// Waits for everything issued on ex's stream; Error if any of it failed. Nothing to do on the CPU.
void synchronize(const Exec& ex);

// Copies between any two memories in stream order. Between pinned and device memory it returns at once, so
// `from` must stay as it is until the stream has passed; on the CPU it is memcpy.
void copy_bytes(const Exec& ex, void* to, const void* from, size_t bytes);

// A whole tensor of the same dtype and shape, whatever the strides and memories; complete when it returns.
void copy_tensor(Tensor from, Tensor to);

// A tensor where the CPU can read it: itself, or a dense copy of what lies on a GPU.
class OnHost {
 public:
  explicit OnHost(Tensor tensor);
  operator Tensor() const { return tensor_; }
  const Tensor& operator*() const { return tensor_; }
  const Tensor* operator->() const { return &tensor_; }

 private:
  Bytes memory_;
  Tensor tensor_;
};

// A moment in a stream's order: mark it, and wait for it later. Always past on the CPU.
class StreamMark {
 public:
  StreamMark() = default;
  ~StreamMark();
  StreamMark(StreamMark&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  StreamMark& operator=(StreamMark&&) = delete;
  void set(const Exec& ex);
  void wait() const;  // returns at once if it was never set

 private:
  void* event_ = nullptr;
};

// Scratch on ex's GPU for the insides of operations: grows to the largest request and stays. Valid until the
// next request for the same slot, and used in stream order only. Growing waits for the GPU; once a step has
// run, nothing grows any more (device_scratch_growths is constant, and the step can be captured as a graph).
// New scratch is zeros; who uses `counters` leaves zeros behind.
enum class DeviceSlot : uint8_t { workspace, partial, rows, counters };
std::byte* device_scratch(const Exec& ex, DeviceSlot slot, size_t bytes);
size_t device_scratch_growths();
size_t device_scratch_bytes();

}  // namespace sps
