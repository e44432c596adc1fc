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
// Some warps are attention's alone (SplitWarp): while the others multiply, each asks for its first keys of
// earlier steps, so that they are there when its queries are.
#pragma once

#include "ops/decode_attention/decode_attention_split.cuh"
#include "ops/decode_linear/decode_linear_product.cuh"
#include "ops/decode_program/decode_program_ring.cuh"

namespace sps::ops::decode_program {

using decode_product::kChunkBytes, decode_product::kFeatures, decode_product::kHalf,
    decode_product::kVectorBytes, decode_product::Product;

constexpr int kMostRows = 8;
constexpr int kWorkers = 8, kWorkerThreads = kWorkers * kWarp;  // warps that multiply
constexpr int kLoader = kWorkers, kFirstAttention = kWorkers + 1, kMostAttentionWarps = 3;  // warps
constexpr int kThreads = (kFirstAttention + kMostAttentionWarps) * kWarp;
constexpr int kChunk = decode_product::kChunk<bf16>;
constexpr int kPieceChunks = 16;     // of a piece of the ring, at most
constexpr int kSumsBytes = 8 << 10;  // of the tiles that are added up together
constexpr int kCounterStep = 32;     // unsigned numbers from one counter to the next: lines of their own
constexpr int kWorkersBarrier = 1;   // number of the barrier among the workers
constexpr int kEndBarrier = 2;       // among them and attention's warps

// Two bf16, or an f32, that no sum is: the NaN that instructions make is another one.
constexpr uint32_t kNoNumber = 0xFFFFFFFF;
constexpr int kMostAwaited = 4;

struct Stage {
  bool attends = false;         // else it multiplies
  bool arrives = true;          // somebody awaits it
  bool keeps = true;            // y is written where it belongs, and not as mail alone
  int32_t next_attention = -1;  // stage of an attention
  int32_t first_block = 0;      // which block has tile 0
  struct Await {
    int32_t stage = 0, arrivals = 0;
  } awaited[kMostAwaited];                                // the first ones; no arrivals: no more
  int32_t log_parts = 0, chunks = 0;                      // of k
  int32_t pieces = 0, piece_chunks = 0, last_chunks = 0;  // of a tile's way through the ring
  int32_t batch = 0;                                      // tiles whose sums are added up together
  uint32_t row_inverse = 0;  // n / rows is n * row_inverse >> 16, for n below 2^10
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
static_assert(kStageVectors <= kWarp);

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
  int32_t attention_warps = 0, first_attention = -1;  // a stage, and from there on Stage::next_attention
};

// Rows of x as the products read them: rows lie a half chunk apart in their banks.
__host__ __device__ constexpr int row_step(int chunks) {
  return chunks * kChunkBytes + kHalf;
}
// Of a warp of attention, with heads up to D wide; 0: there is none.
template <int D>
struct AttentionWarp {
  decode::WarpShared<D, 1> shared;
  Record record;
};
template <>
struct AttentionWarp<0> {};
template <int D>
__host__ __device__ constexpr int attention_bytes(int warps) {
  return D == 0 ? 0 : warps * int(sizeof(AttentionWarp<D>));
}
// A stage is written kAhead stages before, so that there is a barrier between: every stage has one.
// Meanwhile the one before may still be read.
constexpr int kAhead = 3, kStages = kAhead + 1;
// Shared memory: the ring, rows of x, attention's warps, then this.
struct Rest {
  alignas(16) float sums[kSumsBytes / sizeof(float)];
  alignas(16) uint4 stage[kStages][kStageVectors];
  alignas(16) uint4 loaded[kStageVectors];
  RingBarriers barriers;
  // What the workers know is read where it is needed, for attention wants the registers.
  Program program;
  unsigned char *mail, *other_mail;  // this launch's, the next one's
  float scale[kMostRows];
  bool last;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

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
        for (int i = 0, first = 0; i < s.pieces; ++i, first += s.piece_chunks) {
          const int count = i + 1 < s.pieces ? s.piece_chunks : s.last_chunks, step = row_step(count);
          const int columns = min(count * kChunk, p.k - first * kChunk);
          push(kFeatures * step, rows, columns * int(sizeof(bf16)), step, row + first * kChunk);
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

// Where it stands, whatever stands behind it.
__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from));
  return x;
}

// Sums of 8 features and up to 8 rows, bit by bit those of decode_product::Sums: of every 16 bytes of a row
// the words 0 and 1 meet in one instruction, 2 and 3 in another. A lane's four words of x, in the order 0, 2,
// 1, 3, are the operand of both instructions: its upper rows are words 0 and 1, its lower ones 2 and 3, and
// each instruction's other half of sums means nothing.
struct PairSums {
  float sum[2][4] = {};

  __device__ __forceinline__ void add(const uint4& w, const uint4& x) {
    multiply_add(sum[0], {x.x, x.y, x.z, x.w}, w.x, w.y);
    multiply_add(sum[1], {x.x, x.y, x.z, x.w}, w.z, w.w);
  }
  // Chunks, from the lane's bytes on.
  template <int kChunks>
  __device__ __forceinline__ void add(uint32_t w, uint32_t x) {
    uint4 weights[2 * kChunks], rows[2 * kChunks];
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i)
      weights[i] = load_shared(w + i * kHalf), rows[i] = load_shared(x + i * kHalf);
#pragma unroll
    for (int i = 0; i < 2 * kChunks; ++i) add(weights[i], rows[i]);
  }
  // to[row * kFeatures + feature]
  __device__ __forceinline__ void put(float* to, int rows, int lane) const {
    if (lane / 4 < rows)
      *reinterpret_cast<float2*>(to + 2 * lane) = make_float2(sum[0][0] + sum[1][2], sum[0][1] + sum[1][3]);
  }
};

// What the workers of a block do with stages of products.
struct Worker {
  unsigned char* const ring;
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
  __device__ __forceinline__ void fetch(const Stage& s, int columns, Put&& put) const {
    constexpr int kStep = kVectorBytes / int(sizeof(T)) * kWorkerThreads;
    const int rows = s.product.rows;
    if (rows == 1 && columns <= kStep) return fetch_some<T, 1>(s, columns, put);
    if (columns <= (rows == 1 ? 2 : rows == 2 ? 1 : 0) * kStep) return fetch_some<T, 2>(s, columns, put);
    fetch_some<T, 4>(s, columns, put);
  }
  // A thread asks for some vectors at once.
  template <class T, int kAtOnce, class Put>
  __device__ __forceinline__ void fetch_some(const Stage& s, int columns, Put&& put) const {
    constexpr int kEach = kVectorBytes / int(sizeof(T)), kStep = kEach * kWorkerThreads;
    const Product<bf16>& p = s.product;
    const bool by_mail = s.x_mail >= 0;
    const int64_t stride = by_mail ? p.k : p.x_stride;
    const unsigned char* const x = by_mail ? rest.mail + s.x_mail : static_cast<const unsigned char*>(p.x);
    int row = 0, column = kEach * me;  // of this thread's next vector
#pragma unroll 1
    while (row < p.rows) {
      const unsigned char* from[kAtOnce];
      int rows[kAtOnce], cols[kAtOnce];
      uint4 got[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        from[i] = nullptr, rows[i] = row, cols[i] = column;
        if (row < p.rows && column < p.k) {
          const int64_t at = p.pick != nullptr ? __ldcg(p.pick + row) : row;
          from[i] = x + (at * stride + column) * int64_t(sizeof(T));
        }
        column += kStep;
        if (column >= columns) column = kEach * me, ++row;
      }
      const auto read = [&] {
        bool come = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          got[i] = make_uint4(0, 0, 0, 0);
          if (from[i] == nullptr) continue;
          got[i] = by_mail ? read_mail(from[i]) : decode_product::read_vector(from[i]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) come = come && has_come<T>(got[i]);
        return come;
      };
      if (!read() && by_mail) {
        Watchdog dog;
        while (!read()) dog.look();
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (rows[i] < p.rows && cols[i] < columns) put(rows[i], cols[i], got[i]);
    }
  }

  // f(x), in rows of row_step() bytes, zeros up to whole chunks, the inner two of every four words in each
  // other's places, see PairSums. Ends with a barrier.
  __device__ void take_rows(const Stage& s) {
    const Product<bf16>& p = s.product;
    const int step = row_step(s.chunks), columns = s.chunks * kChunk;
    if (p.gain == nullptr) {
      fetch<bf16>(s, columns, [&](int r, int c, const uint4& x) {
        *reinterpret_cast<uint4*>(work + r * step + c * int(sizeof(bf16))) = make_uint4(x.x, x.z, x.y, x.w);
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
#pragma unroll 1
    for (int r = 0; r < p.rows; ++r) {
      const float scale = rest.scale[r];
      unsigned char* const to = work + r * step;
#pragma unroll 1
      for (int c = 4 * me; c < columns; c += 4 * kWorkerThreads) {
        float4 n{0, 0, 0, 0};
        if (c < p.k)
          n = decode_product::normed(read(r, c), scale, *reinterpret_cast<const float4*>(gain + c));
        // Numbers 0 to 3 of a vector, or 4 to 7.
        uint32_t* const pair = reinterpret_cast<uint32_t*>(to + c / 8 * kVectorBytes) + c / 4 % 2;
        pair[0] = pack_bf16(n.x, n.y), pair[2] = pack_bf16(n.z, n.w);
      }
    }
    leave_piece(gain_bytes(p));
    meet();
  }

  // A warp's part of k, the same for all tiles of a stage. The warps are teams with a warp for each part,
  // that take tiles in turn.
  struct Part {
    int number, team, teams, begin, end, whole;  // chunks; `whole` of them lie before the end of k
    uint32_t x;                                  // this lane's row, from the lane's bytes on
  };
  __device__ Part part_of(const Stage& s) const {
    const Product<bf16>& p = s.product;
    Part part;
    part.number = warp & ((1 << s.log_parts) - 1), part.team = warp >> s.log_parts;
    part.teams = kWorkers >> s.log_parts;
    part.begin = part.number * p.part_chunks, part.end = min(part.begin + p.part_chunks, s.chunks);
    part.whole = min(part.end, p.k / kChunk);
    part.x =
        hopper::smem_address(work) + min(lane / 4, p.rows - 1) * row_step(s.chunks) + lane % 4 * kVectorBytes;
    return part;
  }

  // The sums of tile `n` of a batch, part by part. A warp looks at those pieces alone that have something of
  // its part, and is through with the others at once: between two barriers lie fewer pieces than kPieces.
  __device__ void multiply(const Stage& s, const Part& part, int n) {
    const bool mine = (n & (part.teams - 1)) == part.team;
    PairSums own;
#pragma unroll 1
    for (int i = 0, first = 0; i < s.pieces; ++i, first += s.piece_chunks) {
      const int count = i + 1 < s.pieces ? s.piece_chunks : s.last_chunks, step = row_step(count);
      const int begin = max(part.begin, first), end = min(part.end, first + count);
      if (mine && begin < end) {
        await_piece();
        uint32_t w = hopper::smem_address(ring) + walk.place(kFeatures * step) + lane / 4 * step +
                     lane % 4 * kVectorBytes + (begin - first) * kChunkBytes,
                 x = part.x + begin * kChunkBytes;
        int left = min(end, part.whole) - begin;
#pragma unroll 1
        for (; left >= 2; left -= 2, w += 2 * kChunkBytes, x += 2 * kChunkBytes) own.template add<2>(w, x);
#pragma unroll 1
        for (; left > 0; --left, w += kChunkBytes, x += kChunkBytes) own.template add<1>(w, x);
        if (end > part.whole) {  // the last chunk: behind k lies anything
          const int k = part.whole * kChunk + lane % 4 * (kVectorBytes / int(sizeof(bf16)));
          const uint4 zeros = make_uint4(0, 0, 0, 0);
          own.add(k < s.product.k ? load_shared(w) : zeros, load_shared(x));
          own.add(k + kChunk / 2 < s.product.k ? load_shared(w + kHalf) : zeros, load_shared(x + kHalf));
        }
      }
      leave_piece(kFeatures * step);
    }
    if (mine)
      own.put(rest.sums + ((n << s.log_parts) + part.number) * s.product.rows * kFeatures, s.product.rows,
              lane);
  }

  __device__ float total(const Stage& s, int n, int row, int column) const {
    const int step = s.product.rows * kFeatures;
    const float* part = rest.sums + (n << s.log_parts) * step + row * kFeatures + column;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += part[i * step];
    if (s.log_parts > 2) {
#pragma unroll
      for (int i = 4; i < 8; ++i) sum += part[i * step];
    }
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
      const int line = i / kFeatures, tile = int(unsigned(line) * s.row_inverse >> 16);
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

    const Part part = part_of(s);
    for (int from = 0; from < tiles; from += s.batch) {
      const int count = min(s.batch, tiles - from);
#pragma unroll 1
      for (int n = 0; n < count * halves; ++n) multiply(s, part, n);
      meet();
#pragma unroll 1
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

  __device__ const Stage& stage(int n) const {
    return *reinterpret_cast<const Stage*>(rest.stage[n % kStages]);
  }
  __device__ void put_stage(int n, uint4 x) {
    if (me < kStageVectors) rest.stage[n % kStages][me] = x;
  }
  __device__ uint4 ask_stage(int n) const {
    return me < kStageVectors && n < rest.program.stages ? record_vector(rest.program, n, me)
                                                         : make_uint4(0, 0, 0, 0);
  }

  __device__ void run() {
    for (int n = 0; n < kAhead; ++n) put_stage(n, ask_stage(n));
    meet();
    for (int n = 0; n < rest.program.stages; ++n) {
      const uint4 coming = ask_stage(n + kAhead);
      const Stage s = stage(n);
      const bool part = !s.attends && product(s, stage(n));
      put_stage(n + kAhead, coming);
      if (!part || s.arrives) meet();
      if (part && s.arrives && me == 0) arrive(counter(n), 1);
    }
  }
};

// One of attention's warps.
template <int D>
__device__ __forceinline__ void attend(const Program& program, AttentionWarp<D>& mine, int number) {
  const int lane = int(threadIdx.x) % kWarp;
  const auto counter = [&](int stage) { return program.counters + stage * kCounterStep; };
  for (int n = program.first_attention; n >= 0; n = mine.record.stage.next_attention) {
    __syncwarp();
    for (int i = lane; i < kRecordVectors; i += kWarp)
      reinterpret_cast<uint4*>(&mine.record)[i] = record_vector(program, n, i);
    __syncwarp();
    const Stage& s = mine.record.stage;
    decode::SplitWarp<D, true, 1> split(mine.record.attention, mine.record.partials, mine.shared);
    split.start({int(blockIdx.x), int(gridDim.x), number, program.attention_warps});
    bool waited = false;
    const int tiles = split.finish([&](int, int) {
      if (!waited && lane < kMostAwaited && s.awaited[lane].arrivals > 0)
        await_stage(counter(s.awaited[lane].stage), unsigned(s.awaited[lane].arrivals));
      waited = true;
      __syncwarp();
    });
    __syncwarp();
    if (tiles > 0 && lane == 0) arrive(counter(n), unsigned(tiles));
  }
}

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
  if (warp == kLoader) return load_weights(program, memory, rest);
  unsigned char* const work = memory + program.ring_bytes;
  if (warp < kWorkers) {
    Worker{memory, work, rest, RingWalk(program.ring_bytes)}.run();
  } else if constexpr (D > 0) {
    const int number = warp - kFirstAttention;
    if (number < program.attention_warps)
      attend<D>(program, reinterpret_cast<AttentionWarp<D>*>(work + program.work_bytes)[number], number);
  }
  const auto end = [] {
    asm volatile("bar.sync %0, %1;" ::"n"(kEndBarrier), "n"(kThreads - kWarp) : "memory");
  };
  end();
  // Nobody looks at a counter any more when all blocks are here: the last one leaves zeros behind.
  Own* const own = reinterpret_cast<Own*>(program.counters + program.stages * kCounterStep);
  if (me == 0) {
    __threadfence();
    rest.last = atomicInc(&own->ended, gridDim.x - 1) == gridDim.x - 1;
  }
  end();
  if (!rest.last) return;
  __threadfence();
  if (me == 0) ++own->launches;
  for (int n = me; warp < kWorkers && n < program.stages; n += kWorkerThreads)
    program.counters[n * kCounterStep] = 0;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace sps::ops::decode_program
