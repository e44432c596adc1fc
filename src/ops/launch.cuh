// Programmatic dependent launch: a kernel that starts while the one before it on the stream still runs, so
// that its launch, its blocks' start and its first reads of weights cost no time of their own. From sm_90 on;
// elsewhere the same code is an ordinary launch.
//
// The rule  A kernel launched by launch_behind() calls wait_for_previous() in every block, before it reads or
//           writes anything that an earlier kernel writes, or that one reads and it overwrites. What no
//           kernel of the stream writes (weights) may be read before. Once that has returned, everything
//           issued on the stream before has ended and its writes are seen: the wait lasts until the kernel
//           before has ended as a whole, which itself waited for the one before it.
// Early     let_next_start() lets the next kernel's blocks start as soon as all blocks of this one have
// called
//           it (or ended), where there is room beside them. It orders nothing: call it as early as you like,
//           in every block. A kernel that does not call it lets the next one start when it ends.
// Others    Kernels launched the ordinary way, copies and memsets wait for everything before them, and
//           launch_behind() may follow them.
// Graphs    Capturable: becomes an edge of its own kind between the two kernels.
#pragma once

#include <utility>

#include "ops/cuda.cuh"

namespace sps::ops {

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <int = 0>
__global__ void launch_probe() {}

// Whether the code that runs on this GPU was compiled with the wait in it. A GPU that is newer than what was
// compiled for runs sm_80's code, which has none.
inline bool starts_behind() {
  static const bool does = [] {
    cudaFuncAttributes attributes{};
    SPS_CUDA(cudaFuncGetAttributes(&attributes, launch_probe<>));
    return attributes.ptxVersion >= 90 && gpu_info().major >= 9;
  }();
  return does;
}

struct LaunchShape {
  dim3 grid, block;
  size_t shared = 0;     // dynamic shared memory, bytes
  unsigned cluster = 1;  // blocks of a cluster, along x; above 1 only where starts_behind()
};

// Launches a kernel that keeps the rule above.
template <class... Parameters, class... Arguments>
void launch_behind(const Exec& ex, const LaunchShape& shape, void (*kernel)(Parameters...),
                   Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid, config.blockDim = shape.block, config.dynamicSmemBytes = shape.shared;
  config.stream = stream_of(ex);
  cudaLaunchAttribute attributes[2]{};
  config.attrs = attributes;
  if (starts_behind()) {
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    SPS_CHECK(starts_behind());
    cudaLaunchAttribute& a = attributes[config.numAttrs++];
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim.x = shape.cluster, a.val.clusterDim.y = a.val.clusterDim.z = 1;
  }
  // All alike: a multiprocessor cannot run two kernels side by side that want its memory cut differently.
  SPS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared));
  if (shape.shared > 48 * 1024)
    SPS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shape.shared)));
  SPS_CUDA(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace sps::ops
