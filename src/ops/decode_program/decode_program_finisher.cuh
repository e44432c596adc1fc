// What the warps do that finish a stage's results: they add up what the workers leave, part by part, norm it
// or add it to what was there, and send it. Where a result goes, what it is added to and the scales of the
// rows are found while the workers multiply.
//
// Sums and squares lie in places for two turns. The finishers wait at a barrier for those of a turn, at which
// the workers only arrive, and arrive at another when the place is free again, at which the workers wait.
#pragma once

#include "ops/decode_program/decode_program_loader.cuh"
#include "ops/decode_program/decode_program_mail.cuh"

namespace sps::ops::decode_program {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ void sync_workers_and_finishers(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kWorkerThreads + kFinisherThreads) : "memory");
}
__device__ __forceinline__ void arrive_workers_and_finishers(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kWorkerThreads + kFinisherThreads) : "memory");
}
// (racecheck reports what is handed over where one side only arrives; in its build both sides wait, one turn
// after the other.)
#ifdef SPS_RACECHECK
constexpr bool kBothWait = true;
#else
constexpr bool kBothWait = false;
#endif
// By workers: sums or squares are there.
__device__ __forceinline__ void hand_over(int barrier) {
  if constexpr (kBothWait)
    sync_workers_and_finishers(barrier);
  else
    arrive_workers_and_finishers(barrier);
}
// By finishers, of a place for sums: before they wait for its sums, and when it is free again.
__device__ __forceinline__ void begin_turn(int barrier) {
  if constexpr (kBothWait) sync_workers_and_finishers(barrier);
}
__device__ __forceinline__ void end_turn(int barrier) {
  if constexpr (!kBothWait) arrive_workers_and_finishers(barrier);
}
__device__ __forceinline__ void meet_finishers() {
  asm volatile("bar.sync %0, %1;" ::"n"(kFinishersBarrier), "n"(kFinisherThreads) : "memory");
}

struct Finisher {
  Rest& rest;
  int turn = 0, normed = 0;  // of the places for sums, and for squares
  const int me = int(threadIdx.x) - kFirstFinisher * kWarp;

  // Where one number of the result is made and goes.
  struct Result {
    int row, feature;
    bool wanted;
    const float* sums;  // of its first part
    unsigned char* mail;
  };
  // Number i of those of a batch whose first tile is `from`: of tile i / (8 rows), row by row.
  __device__ __forceinline__ Result result(const Stage& s, int from, int i) const {
    const Product<bf16>& p = s.product;
    const int line = i / kFeatures, tile = int(unsigned(line) * s.row_inverse >> 16);
    Result r;
    r.row = line - tile * p.rows;
    r.feature = (first_tile(s) + (from + tile) * int(gridDim.x)) * kFeatures + i % kFeatures;
    r.wanted = r.feature < p.outputs;
    r.sums = rest.sums[turn] + ((s.pairs() ? 2 * tile : tile) * p.rows << s.log_parts) * kFeatures +
             r.row * kFeatures + i % kFeatures;
    r.mail = rest.mail + s.y_mail +
             uint32_t(r.row * p.outputs + r.feature) * uint32_t(p.floats ? sizeof(float) : sizeof(bf16));
    return r;
  }
  // The parts of a sum, `step` numbers apart.
  template <int kParts>
  __device__ __forceinline__ static float total(const float* part, int step) {
    float parts[kParts], sum = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) parts[i] = part[i * step];
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum += parts[i];
    return sum;
  }
  __device__ __forceinline__ static float total(const float* part, int step, bool eight) {
    return eight ? total<8>(part, step) : total<4>(part, step);
  }

  // What y is added to, which may not have come yet.
  __device__ uint32_t old_of(const Stage& s, const Result& r) const {
    const Product<bf16>& p = s.product;
    if (s.old_mail >= 0)
      return read_mail_float(rest.mail + s.old_mail +
                             uint32_t(r.row * p.outputs + r.feature) * uint32_t(sizeof(float)));
    return __float_as_uint(__ldcg(static_cast<const float*>(p.y) + r.row * p.y_stride + r.feature));
  }

  // Of rows that are normed, as their products were made without it.
  __device__ void scale(const Stage& s) {
    const Product<bf16>& p = s.product;
    const bool eight = s.log_parts > 2;
    sync_workers_and_finishers(kSquaresBarrier + normed);
    if (me < p.rows) {
      const float all = total(rest.squares[normed] + me, kMostRows, eight);
      const float mean = s.k_inverse != 0 ? __fmul_rn(all, s.k_inverse) : all / float(p.k);
      rest.scales[me] = 1 / sqrtf(mean + p.eps);
    }
    normed ^= 1;
    meet_finishers();
  }

  // A stage that the block has a part in.
  __device__ void finish(const Stage& s) {
    const Product<bf16>& p = s.product;
    const int tiles = tiles_of(s, first_tile(s)), batch = s.batch, of_tile = p.rows * kFeatures;
    const bool pairs = s.pairs(), adds = p.end == DecodeEnd::add, floats = p.floats, mails = s.y_mail >= 0,
               keeps = s.keeps, keeps_rest = s.keeps_rest, eight = s.log_parts > 2, norms = p.gain != nullptr;
    const int split = p.split, of_line = of_tile << s.log_parts;
    const int64_t other = rest.other_mail - rest.mail;
    await_stages(rest.program, s.awaited);
    // This thread's first result, and what it is added to: it comes while the sums are made.
    Result r = result(s, 0, me);
    uint32_t old = kNoNumber;
    if (adds && r.wanted && me < min(tiles, batch) * of_tile) old = old_of(s, r);
    begin_turn(kFreeBarrier + turn);
    if (norms) scale(s);
#pragma unroll 1
    for (int from = 0; from < tiles; from += batch) {
      const int count = min(batch, tiles - from);
      if (from > 0) begin_turn(kFreeBarrier + turn);
      sync_workers_and_finishers(kSumsBarrier + turn);
#pragma unroll 1
      for (int i = me; i < count * of_tile; i += kFinisherThreads) {
        const bool first = from == 0 && i == me;
        if (!first) r = result(s, from, i);
        if (!r.wanted) continue;
        float sum = total(r.sums, of_tile, eight),
              second = pairs ? total(r.sums + of_line, of_tile, eight) : 0;
        if (norms) {
          const float scale = rest.scales[r.row];
          sum *= scale, second *= scale;
        }
        if (pairs) {
          sum = decode_product::silu_times<bf16>(sum, second);
        } else if (adds) {
          uint32_t before = first ? old : old_of(s, r);
          Watchdog dog;
          while (s.old_mail >= 0 && before == kNoNumber) {
            before = old_of(s, r);
            dog.look();
          }
          sum = __uint_as_float(before) + sum;
        }
        if (mails) {
          if (floats) {
            write_mail(r.mail, __float_as_uint(sum));
            write_mail(r.mail + other, kNoNumber);
          } else {
            write_mail(r.mail, from_float<bf16>(sum).bits);
            write_mail(r.mail + other, uint16_t(kNoNumber));
          }
        }
        if (r.feature < split ? keeps : keeps_rest) decode_product::put_result(p, r.row, r.feature, sum);
      }
      end_turn(kFreeBarrier + turn);
      turn ^= 1;
    }
    if (s.arrives) {
      meet_finishers();
      if (me == 0) arrive(counter(rest.program, s.number), 1);
    }
  }

  // Stages come from memory: each warp asks for the next one before it is through with this.
  __device__ void run() {
    const Program& program = rest.program;
    const int lane = me % kWarp;
    auto* const mine = rest.stage[kWorkers + 1 + me / kWarp];
    const Stage& s = *reinterpret_cast<const Stage*>(mine);
    const bool copies = lane < kStageVectors;
    uint4 next = copies ? record_vector(program, 0, lane) : make_uint4(0, 0, 0, 0);
    for (int i = 0; i < 2; ++i) end_turn(kFreeBarrier + i);
    for (int n = 0;; ++n) {
      __syncwarp();
      if (copies) mine[lane] = next;
      __syncwarp();
      if (s.ends) return;
      if (copies) next = record_vector(program, n + 1, lane);
      if (!s.attends && tiles_of(s, first_tile(s)) > 0) finish(s);
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
