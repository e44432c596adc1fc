// For CUDA sources: checked calls of the runtime, and the stream behind an Exec.
#pragma once

#include <cuda_runtime.h>

#include "tensor/device.h"

namespace sps {

// Throws Error with CUDA's own words for `status`, what was called and where.
[[noreturn]] void cuda_failed(cudaError_t status, const char* call, const char* file, int line);

inline cudaStream_t stream_of(const Exec& ex) {
  SPS_CHECK(ex.device == Device::cuda);
  return static_cast<cudaStream_t>(ex.stream);
}

}  // namespace sps

#define SPS_CUDA(call)                                                                        \
  do {                                                                                        \
    const cudaError_t sps_status = (call);                                                    \
    if (sps_status != cudaSuccess) ::sps::cuda_failed(sps_status, #call, __FILE__, __LINE__); \
  } while (false)

// After every kernel<<<...>>>: was it accepted?
#define SPS_LAUNCHED() SPS_CUDA(cudaPeekAtLastError())
