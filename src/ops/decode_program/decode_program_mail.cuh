// How blocks hand numbers to each other.
//
// Mail: numbers in a place of their own, where kNoNumber stands until they come. Whoever wants them reads
// until they are there: nobody waits for more than he needs, and no fence or barrier stands between. There
// are two such places, for launches in turn: who writes into one leaves kNoNumber in the other.
//
// Counters: a stage is over when as many have arrived at its counter as there are. What was written before is
// seen by who has awaited it.
#pragma once

#include "ops/cuda.cuh"
#include "ops/decode_program/decode_program_stage.cuh"

namespace sps::ops::decode_program {

// Two bf16, or an f32, that no sum is: the NaN that instructions make is another one.
constexpr uint32_t kNoNumber = 0xFFFFFFFF;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint4 read_mail(const void* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
// The same where `wanted`; else x stays. (A branch would end each loop that waits for mail in many.)
__device__ __forceinline__ void read_mail_if(bool wanted, const void* from, uint4& x) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %5, 0;\n"
      "@wanted ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(from), "r"(uint32_t(wanted)));
}
// The same where n is below `end`, of many whose conditions would fill the registers for them.
__device__ __forceinline__ void read_mail_below(int n, int end, const void* from, float2& x) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.lt.s32 wanted, %3, %4;\n"
      "@wanted ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];\n"
      "}\n"
      : "+f"(x.x), "+f"(x.y)
      : "l"(from), "r"(n), "r"(end));
}
__device__ __forceinline__ uint32_t read_mail_float(const void* from) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void write_mail(void* to, uint32_t x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void write_mail(void* to, uint16_t x) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(x) : "memory");
}
// Where `wanted`. Mail has its order from what it says: other memory may be read before and behind it.
__device__ __forceinline__ void write_mail_if(bool wanted, void* to, uint32_t x) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %2, 0;\n"
      "@wanted st.relaxed.gpu.global.u32 [%0], %1;\n"
      "}\n" ::"l"(to),
      "r"(x), "r"(unsigned(wanted)));
}
__device__ __forceinline__ void write_mail_if(bool wanted, void* to, const uint2& x) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %3, 0;\n"
      "@wanted st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};\n"
      "}\n" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(unsigned(wanted)));
}
__device__ __forceinline__ void write_mail_below(int n, int end, void* to, const uint2& x) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.lt.s32 wanted, %3, %4;\n"
      "@wanted st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};\n"
      "}\n" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(n), "r"(end));
}
// The larger of what stands in each half, here and in `most`; no half is missing that is not all ones.
__device__ __forceinline__ uint32_t most_halves(uint32_t most, const uint4& x) {
  return __vimax3_u16x2(__vimax3_u16x2(x.x, x.y, x.z), x.w, most);
}
__device__ __forceinline__ bool no_half_missing(uint32_t most) {
  constexpr uint32_t kHalfWord = 0xFFFF;
  return (most & kHalfWord) != kHalfWord && most >> 16 != kHalfWord;
}
template <class T>
__device__ __forceinline__ bool has_come(const uint4& x) {
  if constexpr (sizeof(T) == sizeof(float)) return max(max(x.x, x.y), max(x.z, x.w)) != kNoNumber;
  return no_half_missing(most_halves(0, x));
}

__device__ __forceinline__ void await_stage(const unsigned* counter, unsigned arrivals) {
  const auto arrived = [&] {
    unsigned now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now >= arrivals;
  };
  Watchdog dog;
  while (!arrived()) dog.look();
}
__device__ __forceinline__ unsigned* counter(const Program& program, int stage) {
  return program.counters + stage * kCounterStep;
}
// By a warp.
__device__ __forceinline__ void await_stages(const Program& program,
                                             const Stage::Await (&stages)[kMostAwaited]) {
  const int lane = int(threadIdx.x) % kWarp;
  if (lane < kMostAwaited && stages[lane].arrivals > 0)
    await_stage(counter(program, stages[lane].stage), unsigned(stages[lane].arrivals));
  __syncwarp();
}
// After a barrier of those whose writes it is about.
__device__ __forceinline__ void arrive(unsigned* counter, unsigned arrivals) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(arrivals) : "memory");
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
