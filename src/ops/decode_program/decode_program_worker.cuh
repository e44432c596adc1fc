// What the warps that multiply do with a stage. The path from the mail that they wait for to the mail that
// follows from it is what a step takes, so they do nothing else: others add up what they leave
// (decode_program_finisher.cuh) while they wait for the next stage's mail.
//
// A warp fetches of each row the part of k that it multiplies itself; where rows are normed, it leaves the
// part's sum of squares. Sums are made of the same parts, in the same order, as decode_linear_product.cuh
// makes them.
#pragma once

#include "ops/decode_program/decode_program_finisher.cuh"

namespace sps::ops::decode_program {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Both warps that share out a part of k.
__device__ __forceinline__ void meet_pair(int part) {
  asm volatile("bar.sync %0, %1;" ::"r"(kFirstPartBarrier + part), "n"(2 * kWarp) : "memory");
}
// Where it stands, whatever stands behind it.
__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from));
  return x;
}

// Row g of a line, as the operand has it, is this feature of it: so eight lanes that read side by side meet
// no bank twice.
__device__ __forceinline__ int feature_of(int g) {
  return g >> 1 | (g & 1) << 2;
}

// Sums of two lines of weights and up to 8 rows, bit by bit those of decode_product::Sums: of every 16 bytes
// of a row the words 0 and 1 meet in one instruction, 2 and 3 in another. The lines are the upper and the
// lower half of the left operand.
struct LineSums {
  float sum[2][4] = {};

  __device__ __forceinline__ void add(const uint4& a, const uint4& b, const uint4& x) {
    multiply_add(sum[0], {a.x, b.x, a.y, b.y}, x.x, x.y);
    multiply_add(sum[1], {a.z, b.z, a.w, b.w}, x.z, x.w);
  }
  // Chunks, from the lane's bytes on.
  template <int kChunks>
  __device__ __forceinline__ void add(uint32_t a, uint32_t b, uint32_t x) {
    const auto weights = [](uint32_t from, int i) {
      return load_shared((i % 2 == 0 ? from : from ^ kHalf) + i / 2 * kSlice);
    };
    uint4 first[2 * kChunks], second[2 * kChunks], rows[2 * kChunks];
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i)
      first[i] = weights(a, i), second[i] = weights(b, i), rows[i] = load_shared(x + i * kHalf);
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) add(first[i], second[i], rows[i]);
  }
  // to[row * kFeatures + feature], and of the second line `behind` numbers further on.
  __device__ __forceinline__ void put(float* to, int behind, int rows, int lane) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane % 4 * 2 + i, at = row * kFeatures + feature_of(lane / 4);
      if (row >= rows) continue;
      to[at] = sum[0][i] + sum[1][i];
      if (behind != 0) to[behind + at] = sum[0][2 + i] + sum[1][2 + i];
    }
  }
};

struct Worker {
  unsigned char* const ring;
  unsigned char* const work;
  Rest& rest;
  RingWalk walk;
  int turn = 0, normed = 0;  // of the places for sums, and for squares
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;

  __device__ void await_piece(const RingWalk& at) const {
    wait_for(rest.barriers.full[at.slot()], at.parity());
  }
  __device__ void leave_piece(int size) {
    hopper::warp_arrive(hopper::smem_address(&rest.barriers.empty[walk.slot()]));
    walk.pass(size);
  }

  // A warp's part of k, the same for all tiles of a stage. The warps are teams with a warp for each part,
  // that take lines in turn, two at a time.
  struct Part {
    int number, team, teams, begin, end;  // chunks
    int pieces, piece_chunks;             // of a line
    int rows, of_line;                    // rows; numbers of a line's sums, of all parts
    uint32_t x, weights;  // this lane's row, and where a piece begins, from the lane's bytes on
  };
  __device__ Part part_of(const Stage& s) const {
    const Product<bf16>& p = s.product;
    Part part;
    part.number = warp & ((1 << s.log_parts) - 1), part.team = warp >> s.log_parts;
    part.teams = kWorkers >> s.log_parts;
    part.begin = part.number * p.part_chunks, part.end = min(part.begin + p.part_chunks, s.chunks);
    part.x =
        hopper::smem_address(work) + min(lane / 4, p.rows - 1) * row_step(s.chunks) + lane % 4 * kVectorBytes;
    part.pieces = s.pieces, part.piece_chunks = s.piece_chunks;
    part.rows = p.rows, part.of_line = p.rows * kFeatures << s.log_parts;
    const int feature = feature_of(lane / 4);
    part.weights = hopper::smem_address(ring) + feature * kChunkBytes + ((lane % 4) ^ feature) * kVectorBytes;
    return part;
  }

  // Where a row of x begins: in memory, or as mail.
  template <class T>
  __device__ const unsigned char* x_row(const Stage& s, int64_t row) const {
    const Product<bf16>& p = s.product;
    if (s.x_mail >= 0) return rest.mail + s.x_mail + uint32_t(row) * uint32_t(p.k) * uint32_t(sizeof(T));
    return static_cast<const unsigned char*>(p.x) + row * p.x_stride * int64_t(sizeof(T));
  }
  // Reads 16 bytes each at two places and kApart bytes behind them, where `wanted` has a bit, and of mail
  // until they have come; the others are zeros.
  static constexpr int kApart = kWarp * kVectorBytes;
  template <class T>
  __device__ __forceinline__ static void read(const unsigned char* first, const unsigned char* second,
                                              unsigned wanted, bool by_mail, uint4 (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = make_uint4(0, 0, 0, 0);
    Watchdog dog;
    bool come;
#pragma unroll 1
    do {
      dog.look();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        read_mail_if((wanted >> i & 1) != 0, (i < 2 ? first : second) + i % 2 * kApart, x[i]);
      come = true;
#pragma unroll
      for (int i = 0; i < 4; ++i) come &= has_come<T>(x[i]);
    } while (by_mail && !come);
  }

  // A part of all rows; `both`: of the warps of a part each takes rows in turn. Two rows are
  // read at the same time, or four times as many vectors as there are lanes of one.
  __device__ __forceinline__ void take_part(const Stage& s, const Part& part, bool both) const {
    constexpr int kColumns = kApart / int(sizeof(bf16));  // of a vector of every lane
    const Product<bf16>& p = s.product;
    if (part.team != 0 && !both) return;
    const int begin = part.begin * kChunk, end = part.end * kChunk, row_bytes = row_step(s.chunks),
              next = both ? 2 : 1;
    const bool by_mail = s.x_mail >= 0;
#pragma unroll 1
    for (int row = part.team; row < p.rows;) {
      const bool two = row + next < p.rows && end - begin <= 2 * kColumns;
      const unsigned char *const x = x_row<bf16>(s, row), *const y = two ? x_row<bf16>(s, row + next) : x;
      const int apart = two ? next * row_bytes : 2 * kApart, behind = two ? 0 : 2 * kColumns;
#pragma unroll 1
      for (int base = begin; base < end; base += 4 * kColumns) {
        const int from = base + lane * (kVectorBytes / int(sizeof(bf16)));
        uint4 got[4];
        unsigned live = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = from + i % 2 * kColumns + (i < 2 ? 0 : behind);
          if (column < end) live |= 1U << i;
        }
        const int at = from * int(sizeof(bf16));
        read<bf16>(x + at, y + at + behind * int(sizeof(bf16)), live, by_mail, got);
        unsigned char* const to = work + row * row_bytes + at;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if ((live >> i & 1) != 0)
            *reinterpret_cast<uint4*>(to + (i < 2 ? 0 : apart) + i % 2 * kApart) = got[i];
      }
      row += two ? 2 * next : next;
    }
    if (both)
      meet_pair(part.number);
    else
      __syncwarp();
  }

  // A part of rows that are normed: x times the gain, and the sum of its squares.
  __device__ __forceinline__ void take_normed(const Stage& s, const Part& part, bool both, float* squares) {
    constexpr int kEach = kVectorBytes / int(sizeof(float)), kColumns = kApart / int(sizeof(float));
    const Product<bf16>& p = s.product;
    if (part.team != 0 && !both) return leave_piece(gain_piece(p.k));
    const int begin = part.begin * kChunk, end = part.end * kChunk, row_bytes = row_step(s.chunks);
    const bool by_mail = s.x_mail >= 0;
    const auto* const gains = reinterpret_cast<const float*>(ring + walk.place(gain_piece(p.k)));
    await_piece(walk);
#pragma unroll 1
    for (int row = part.team; row < p.rows; row += both ? 2 : 1) {
      const unsigned char* const x = x_row<float>(s, p.pick != nullptr ? __ldcg(p.pick + row) : row);
      float sum = 0;
#pragma unroll 1
      for (int base = begin; base < end; base += 4 * kColumns) {
        const int from = base + lane * kEach;
        uint4 got[4];
        float4 gain[4];
        unsigned live = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = from + i * kColumns;
          if (column < end) live |= 1U << i;
          gain[i] = column < end ? *reinterpret_cast<const float4*>(gains + column) : make_float4(0, 0, 0, 0);
        }
        const unsigned char* const at = x + from * int(sizeof(float));
        read<float>(at, at + 2 * kApart, live, by_mail, got);
        unsigned char* const to = work + row * row_bytes + from * int(sizeof(bf16));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 v = make_float4(__uint_as_float(got[i].x), __uint_as_float(got[i].y),
                                       __uint_as_float(got[i].z), __uint_as_float(got[i].w));
          if ((live >> i & 1) != 0)
            *reinterpret_cast<uint2*>(to + i * kColumns * int(sizeof(bf16))) = make_uint2(
                pack_bf16(v.x * gain[i].x, v.y * gain[i].y), pack_bf16(v.z * gain[i].z, v.w * gain[i].w));
          sum += decode_product::squares_of(v);  // zeros where there is nothing
        }
      }
      sum = warp_sum(sum);
      if (lane == 0) squares[part.number * kMostRows + row] = sum;
    }
    leave_piece(gain_piece(p.k));
    if (both)
      meet_pair(part.number);
    else
      __syncwarp();
  }

  // The sums of a line or two, part by part; two lines have their pieces in the ring in turns. A warp looks
  // at those pieces alone that have something of its part, and is through with the others at once: between
  // two barriers lie fewer pieces than kPieces. It arrives for as many warps as there are teams.
  __device__ __forceinline__ void multiply(const Part& part, bool two, float* to) {
    const int size = part.piece_chunks * kSlice;
    LineSums own;
#pragma unroll 1
    for (int i = 0, first = 0; i < part.pieces; ++i, first += part.piece_chunks) {
      const int begin = max(part.begin, first), end = min(part.end, first + part.piece_chunks);
      RingWalk second = walk;
      if (two) second.pass(size);
      if (begin < end) {
        const uint32_t from = part.weights + (begin - first) * kSlice;
        uint32_t a = from + walk.place(size), b = two ? from + second.place(size) : a,
                 x = part.x + begin * kChunkBytes;
        await_piece(walk);
        await_piece(second);
        int left = end - begin;
#pragma unroll 1
        for (; left >= 2; left -= 2, a += 2 * kSlice, b += 2 * kSlice, x += 2 * kChunkBytes)
          own.add<2>(a, b, x);
        if (left > 0) own.add<1>(a, b, x);
      }
      // Its own walk goes on behind the last line.
      __syncwarp();
      if (lane < hopper::kWarpArrivals) {
        const auto empty = [&](const RingWalk& at) {
          return hopper::smem_address(&rest.barriers.empty[at.slot()]);
        };
        hopper::barrier_arrive(empty(walk), uint32_t(part.teams));
        if (two) hopper::barrier_arrive(empty(second), uint32_t(part.teams));
      }
      walk = second;
      walk.pass(size);
    }
    const int of_part = part.rows * kFeatures;
    own.put(to + part.number * of_part, two ? part.of_line : 0, part.rows, lane);
  }
  // Lines of the other team.
  __device__ __forceinline__ void skip(const Part& part, bool two) {
    const int size = part.piece_chunks * kSlice;
#pragma unroll 1
    for (int i = two ? 2 * part.pieces : part.pieces; i > 0; --i) walk.pass(size);
  }

  // A stage that the block has a part in.
  __device__ void product(const Stage& s) {
    const Product<bf16>& p = s.product;
    const int tiles = tiles_of(s, first_tile(s)), batch = s.batch;
    const bool pairs = s.pairs();
    const Part part = part_of(s);
    if (warp == 0) await_stages(rest.program, s.awaited);
    // All workers are through with the rows of the stage before, and these sums and squares are free.
    sync_workers_and_finishers(kFreeBarrier + turn);
    const bool both = part.teams == 2 && min(tiles, batch) > (pairs ? 1 : 2);
    if (p.gain != nullptr) {
      take_normed(s, part, both, rest.squares[normed]);
      hand_over(kSquaresBarrier + normed);
      normed ^= 1;
    } else {
      take_part(s, part, both);
    }
#pragma unroll 1
    for (int from = 0; from < tiles; from += batch) {
      if (from > 0) sync_workers_and_finishers(kFreeBarrier + turn);
      const int count = min(batch, tiles - from), lines = pairs ? 2 * count : count;
#pragma unroll 1
      for (int n = 0; n < lines; n += 2) {
        const bool two = n + 1 < lines;
        if ((n / 2 & (part.teams - 1)) == part.team)
          multiply(part, two, rest.sums[turn] + n * part.of_line);
        else
          skip(part, two);
      }
      hand_over(kSumsBarrier + turn);
      turn ^= 1;
    }
  }

  // A stage lies in the ring only until every warp has it in a place of its own.
  __device__ void run() {
    auto* const mine = rest.stage[warp];
    const Stage& s = *reinterpret_cast<const Stage*>(mine);
    for (;;) {
      await_piece(walk);
      if (lane < kStageVectors)
        mine[lane] = reinterpret_cast<const uint4*>(ring + walk.place(kStagePiece))[lane];
      leave_piece(kStagePiece);
      if (s.ends) return;
      product(s);
      __syncwarp();
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
