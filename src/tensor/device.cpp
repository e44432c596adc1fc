#include "tensor/device.h"

#include <array>
#include <cstring>
#include <mutex>

#include "base/error.h"
#ifdef SPS_HAS_CUDA
#include "tensor/cuda.h"
#endif

namespace sps {

#ifdef SPS_HAS_CUDA

namespace {

struct Gpu {
  GpuInfo info;
  cudaStream_t stream = nullptr;
  std::array<Bytes, 4> scratch;
  size_t scratch_growths = 0;
};

// Opened at the first call. Never destroyed: the driver may be gone before static objects are.
Gpu& gpu() {
  static Gpu* const opened = [] {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0)
      fail("there is no GPU that CUDA can use here ({})",
           status != cudaSuccess ? cudaGetErrorString(status) : "no device");
    auto made = std::make_unique<Gpu>();
    SPS_CUDA(cudaSetDevice(0));
    cudaDeviceProp p{};
    SPS_CUDA(cudaGetDeviceProperties(&p, 0));
    made->info = {p.name, p.multiProcessorCount, p.major, p.minor, p.totalGlobalMem};
    SPS_CUDA(cudaStreamCreateWithFlags(&made->stream, cudaStreamNonBlocking));
    return made.release();
  }();
  return *opened;
}

}  // namespace

void cuda_failed(cudaError_t status, const char* call, const char* file, int line) {
  const std::string_view path = file;
  fail("CUDA: {} ({}) in {} at {}:{}", cudaGetErrorString(status), cudaGetErrorName(status), call,
       path.substr(path.rfind('/') + 1), line);
}

int gpu_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

Exec open_gpu() {
  Gpu& g = gpu();
  SPS_CUDA(cudaSetDevice(0));  // of this thread
  return {Device::cuda, g.stream};
}

const GpuInfo& gpu_info() {
  return gpu().info;
}

size_t gpu_memory_used() {
  size_t free = 0, total = 0;
  if (gpu_count() > 0) SPS_CUDA(cudaMemGetInfo(&free, &total));
  return total - free;
}

void synchronize(const Exec& ex) {
  if (ex.device == Device::cuda) SPS_CUDA(cudaStreamSynchronize(stream_of(ex)));
}

void copy_bytes(const Exec& ex, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (ex.device == Device::cpu)
    std::memcpy(to, from, bytes);
  else
    SPS_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(ex)));
}

StreamMark::~StreamMark() {
  if (event_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}

void StreamMark::set(const Exec& ex) {
  if (ex.device == Device::cpu) return;
  if (event_ == nullptr) {
    cudaEvent_t event = nullptr;
    SPS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    event_ = event;
  }
  SPS_CUDA(cudaEventRecord(static_cast<cudaEvent_t>(event_), stream_of(ex)));
}

void StreamMark::wait() const {
  if (event_ != nullptr) SPS_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(event_)));
}

std::byte* device_scratch(const Exec& ex, DeviceSlot slot, size_t bytes) {
  SPS_CHECK(ex.device == Device::cuda);
  Bytes& held = gpu().scratch[size_t(slot)];
  if (held.size() < bytes) {
    synchronize(ex);
    held = {};
    held = Bytes(bytes, Memory::device);
    ++gpu().scratch_growths;
  }
  return held.data();
}

size_t device_scratch_growths() {
  return gpu_count() > 0 ? gpu().scratch_growths : 0;
}

size_t device_scratch_bytes() {
  size_t bytes = 0;
  if (gpu_count() > 0)
    for (const Bytes& held : gpu().scratch) bytes += held.size();
  return bytes;
}

#else

namespace {
constexpr const char* kNoCuda = "this build of sps has no CUDA: build it where a CUDA toolkit is installed";
}

int gpu_count() {
  return 0;
}
Exec open_gpu() {
  fail("{}", kNoCuda);
}
const GpuInfo& gpu_info() {
  fail("{}", kNoCuda);
}
size_t gpu_memory_used() {
  return 0;
}
void synchronize(const Exec& ex) {
  SPS_CHECK(ex.device == Device::cpu);
}
void copy_bytes(const Exec& ex, void* to, const void* from, size_t bytes) {
  SPS_CHECK(ex.device == Device::cpu);
  if (bytes > 0) std::memcpy(to, from, bytes);
}
StreamMark::~StreamMark() = default;
void StreamMark::set(const Exec&) {}
void StreamMark::wait() const {}
std::byte* device_scratch(const Exec&, DeviceSlot, size_t) {
  fail("{}", kNoCuda);
}
size_t device_scratch_growths() {
  return 0;
}
size_t device_scratch_bytes() {
  return 0;
}

#endif

void copy_tensor(Tensor from, Tensor to) {
  SPS_CHECK(from.dtype == to.dtype && from.rows == to.rows && from.cols == to.cols);
  if (from.empty()) return;
  const bool on_gpu = from.device == Device::cuda || to.device == Device::cuda;
  const Exec ex = on_gpu ? open_gpu() : Exec{};
  const size_t size = dtype_size(from.dtype);
  const auto at = [&](const Tensor& t, int64_t row) {
    return static_cast<std::byte*>(t.data) + size_t(row * t.stride) * size;
  };
  if (from.dense() && to.dense())
    copy_bytes(ex, to.data, from.data, size_t(from.count()) * size);
  else
    for (int64_t r = 0; r < from.rows; ++r) copy_bytes(ex, at(to, r), at(from, r), size_t(from.cols) * size);
  synchronize(ex);
}

OnHost::OnHost(Tensor tensor) : tensor_(tensor) {
  if (tensor.device == Device::cpu) return;
  memory_ = Bytes(size_t(tensor.count()) * dtype_size(tensor.dtype), Memory::host);
  tensor_ = {memory_.data(), tensor.rows, tensor.cols, tensor.cols, tensor.dtype, Device::cpu};
  copy_tensor(tensor, tensor_);
}

}  // namespace sps
