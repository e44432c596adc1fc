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
  RingRoom room(program.ring_bytes, program.under_way);
  // `rows` rows of as many bytes, `step` apart in a piece of `size`; `from` is the lane's.
  const auto push = [&](int size, int rows, int bytes, int step, const void* from) {
    room.make(walk, size, rows * bytes, rest.barriers);
    const uint32_t full = hopper::smem_address(&rest.barriers.full[walk.slot()]);
    if (lane == 0) hopper::barrier_expect(full, uint32_t(rows * bytes));
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
    push(kStageBytes, 1, kStageBytes, 0, program.records + n);
    if (s.ends) return;
    if (p.gain != nullptr) push(gain_bytes(p), 1, gain_bytes(p), 0, p.gain);
    // Of a line: its first row, and how many there are.
    const bool pairs = s.pairs();
    const int pieces = s.pieces, piece_chunks = s.piece_chunks, last_chunks = s.last_chunks, k = p.k;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile += pairs ? 1 : 2) {
      const int lines = pairs || tile + 1 < tiles ? 2 : 1, feature = (first + tile * blocks) * kFeatures,
                next_feature = pairs ? feature : feature + blocks * kFeatures;
      const int rows = min(kFeatures, p.outputs - feature),
                next_rows = min(kFeatures, p.outputs - next_feature);
      const bf16* row = p.w + int64_t(feature + lane) * p.w_stride;
      const int64_t to_next = int64_t(pairs ? p.outputs : blocks * kFeatures) * p.w_stride;
#pragma unroll 1
      for (int i = 0, left = k; i < pieces;
           ++i, left -= piece_chunks * kChunk, row += piece_chunks * kChunk) {
        const int count = i + 1 < pieces ? piece_chunks : last_chunks, step = row_step(count);
        const int bytes = min(count * kChunk, left) * int(sizeof(bf16));
#pragma unroll 1
        for (int line = 0; line < lines; ++line)
          push(kFeatures * step, line == 0 ? rows : next_rows, bytes, step, line == 0 ? row : row + to_next);
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
