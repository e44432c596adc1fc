// The driver's function that makes a tensor map: what the copy engine (TMA) knows of a tensor.
#pragma once

#include <cuda.h>

#include "tensor/cuda.h"

namespace sps::ops {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

// The driver's own function, asked for at run time so that the program starts without a driver.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result{};
    SPS_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault,
                                              &result));
    SPS_CHECK(result == cudaDriverEntryPointSuccess && address != nullptr);
    return reinterpret_cast<EncodeTiled>(address);
  }();
  return found;
}

}  // namespace sps::ops
