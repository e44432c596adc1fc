// The kernel behind decode_program.h: one block on every multiprocessor, all at the same time, walks through
// the stages. One warp of it loads weights, the others multiply.
//
// The loading warp needs nothing that the step computes, so it goes through the stages by itself, as far
// ahead as the ring holds: memory is read while the other warps wait for a stage to end everywhere. Tiles of
// eight features are dealt to the blocks in turn, on from where the stage before has stopped.
//
// A stage begins when the counter of the one before says that all blocks that had a part in it have written
// theirs. What other blocks have written is read past the first-level cache. Sums are made of the same parts,
// in the same order, as decode_linear_product.cuh makes them.
//
// Some of the warps are attention's (SplitWarp): each asks for its first keys of earlier steps before the
// product in front of the attention, so that they are there when its queries are.
#pragma once

#include "ops/decode_attention/decode_attention_split.cuh"
#include "ops/decode_linear/decode_linear_product.cuh"
#include "ops/decode_program/decode_program_ring.cuh"

namespace sps::ops::decode_program {

using decode_product::kChunkBytes, decode_product::kFeatures, decode_product::kHalf,
    decode_product::kVectorBytes, decode_product::Product;

constexpr int kMostRows = 8;
constexpr int kWorkers = 8, kWorkerThreads = kWorkers * kWarp;  // warps that multiply
constexpr int kThreads = kWorkerThreads + kWarp;
constexpr int kChunk = decode_product::kChunk<bf16>;
constexpr int kPieceChunks = 16;     // of a piece of the ring, at most
constexpr int kSumsBytes = 8 << 10;  // of the tiles that are added up together
constexpr int kCounterStep = 32;     // unsigned numbers from one counter to the next: lines of their own
constexpr int kWorkersBarrier = 1;   // number of the barrier among the workers

struct Stage {
  bool attends = false;           // else it multiplies
  int32_t first_block = 0;        // which block has tile 0
  int32_t awaited = 0;            // what the counter of the stage before counts up to; 0: nothing to wait for
  int32_t parts = 0, chunks = 0;  // of k
  int32_t pieces = 0, piece_chunks = 0;  // of a tile's way through the ring
  int32_t batch = 0;                     // tiles whose sums are added up together
  Product<bf16> product;
};
struct alignas(16) Record {
  Stage stage;
  decode::Problem attention;
  decode::Partials partials;
};
constexpr int kStageVectors = int((sizeof(Stage) + 15) / 16), kRecordVectors = int(sizeof(Record) / 16);
static_assert(kStageVectors <= kWarp && kRecordVectors <= kWorkerThreads);

struct Program {
  const Record* records = nullptr;
  unsigned* counters = nullptr;  // of every stage, and of the blocks that have ended; 0 between kernels
  int32_t stages = 0;
  int32_t ring_bytes = 0, work_bytes = 0;
  int32_t attention_warps = 0;
};

// Rows of x as the products read them: rows lie a half chunk apart in their banks.
__host__ __device__ constexpr int row_step(int chunks) {
  return chunks * kChunkBytes + kHalf;
}
// Of a warp of attention, with heads up to D wide; 0: there is none.
template <int D>
struct AttentionWarp {
  decode::WarpShared<D, 1> shared;
};
template <>
struct AttentionWarp<0> {};
template <int D>
__host__ __device__ constexpr int attention_bytes(int warps) {
  return D == 0 ? 0 : warps * int(sizeof(AttentionWarp<D>));
}
constexpr int kRecords = 4;  // of the stage, those on either side, and the one that is written
// Shared memory: the ring, rows of x, attention's warps, then this.
struct Rest {
  alignas(16) float sums[kSumsBytes / sizeof(float)];
  Record record[kRecords];
  alignas(16) uint4 loaded[kStageVectors];
  RingBarriers barriers;
  float scale[kMostRows];
  bool last;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A tile's pieces: chunks [first, first + count) of k.
struct Piece {
  int first, count;
  __device__ Piece(const Stage& s, int n)
      : first(n * s.piece_chunks), count(min(s.piece_chunks, s.chunks - first)) {}
  __device__ int step() const { return row_step(count); }
  __device__ int bytes() const { return kFeatures * step(); }
};
__device__ __forceinline__ int gain_bytes(const Product<bf16>& p) {
  return p.gain != nullptr ? p.k * int(sizeof(float)) : 0;
}
__device__ __forceinline__ int first_tile(const Stage& s) {
  const int n = int(blockIdx.x) - s.first_block;
  return n < 0 ? n + int(gridDim.x) : n;
}
__device__ __forceinline__ uint4 record_vector(const Program& program, int stage, int vector) {
  return __ldg(reinterpret_cast<const uint4*>(program.records + stage) + vector);
}

__device__ __forceinline__ void load_weights(const Program& program, unsigned char* ring, Rest& rest) {
  const int lane = int(threadIdx.x) % kWarp;
  RingWalk walk(program.ring_bytes);
  RingRoom room(program.ring_bytes);
  // `rows` rows of as many bytes, `step` apart in a piece of `size`; `from` is the lane's.
  const auto push = [&](int size, int rows, int bytes, int step, const void* from) {
    room.make(walk, size, rest.barriers);
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
  for (int n = 0; n < program.stages; ++n) {
    __syncwarp();
    if (copies) rest.loaded[lane] = next;
    __syncwarp();
    if (copies && n + 1 < program.stages) next = record_vector(program, n + 1, lane);
    const Stage s = *reinterpret_cast<const Stage*>(rest.loaded);
    const Product<bf16>& p = s.product;
    int tile = first_tile(s);
    if (s.attends || tile >= p.tiles) continue;
    if (p.gain != nullptr) push(gain_bytes(p), 1, gain_bytes(p), 0, p.gain);
    for (; tile < p.tiles; tile += int(gridDim.x)) {
      const int rows = min(kFeatures, p.outputs - tile * kFeatures);
      for (int half = 0; half < (p.end == DecodeEnd::swiglu ? 2 : 1); ++half) {
        const bf16* const row = p.w + (int64_t(half) * p.outputs + tile * kFeatures + lane) * p.w_stride;
        for (int i = 0; i < s.pieces; ++i) {
          const Piece piece(s, i);
          const int columns = min(piece.count * kChunk, p.k - piece.first * kChunk);
          push(piece.bytes(), rows, columns * int(sizeof(bf16)), piece.step(), row + piece.first * kChunk);
        }
      }
    }
  }
}

__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kWorkersBarrier), "n"(kWorkerThreads) : "memory");
}
__device__ __forceinline__ void await_stage(const unsigned* counter, unsigned arrivals) {
  const auto arrived = [&] {
    unsigned now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now >= arrivals;
  };
  if (arrived()) return;
  Watchdog dog;
  while (!arrived()) dog.look();
}
// After a barrier of those whose writes it is about.
__device__ __forceinline__ void arrive(unsigned* counter, unsigned arrivals) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(arrivals) : "memory");
}

template <int D>
struct Worker {
  const Program& program;
  const unsigned char* const ring;
  unsigned char* const work;
  Rest& rest;
  RingWalk walk;
  const int me = int(threadIdx.x), warp = me / kWarp, lane = me % kWarp;

  __device__ unsigned* counter(int stage) const { return program.counters + stage * kCounterStep; }
  __device__ void await_piece() const { wait_for(rest.barriers.full[walk.slot()], walk.parity()); }
  __device__ void leave_piece(int size) {
    hopper::warp_arrive(hopper::smem_address(&rest.barriers.empty[walk.slot()]));
    walk.pass(size);
  }

  // f(x), in rows of row_step() bytes, zeros up to whole chunks. Ends with a barrier.
  __device__ void take_rows(const Stage& s) {
    const Product<bf16>& p = s.product;
    const int step = row_step(s.chunks);
    const auto row_of = [&](int r) -> int64_t { return p.pick != nullptr ? __ldcg(p.pick + r) : r; };
    if (p.gain == nullptr) {
      constexpr int kEach = kVectorBytes / int(sizeof(bf16));
      const int vectors = s.chunks * (kChunk / kEach);
#pragma unroll 4
      for (int i = me; i < p.rows * vectors; i += kWorkerThreads) {
        const int r = i / vectors, c = i % vectors * kEach;
        const bf16* const from = static_cast<const bf16*>(p.x) + r * p.x_stride + c;
        *reinterpret_cast<uint4*>(work + r * step + c * int(sizeof(bf16))) =
            c < p.k ? decode_product::read_vector(from) : make_uint4(0, 0, 0, 0);
      }
      return meet();
    }
    float* const raw = reinterpret_cast<float*>(work + p.rows * step);
    const int of_row = p.k / 4;
#pragma unroll 4
    for (int i = me; i < p.rows * of_row; i += kWorkerThreads) {
      const int r = i / of_row, c = i % of_row * 4;
      const float* const from = static_cast<const float*>(p.x) + row_of(r) * p.x_stride + c;
      *reinterpret_cast<uint4*>(raw + r * p.k + c) = decode_product::read_vector(from);
    }
    meet();
    const auto read = [&](int r, int c) { return *reinterpret_cast<const float4*>(raw + r * p.k + c); };
    if (warp < p.rows) {
      const float scale = decode_product::norm_scale([&](int c) { return read(warp, c); }, p.eps, p.k);
      if (lane == 0) rest.scale[warp] = scale;
    }
    await_piece();
    const auto* const gain = reinterpret_cast<const float*>(ring + walk.place(gain_bytes(p)));
    meet();
    const int columns = s.chunks * kChunk / 4;
    for (int i = me; i < p.rows * columns; i += kWorkerThreads) {
      const int r = i / columns, c = i % columns * 4;
      float n[4] = {};
      if (c < p.k) {
        const float4 v =
            decode_product::normed(read(r, c), rest.scale[r], *reinterpret_cast<const float4*>(gain + c));
        n[0] = v.x, n[1] = v.y, n[2] = v.z, n[3] = v.w;
      }
      store(reinterpret_cast<bf16*>(work + r * step) + c, n);
    }
    leave_piece(gain_bytes(p));
    meet();
  }

  // The sums of tile `n` of a batch, part by part. The warps are teams with a warp for each part, that take
  // tiles in turn.
  __device__ void multiply(const Stage& s, const decode_product::SharedRows& x, int n) {
    const Product<bf16>& p = s.product;
    const int part = warp % s.parts, teams = kWorkers / s.parts;
    const bool mine = n % teams == warp / s.parts;
    const int begin = part * p.part_chunks, end = mine ? begin + p.part_chunks : 0;
    decode_product::Sums<bf16, kMostRows> own;
    for (int i = 0; i < s.pieces; ++i) {
      const Piece piece(s, i);
      await_piece();
      const unsigned char* const w = ring + walk.place(piece.bytes()) + lane / 4 * piece.step() +
                                     lane % 4 * kVectorBytes - piece.first * kChunkBytes;
      const int stop = min(end, piece.first + piece.count);
#pragma unroll 4
      for (int chunk = max(begin, piece.first); chunk < stop; ++chunk) {
        const int k = chunk * kChunk + lane % 4 * (kVectorBytes / int(sizeof(bf16)));
        uint4 both[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (k < p.k) both[0] = *reinterpret_cast<const uint4*>(w + chunk * kChunkBytes);
        if (k + kChunk / 2 < p.k) both[1] = *reinterpret_cast<const uint4*>(w + chunk * kChunkBytes + kHalf);
        own.add(both, x, chunk * kChunkBytes, lane);
      }
      leave_piece(piece.bytes());
    }
    if (mine) own.put(rest.sums + (n * s.parts + part) * p.rows * kFeatures, kFeatures, p.rows, lane);
  }

  __device__ float total(const Stage& s, int n, int row, int column) const {
    const int step = s.product.rows * kFeatures;
    const float* part = rest.sums + n * s.parts * step + row * kFeatures + column;
    float sum = 0;
#pragma unroll 4
    for (int i = 0; i < s.parts; ++i) sum += part[i * step];
    return sum;
  }

  // Whether this block has a part in it.
  __device__ bool product(const Stage& s, int stage) {
    const Product<bf16>& p = s.product;
    const int first = first_tile(s), blocks = int(gridDim.x);
    if (first >= p.tiles) return false;
    if (me == 0 && s.awaited > 0) await_stage(counter(stage - 1), unsigned(s.awaited));
    meet();

    // Result i of a batch: of tile i / (8 rows), row by row.
    struct Place {
      int tile, row, column;
    };
    const auto place = [&](int i) {
      const int line = i / kFeatures, tile = line / p.rows;
      return Place{tile, line - tile * p.rows, i % kFeatures};
    };
    const int tiles = (p.tiles - first + blocks - 1) / blocks, halves = p.end == DecodeEnd::swiglu ? 2 : 1;
    // What this thread's first sum is added to; it comes while the sums are made.
    float old = 0;
    if (p.end == DecodeEnd::add && me < min(tiles, s.batch) * p.rows * kFeatures) {
      const Place at = place(me);
      const int feature = (first + at.tile * blocks) * kFeatures + at.column;
      if (feature < p.outputs) old = __ldcg(static_cast<const float*>(p.y) + at.row * p.y_stride + feature);
    }
    take_rows(s);

    const decode_product::SharedRows x{work, p.rows, row_step(s.chunks)};
    for (int from = 0; from < tiles; from += s.batch) {
      const int count = min(s.batch, tiles - from);
      for (int n = 0; n < count * halves; ++n) multiply(s, x, n);
      meet();
      for (int i = me; i < count * p.rows * kFeatures; i += kWorkerThreads) {
        const Place at = place(i);
        const int feature = (first + (from + at.tile) * blocks) * kFeatures + at.column;
        if (feature >= p.outputs) continue;
        const float sum = total(s, at.tile * halves, at.row, at.column);
        if (p.end == DecodeEnd::swiglu) {
          const float up = total(s, at.tile * 2 + 1, at.row, at.column);
          static_cast<bf16*>(p.y)[at.row * p.y_stride + feature] =
              from_float<bf16>(decode_product::silu_times<bf16>(sum, up));
        } else if (p.end == DecodeEnd::add) {
          float& to = static_cast<float*>(p.y)[at.row * p.y_stride + feature];
          to = (from == 0 && i == me ? old : __ldcg(&to)) + sum;
        } else {
          const bool behind = feature >= p.split;
          void* const y = behind ? p.rest : p.y;
          const int64_t to =
              behind ? at.row * p.rest_stride + feature - p.split : at.row * p.y_stride + feature;
          if (p.floats)
            static_cast<float*>(y)[to] = sum;
          else
            static_cast<bf16*>(y)[to] = from_float<bf16>(sum);
        }
      }
      if (from + s.batch < tiles) meet();  // the sums are free again
    }
    return true;
  }

  __device__ const Record& record(int stage) const {
    return rest.record[stage % kRecords];
  }
  __device__ void put_record(int stage, uint4 x) {
    if (me < kRecordVectors) reinterpret_cast<uint4*>(&rest.record[stage % kRecords])[me] = x;
  }
  __device__ uint4 ask_record(int stage) const {
    return me < kRecordVectors && stage < program.stages ? record_vector(program, stage, me)
                                                         : make_uint4(0, 0, 0, 0);
  }

  // The rest of an attention.
  template <class Split>
  __device__ void attend(int stage, Split& split) {
    const Stage& s = record(stage).stage;
    bool waited = s.awaited == 0;
    const int tiles = split.finish([&](int, int) {
      if (!waited && lane == 0) await_stage(counter(stage - 1), unsigned(s.awaited));
      waited = true;
      __syncwarp();
    });
    __syncwarp();
    if (tiles > 0 && lane == 0) arrive(counter(stage), unsigned(tiles));
  }

  // A product, an attention, or one behind the other; returns how many stages that were.
  __device__ int step(int n) {
    const bool multiplies = !record(n).stage.attends;
    const int last = n + int(multiplies);
    const auto to_product = [&] {
      const uint4 coming = ask_record(n + 2);
      const Stage s = record(n).stage;
      const bool part = product(s, n);
      put_record(n + 2, coming);
      meet();
      if (part && me == 0) arrive(counter(n), 1);
    };
    if constexpr (D > 0) {
      const bool attends = last < program.stages && record(last).stage.attends,
                 mine = attends && warp < program.attention_warps;
      auto* const memory = reinterpret_cast<AttentionWarp<D>*>(work + program.work_bytes) + warp;
      const Record& r = record(last);
      decode::SplitWarp<D, true, 1> split(r.attention, r.partials, memory->shared);
      if (mine) split.start({int(blockIdx.x), int(gridDim.x), warp, program.attention_warps});
      if (multiplies) to_product();
      if (!attends) return 1;
      const uint4 coming = ask_record(last + 2);
      if (mine) attend(last, split);
      put_record(last + 2, coming);
      meet();
      return int(multiplies) + 1;
    }
    to_product();
    return 1;
  }

  __device__ void run() {
    put_record(0, ask_record(0));
    put_record(1, ask_record(1));
    meet();
    for (int n = 0; n < program.stages;) n += step(n);
    // Nobody looks at a counter any more when all blocks are here: the last one leaves zeros behind.
    unsigned* const ended = program.counters + program.stages * kCounterStep;
    if (me == 0) {
      __threadfence();
      rest.last = atomicInc(ended, gridDim.x - 1) == gridDim.x - 1;
    }
    meet();
    if (!rest.last) return;
    __threadfence();
    for (int n = me; n < program.stages; n += kWorkerThreads) program.counters[n * kCounterStep] = 0;
  }
};

template <int D>
__device__ __forceinline__ void run_program(const Program& program, unsigned char* memory) {
  Rest& rest = *reinterpret_cast<Rest*>(memory + program.ring_bytes + program.work_bytes +
                                        attention_bytes<D>(program.attention_warps));
  if (int(threadIdx.x) < kPieces) {
    hopper::barrier_init(hopper::smem_address(&rest.barriers.full[threadIdx.x]), 1);
    hopper::barrier_init(hopper::smem_address(&rest.barriers.empty[threadIdx.x]),
                         kWorkers * hopper::kWarpArrivals);
    hopper::barrier_init_fence();
  }
  __syncthreads();
  if (int(threadIdx.x) >= kWorkerThreads) return load_weights(program, memory, rest);
  Worker<D>{program, memory, memory + program.ring_bytes, rest, RingWalk(program.ring_bytes)}.run();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
