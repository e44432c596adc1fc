// The warp that loads. It needs nothing that the step computes, so it goes through the stages by itself, as
// far ahead as the ring holds: memory is read while the other warps wait for each other. Of every stage that
// the block has a part in, the ring gets the stage itself, the gain if there is one, and the lines of
// weights, two side by side where there are two, piece by piece.
#pragma once

#include "ops/decode_program/decode_program_stage.cuh"

namespace sps::ops::decode_program {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ int gain_bytes(const Product<bf16>& p) {
  return p.gain != nullptr ? p.k * int(sizeof(float)) : 0;
}
__device__ __forceinline__ int first_tile(const Stage& s) {
  const int n = int(blockIdx.x) - s.first_block;
  return n < 0 ? n + int(gridDim.x) : n;
}
// How many a block has whose first one that is.
__device__ __forceinline__ int tiles_of(const Stage& s, int first) {
  return s.tiles_each + (first < s.tiles_more ? 1 : 0);
}
__device__ __forceinline__ uint4 record_vector(const Program& program, int stage, int vector) {
  return __ldg(reinterpret_cast<const uint4*>(program.records + stage) + vector);
}

__device__ __forceinline__ void load_weights(const Program& program, unsigned char* ring, Rest& rest) {
  const int lane = int(threadIdx.x) % kWarp, blocks = int(gridDim.x);
  RingWalk walk(program.ring_bytes);
  RingRoom room(program.ring_bytes, kUnderWay);
  // `rows` rows of as many bytes, `step` apart in a piece of `size`; `from` is the lane's.
  const auto push = [&](int size, int rows, int bytes, int step, const void* from) {
    room.make(walk, size, rows * bytes, rest.barriers);
    const uint32_t full = hopper::smem_address(&rest.barriers.full[walk.slot()]);
    if (lane == 0) hopper::barrier_expect(full, uint32_t(rows * bytes));
    __syncwarp();
    if (lane < rows)
      hopper::load_bytes(hopper::smem_address(ring + walk.place(size) + lane * step), from, uint32_t(bytes),
                         full);
    walk.pass(size);
  };
  const bool copies = lane < kStageVectors;
  uint4 next = copies ? record_vector(program, 0, lane) : make_uint4(0, 0, 0, 0);
  for (int n = 0;; ++n) {
    __syncwarp();
    if (copies) rest.stage[kWorkers][lane] = next;
    __syncwarp();
    if (copies && n < program.stages) next = record_vector(program, n + 1, lane);
    const Stage& s = *reinterpret_cast<const Stage*>(rest.stage[kWorkers]);
    const Product<bf16>& p = s.product;
    const int first = first_tile(s), tiles = tiles_of(s, first);
    if (s.attends || (tiles == 0 && !s.ends)) continue;
    const bool pairs = s.pairs();
    const auto row_of = [&](int tile, bool second) {
      return int64_t((first + tile * blocks) * kFeatures + lane + (second ? p.outputs : 0)) * p.w_stride;
    };
    enum { stage, gain, weights } next_is = stage;
    int tile = 0, piece = 0, line = 0;  // of the next piece of weights
#pragma unroll 1
    for (;;) {
      int size = kStageBytes, rows = 1, bytes = kStageBytes, step = 0;
      const void* from = program.records + n;
      if (next_is == stage) {
        next_is = p.gain != nullptr ? gain : weights;
      } else if (next_is == gain) {
        size = bytes = gain_bytes(p), from = p.gain;
        next_is = weights;
      } else {
        if (tile >= tiles) break;
        const int count = piece + 1 < s.pieces ? s.piece_chunks : s.last_chunks,
                  column = piece * s.piece_chunks;
        const int of = pairs ? tile : tile + line, more = pairs || tile + 1 < tiles ? 1 : 0;
        step = row_step(count), size = kFeatures * step;
        rows = min(kFeatures, p.outputs - (first + of * blocks) * kFeatures);
        bytes = min(count * kChunk, p.k - column * kChunk) * int(sizeof(bf16));
        from = p.w + row_of(of, pairs && line == 1) + column * kChunk;
        if (line < more) {
          ++line;
        } else {
          line = 0;
          if (++piece == s.pieces) piece = 0, tile += pairs ? 1 : 2;
        }
      }
      push(size, rows, bytes, step, from);
      if (s.ends) return;
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
