// The kernel behind decode_program.h: one block on every multiprocessor, all at the same time, walks through
// the stages. One warp of it loads weights, the others multiply.
//
// The loading warp needs nothing that the step computes, so it goes through the stages by itself, as far
// ahead as the ring holds: memory is read while the other warps wait for a stage to end everywhere. Tiles of
// eight features are dealt to the blocks in turn, on from where the stage before has stopped.
//
// What a product adds to the residual, or makes for the next product, goes from block to block as mail:
// numbers in a place of their own, where kNoNumber stands until they come. Whoever wants them reads until
// they are there: nobody waits for more than he needs, and no fence or barrier stands between. There are two
// such places, for launches in turn: who writes into one leaves kNoNumber in the other. Queries, keys and
// values, and what attention makes, are waited for by counters: a stage begins when those of the stages that
// it awaits say that all of their blocks have written theirs. What other blocks have written is read past the
// first-level cache. Sums are made of the same parts, in the same order, as decode_linear_product.cuh makes
// them.
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

// Two bf16, or an f32, that no sum is: the NaN that instructions make is another one.
constexpr uint32_t kNoNumber = 0xFFFFFFFF;
constexpr int kMostAwaited = 4;

struct Stage {
  bool attends = false;     // else it multiplies
  bool arrives = true;      // somebody awaits it
  bool keeps = true;        // y is written where it belongs, and not as mail alone
  int32_t first_block = 0;  // which block has tile 0
  struct Await {
    int32_t stage = 0, arrivals = 0;
  } awaited[kMostAwaited];               // the first ones; no arrivals: no more
  int32_t parts = 0, chunks = 0;         // of k
  int32_t pieces = 0, piece_chunks = 0;  // of a tile's way through the ring
  int32_t batch = 0;                     // tiles whose sums are added up together
  // Where mail lies, in bytes, its rows one behind the other; -1: it is no mail. `old`: what y is added to.
  int64_t x_mail = -1, old_mail = -1, y_mail = -1;
  Product<bf16> product;
};
struct alignas(16) Record {
  Stage stage;
  decode::Problem attention;
  decode::Partials partials;
};
constexpr int kStageVectors = int((sizeof(Stage) + 15) / 16), kRecordVectors = int(sizeof(Record) / 16);
static_assert(kStageVectors <= kWarp && kRecordVectors <= kWorkerThreads);

struct Own {
  unsigned ended;     // blocks; 0 between kernels
  unsigned launches;  // of this program, so far
};
struct Program {
  const Record* records = nullptr;
  // A line for every stage, 0 between kernels, and one with Own.
  unsigned* counters = nullptr;
  unsigned char* mail = nullptr;
  int64_t mail_bytes = 0;  // of each of two places
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
// A stage's record is written kAhead stages before, so that there is a barrier between: every stage has one.
// Meanwhile the one before may still be read.
constexpr int kAhead = 3, kRecords = kAhead + 1;
// Shared memory: the ring, rows of x, attention's warps, then this.
struct Rest {
  alignas(16) float sums[kSumsBytes / sizeof(float)];
  Record record[kRecords];
  alignas(16) uint4 loaded[kStageVectors];
  RingBarriers barriers;
  // What the workers know is read where it is needed, for attention wants the registers.
  Program program;
  unsigned char *mail, *other_mail;  // this launch's, the next one's
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
__device__ __forceinline__ uint4 read_mail(const unsigned char* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ uint32_t read_mail_float(const unsigned char* from) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void write_mail(unsigned char* to, uint32_t x) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void write_mail(unsigned char* to, uint16_t x) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(x) : "memory");
}
template <class T>
__device__ __forceinline__ bool has_come(uint32_t x) {
  if constexpr (sizeof(T) == sizeof(float)) return x != kNoNumber;
  constexpr uint32_t kHalf = 0xFFFF;
  return (x & kHalf) != kHalf && x >> 16 != kHalf;
}
template <class T>
__device__ __forceinline__ bool has_come(const uint4& x) {
  return has_come<T>(x.x) && has_come<T>(x.y) && has_come<T>(x.z) && has_come<T>(x.w);
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
  const unsigned char* const ring;
  unsigned char* const work;
  Rest& rest;
  RingWalk walk;
  const int me = int(threadIdx.x), warp = me / kWarp, lane = me % kWarp;

  __device__ unsigned* counter(int stage) const { return rest.program.counters + stage * kCounterStep; }
  __device__ void await_piece() const { wait_for(rest.barriers.full[walk.slot()], walk.parity()); }
  __device__ void leave_piece(int size) {
    hopper::warp_arrive(hopper::smem_address(&rest.barriers.empty[walk.slot()]));
    walk.pass(size);
  }

  // Calls put(row, column, x) for 16 bytes of x at a time, up to `columns` of each row: zeros from k on. x is
  // read where it lies, or as it comes.
  template <class T, class Put>
  __device__ void fetch(const Stage& s, int columns, Put&& put) const {
    constexpr int kEach = kVectorBytes / int(sizeof(T)), kAhead = 4;
    const Product<bf16>& p = s.product;
    const int of_row = columns / kEach, all = p.rows * of_row;
    const bool by_mail = s.x_mail >= 0;
    const int64_t stride = by_mail ? p.k : p.x_stride;
    const unsigned char* const x = by_mail ? rest.mail + s.x_mail : static_cast<const unsigned char*>(p.x);
    for (int base = me; base < all; base += kAhead * kWorkerThreads) {
      const unsigned char* from[kAhead];
      uint4 got[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int n = base + i * kWorkerThreads, r = n / of_row, c = (n - r * of_row) * kEach;
        from[i] = nullptr;
        if (n >= all || c >= p.k) continue;
        const int64_t row = p.pick != nullptr ? __ldcg(p.pick + r) : r;
        from[i] = x + (row * stride + c) * int64_t(sizeof(T));
      }
      const auto read = [&] {
        bool come = true;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          got[i] = make_uint4(0, 0, 0, 0);
          if (from[i] == nullptr) continue;
          got[i] = by_mail ? read_mail(from[i]) : decode_product::read_vector(from[i]);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) come = come && has_come<T>(got[i]);
        return come;
      };
      if (!read() && by_mail) {
        Watchdog dog;
        while (!read()) dog.look();
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int n = base + i * kWorkerThreads, r = n / of_row;
        if (n < all) put(r, (n - r * of_row) * kEach, got[i]);
      }
    }
  }

  // f(x), in rows of row_step() bytes, zeros up to whole chunks. Ends with a barrier.
  __device__ void take_rows(const Stage& s) {
    const Product<bf16>& p = s.product;
    const int step = row_step(s.chunks), columns = s.chunks * kChunk;
    if (p.gain == nullptr) {
      fetch<bf16>(s, columns, [&](int r, int c, const uint4& x) {
        *reinterpret_cast<uint4*>(work + r * step + c * int(sizeof(bf16))) = x;
      });
      return meet();
    }
    float* const raw = reinterpret_cast<float*>(work + p.rows * step);
    fetch<float>(s, p.k,
                 [&](int r, int c, const uint4& x) { *reinterpret_cast<uint4*>(raw + r * p.k + c) = x; });
    meet();
    const auto read = [&](int r, int c) { return *reinterpret_cast<const float4*>(raw + r * p.k + c); };
    if (warp < p.rows) {
      const float scale = decode_product::norm_scale([&](int c) { return read(warp, c); }, p.eps, p.k);
      if (lane == 0) rest.scale[warp] = scale;
    }
    await_piece();
    const auto* const gain = reinterpret_cast<const float*>(ring + walk.place(gain_bytes(p)));
    meet();
    const int of_row = columns / 4;
    for (int i = me; i < p.rows * of_row; i += kWorkerThreads) {
      const int r = i / of_row, c = (i - r * of_row) * 4;
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
      const int stop = min(end, piece.first + piece.count), whole = min(stop, p.k / kChunk);
      int chunk = max(begin, piece.first);
#pragma unroll 4
      for (; chunk < whole; ++chunk) {
        const auto* const at = w + chunk * kChunkBytes;
        const uint4 both[2] = {*reinterpret_cast<const uint4*>(at),
                               *reinterpret_cast<const uint4*>(at + kHalf)};
        own.add(both, x, chunk * kChunkBytes, lane);
      }
      if (chunk < stop) {  // the last one: behind k lies anything
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

  __device__ unsigned char* y_mail(const Stage& s, unsigned char* place, int row, int feature) const {
    const Product<bf16>& p = s.product;
    return place + s.y_mail +
           (int64_t(row) * p.outputs + feature) * int64_t(p.floats ? sizeof(float) : sizeof(bf16));
  }
  // What y is added to, which may not have come yet.
  __device__ uint32_t old_of(const Stage& s, int row, int feature) const {
    const Product<bf16>& p = s.product;
    if (s.old_mail >= 0)
      return read_mail_float(rest.mail + s.old_mail +
                             (int64_t(row) * p.outputs + feature) * int64_t(sizeof(float)));
    return __float_as_uint(__ldcg(static_cast<const float*>(p.y) + row * p.y_stride + feature));
  }
  __device__ void put_result(const Stage& s, int row, int feature, float x) const {
    const Product<bf16>& p = s.product;
    const bf16 rounded = from_float<bf16>(x);
    if (s.y_mail >= 0) {
      if (p.floats) {
        write_mail(y_mail(s, rest.mail, row, feature), __float_as_uint(x));
        write_mail(y_mail(s, rest.other_mail, row, feature), kNoNumber);
      } else {
        write_mail(y_mail(s, rest.mail, row, feature), rounded.bits);
        write_mail(y_mail(s, rest.other_mail, row, feature), uint16_t(kNoNumber));
      }
    }
    if (!s.keeps) return;
    const bool behind = feature >= p.split;
    void* const y = behind ? p.rest : p.y;
    const int64_t to = behind ? row * p.rest_stride + feature - p.split : row * p.y_stride + feature;
    if (p.floats)
      static_cast<float*>(y)[to] = x;
    else
      static_cast<bf16*>(y)[to] = rounded;
  }

  // By some lanes of a warp; what was awaited is seen behind the barrier that follows.
  __device__ void await_stages(const Stage& s) const {
    if (lane < kMostAwaited && s.awaited[lane].arrivals > 0)
      await_stage(counter(s.awaited[lane].stage), unsigned(s.awaited[lane].arrivals));
  }

  // Whether this block has a part in it.
  __device__ bool product(const Stage& s, const Stage& shared) {
    const Product<bf16>& p = s.product;
    const int first = first_tile(s), blocks = int(gridDim.x);
    if (first >= p.tiles) return false;
    if (s.awaited[0].arrivals > 0) {
      if (warp == 0) await_stages(shared);
      meet();
    }

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
    uint32_t old = kNoNumber;
    if (p.end == DecodeEnd::add && me < min(tiles, s.batch) * p.rows * kFeatures) {
      const Place at = place(me);
      const int feature = (first + at.tile * blocks) * kFeatures + at.column;
      if (feature < p.outputs) old = old_of(s, at.row, feature);
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
        float sum = total(s, at.tile * halves, at.row, at.column);
        if (p.end == DecodeEnd::swiglu) {
          sum = decode_product::silu_times<bf16>(sum, total(s, at.tile * 2 + 1, at.row, at.column));
        } else if (p.end == DecodeEnd::add) {
          uint32_t before = from == 0 && i == me ? old : old_of(s, at.row, feature);
          Watchdog dog;
          while (s.old_mail >= 0 && before == kNoNumber) {
            before = old_of(s, at.row, feature);
            dog.look();
          }
          sum = __uint_as_float(before) + sum;
        }
        put_result(s, at.row, feature, sum);
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
    return me < kRecordVectors && stage < rest.program.stages ? record_vector(rest.program, stage, me)
                                                              : make_uint4(0, 0, 0, 0);
  }

  // The rest of an attention.
  template <class Split>
  __device__ void attend(int stage, Split& split) {
    const Stage& s = record(stage).stage;
    bool waited = false;
    const int tiles = split.finish([&](int, int) {
      if (!waited) await_stages(s);
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
      const uint4 coming = ask_record(n + kAhead);
      const Stage s = record(n).stage;
      const bool part = product(s, record(n).stage);
      put_record(n + kAhead, coming);
      if (!part || s.arrives) meet();
      if (part && s.arrives && me == 0) arrive(counter(n), 1);
    };
    if constexpr (D > 0) {
      const bool attends = last < rest.program.stages && record(last).stage.attends,
                 mine = attends && warp < rest.program.attention_warps;
      auto* const memory = reinterpret_cast<AttentionWarp<D>*>(work + rest.program.work_bytes) + warp;
      const Record& r = record(last);
      decode::SplitWarp<D, true, 1> split(r.attention, r.partials, memory->shared);
      if (mine) split.start({int(blockIdx.x), int(gridDim.x), warp, rest.program.attention_warps});
      if (multiplies) to_product();
      if (!attends) return 1;
      const uint4 coming = ask_record(last + kAhead);
      if (mine) attend(last, split);
      put_record(last + kAhead, coming);
      meet();
      return int(multiplies) + 1;
    }
    to_product();
    return 1;
  }

  __device__ void run() {
    const Program& program = rest.program;
    for (int n = 0; n < kAhead; ++n) put_record(n, ask_record(n));
    meet();
    for (int n = 0; n < program.stages;) n += step(n);
    // Nobody looks at a counter any more when all blocks are here: the last one leaves zeros behind.
    Own* const own = reinterpret_cast<Own*>(counter(program.stages));
    if (me == 0) {
      __threadfence();
      rest.last = atomicInc(&own->ended, gridDim.x - 1) == gridDim.x - 1;
    }
    meet();
    if (!rest.last) return;
    __threadfence();
    if (me == 0) ++own->launches;
    for (int n = me; n < program.stages; n += kWorkerThreads) *counter(n) = 0;
  }
};

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
  if (me >= kWorkerThreads) return load_weights(program, memory, rest);
  Worker<D>{memory, memory + program.ring_bytes, rest, RingWalk(program.ring_bytes)}.run();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
