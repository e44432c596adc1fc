// The kernel behind decode_program.h: one block on every multiprocessor, all at the same time, walks through
// the stages. One warp of it loads weights, eight multiply, four
// attend, three finish what the products leave.
//
// Tiles of eight features are dealt to the blocks in turn, on from where the stage before has stopped.
// Results go from block to block as mail where their readers can take it, else they are waited for by
// counters. What other blocks have written is read past the first-level cache.
#pragma once

#include "ops/decode_program/decode_program_attention.cuh"
#include "ops/decode_program/decode_program_worker.cuh"

namespace sps::ops::decode_program {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <int D>
__device__ __forceinline__ void run_program(const Program& given, unsigned char* memory) {
  Rest& rest = *reinterpret_cast<Rest*>(memory + given.ring_bytes + given.work_bytes +
                                        attention_bytes<D>(given.attention_warps));
  const int me = int(threadIdx.x);
  if (me < kPieces) {
    hopper::barrier_init(hopper::smem_address(&rest.barriers.full[me]), 1);
    hopper::barrier_init(hopper::smem_address(&rest.barriers.empty[me]), kWorkers * hopper::kWarpArrivals);
    hopper::barrier_init_fence();
  }
  if (me == 0) {
    rest.program = given;
    const auto* const own = reinterpret_cast<const Own*>(given.counters + given.stages * kCounterStep);
    const unsigned launches = __ldcg(&own->launches);
    rest.mail = given.mail + launches % 2 * given.mail_bytes;
    rest.other_mail = given.mail + (launches + 1) % 2 * given.mail_bytes;
  }
  __syncthreads();
  const Program& program = rest.program;
  const int warp = me / kWarp;
  unsigned char* const work = memory + program.ring_bytes;
  if (warp < kWorkers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kWorkerRegisters));
    Worker{memory, work, rest, RingWalk(program.ring_bytes)}.run();
  } else if (warp < kLoader) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kAttentionRegisters));
    const int number = warp - kFirstAttention;
    if constexpr (D > 0)
      if (number < program.attention_warps)
        attend<D>(rest, reinterpret_cast<AttentionWarp<D>*>(work + program.work_bytes)[number], number);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
    if (warp == kLoader)
      load_weights(program, memory, rest);
    else
      Finisher{rest}.run();
  }
  // Nobody looks at a counter any more when all blocks are here: the last one leaves zeros behind.
  Own* const own = reinterpret_cast<Own*>(program.counters + program.stages * kCounterStep);
  __syncthreads();
  bool last = false;
  if (me == 0) {
    __threadfence();
    last = atomicInc(&own->ended, gridDim.x - 1) == gridDim.x - 1;
  }
  if (__syncthreads_or(int(last)) == 0) return;
  __threadfence();
  if (me == 0) ++own->launches;
  for (int n = me; warp < kWorkers && n < program.stages; n += kWorkerThreads)
    program.counters[n * kCounterStep] = 0;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
