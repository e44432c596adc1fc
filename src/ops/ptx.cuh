// The instructions (sm_80 and later) that CUDA C++ has no names for.
#pragma once

#include <cstdint>

namespace sps::ops {

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// 16 or 4 bytes from global to shared memory, behind the thread's back; zeros, and nothing read, where not
// valid.
__device__ inline void copy_async_16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_4(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
// 16 bytes of a stream that is read once: the line's other half is asked for too.
__device__ inline void copy_async_stream(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The copies issued since the last group become one; wait until at most kLeft groups are under way.
__device__ inline void copy_async_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ inline void copy_async_wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}
// Until this thread's copies have landed. Others see them after a barrier.
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8 and gets of
// matrix m, in x[m], columns 2 (l % 4) and the next of row l / 4.
__device__ inline void load_matrices(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
// The same of the transposed matrices.
__device__ inline void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

// An 8x8 matrix of 16-bit numbers, transposed; lane l has columns 2 (l % 4) and the next of row l / 4.
__device__ inline uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c += a b, a [16, 16] and b [16, 8] bf16, c [16, 8] f32. With g = lane / 4, t = 2 (lane % 4), pairs are of
// two neighbours along k for a and b, along the columns for c:
//   a[0..3]  rows g, g + 8, g, g + 8 at k = t, t, t + 8, t + 8
//   b0, b1   column g at k = t, t + 8
//   c[0..3]  row g at columns t, t + 1, row g + 8 at t, t + 1
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of a cluster of blocks: this block's number and the number of blocks. One, below sm_90.
__device__ inline unsigned cluster_rank() {
  unsigned rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ inline unsigned cluster_blocks() {
  unsigned blocks = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
#endif
  return blocks;
}
// All threads of the cluster meet; what they wrote to shared memory before they arrived is seen by those that
// have waited. A thread arrives and waits in turns, and other work may stand in between.
__device__ inline void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
// The same where nothing was written that others should see.
__device__ inline void cluster_arrive_relaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
__device__ inline void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cluster_arrive();
  cluster_wait();
#else
  __syncthreads();
#endif
}
// The place in another block's shared memory that `p` is in this one's, and what is written there. Before the
// first access every block of the cluster has arrived once.
__device__ inline uint32_t block_address(const void* p, unsigned rank) {
  uint32_t there = shared_address(p);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
#endif
  return there;
}
__device__ inline void store_to_block(uint32_t* p, unsigned rank, uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(block_address(p, rank)), "r"(x) : "memory");
#else
  if (rank == 0) *p = x;
#endif
}

__device__ inline void store_to_block(uint64_t* p, unsigned rank, uint64_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(block_address(p, rank)), "l"(x) : "memory");
#else
  if (rank == 0) *p = x;
#endif
}
__device__ inline uint32_t load_from_block(const uint32_t* p, unsigned rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(block_address(p, rank)) : "memory");
  return x;
#else
  return *p;
#endif
}

// Adds to a number that several blocks count with; returns what it was. What was written before, by this
// thread or seen by it, is seen by who reads what this left, and the other way round.
__device__ inline unsigned add_in_order(unsigned* p, unsigned n) {
  unsigned old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(n) : "memory");
  return old;
}

// 2^x to 2^-22 of the value; 0 for -inf.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as bf16, the first in the lower half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

}  // namespace sps::ops
