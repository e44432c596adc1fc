// Instructions of sm_90 and later that CUDA C++ has no names for: barriers in shared memory that count bytes
// (mbarrier), and the copy engine (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace sps::ops::hopper {

// x. What is computed from it stays where it stands: moved in front of a loop it would take registers there.
__device__ __forceinline__ int in_place(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// True for one lane of a warp whose lanes are all here, always the same one. (Of a lane's number the compiler
// does not conclude that there is one, and makes loops of what a warp can do once.)
__device__ __forceinline__ bool elected() {
  uint32_t is = 0;
  asm volatile(
      "{\n"
      ".reg .pred chosen;\n"
      "elect.sync _|chosen, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, chosen;\n"
      "}\n"
      : "=r"(is));
  return is != 0;
}

// Shared memory is addressed by 32-bit numbers, as the instructions here want it.
__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Barriers.

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// As so many.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Arrives, and lets the phase wait for this many bytes of copies as well.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// A warp arrives once all its lanes are through with what the barrier guards: one lane for all of them, after
// they have met. racecheck follows only what each thread does itself, so in a build for it every lane
// arrives.
#ifdef SPS_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 < kWarpArrivals) barrier_arrive(barrier);
}

// Shared memory written by ordinary stores is read next by the tensor cores or the copy engine.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Numbers for another block of the cluster. Places and barriers are block_address()es of one block; the
// barrier is told of the bytes, and who has waited for it sees them. That block must have made the barrier,
// and must not end before they have come.

__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, float a, float b, float c, float d) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
      "r"(barrier), "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
}
__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, float a, float b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to),
               "r"(barrier), "f"(a), "f"(b)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, uint32_t a, uint32_t b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];" ::"r"(to),
               "r"(barrier), "r"(a), "r"(b)
               : "memory");
}
__device__ __forceinline__ void arrive_at_block(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// ---- Copies.

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Before the copy engine's first use, in a block, of a map that lies in global memory, where the host has put
// it.
__device__ __forceinline__ void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
// A box of a matrix, `map` says how large: columns column.., rows row..; what lies outside is zero and
// counts.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column,
                                         int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
// The same of a tensor of three dimensions.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column,
                                         int row, int slice) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(slice)
      : "memory");
}
// `bytes` and both places are multiples of 16.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace sps::ops::hopper
