// The warp that loads. It needs nothing that the step computes, so it goes through the stages by itself, as
// far ahead as the ring holds: memory is read while the other warps wait for each other. Of every stage that
// the block has a part in, the ring gets the stage itself, the gain if there is one, and the lines of
// weights, two side by side where there are two, piece by piece.
#pragma once

#include "ops/decode_program/decode_program_stage.cuh"

namespace sps::ops::decode_program {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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
  // Room for a piece of `size`, of which so many bytes come: load(to, barrier) by one lane asks for them.
  const auto push = [&](int size, int bytes, auto&& load) {
    room.make(walk, size, bytes, rest.barriers);
    const uint32_t full = hopper::smem_address(&rest.barriers.full[walk.slot()]);
    if (lane == 0) {
      hopper::barrier_expect(full, uint32_t(bytes));
      load(hopper::smem_address(ring + walk.place(size)), full);
    }
    walk.pass(size);
  };
  const auto push_bytes = [&](int size, int bytes, const void* from) {
    push(size, bytes,
         [&](uint32_t to, uint32_t full) { hopper::load_bytes(to, from, uint32_t(bytes), full); });
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
    const Record* const record = program.records + n;
    push_bytes(kStagePiece, kStageBytes, record);
    if (s.ends) return;
    if (lane == 0) hopper::acquire_map(&record->weights);
    if (p.gain != nullptr) push_bytes(gain_piece(p.k), p.k * int(sizeof(float)), p.gain);
    const bool pairs = s.pairs();
    const int pieces = s.pieces, piece_chunks = s.piece_chunks, size = piece_chunks * kSlice,
              to_next = pairs ? p.outputs : blocks * kFeatures;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile += pairs ? 1 : 2) {
      const int lines = pairs || tile + 1 < tiles ? 2 : 1, feature = (first + tile * blocks) * kFeatures;
#pragma unroll 1
      for (int i = 0; i < pieces; ++i)
#pragma unroll 1
        for (int line = 0; line < lines; ++line)
          push(size, size, [&](uint32_t to, uint32_t full) {
            hopper::load_box(to, &record->weights, full, 0, feature + line * to_next, i * piece_chunks);
          });
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
