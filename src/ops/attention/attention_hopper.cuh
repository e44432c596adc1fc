// Hopper's own instructions, as functions, beside those of ops/hopper.cuh: copies of boxes of a head by the
// copy engine (TMA), matrix products of a warpgroup (wgmma).
//
// Tiles lie in shared memory as chunks of 64 columns: rows of 128 bytes, one below the other, whose 16-byte
// pieces are permuted within groups of 8 rows (the 128-byte swizzle, which the copy engine writes and the
// tensor cores read). A chunk starts at a multiple of 1024 bytes.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "ops/hopper.cuh"

namespace sps::ops::hopper {

constexpr int kWarpgroupThreads = 128;
constexpr int kChunkColumns = 64, kChunkRowBytes = 128;  // of bf16

// Barriers among warps by number: `threads` of them take part, arriving or waiting.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A walk round a ring of stages, whose barriers complete one phase a round.
template <int kStages>
struct Ring {
  uint32_t steps = 0;
  __device__ __forceinline__ int stage() const { return int(steps % kStages); }
  __device__ __forceinline__ uint32_t parity() const { return steps / kStages % 2; }
};

// ---- Copies.

// One chunk: columns column.. of a head, rows row.. of a sequence; what lies outside is zero.
__device__ __forceinline__ void load_chunk(uint32_t chunk, const CUtensorMap* map, uint32_t barrier,
                                           int column, int head, int row, int sequence) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], "
      "[%2];" ::"r"(chunk),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(sequence)
      : "memory");
}
// A tile of kRows rows of a head, or a part of one of kTileRows.
template <int kHeadDim, int kRows, int kTileRows = kRows>
__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap* map, uint32_t barrier, int head,
                                          int row, int sequence) {
  constexpr int kChunks = (kHeadDim + kChunkColumns - 1) / kChunkColumns, kBytes = kTileRows * kChunkRowBytes;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    load_chunk(tile + c * kBytes, map, barrier, c * kChunkColumns, head, row, sequence);
}

// Bytes of shared memory to global memory, stored or added as f32, in groups that are waited for in order. A
// group has left shared memory when no more than 0 groups are unread, and is in global memory when none is
// unfinished.
__device__ __forceinline__ void store_bytes(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_floats(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void stores_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void stores_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// A turn among blocks: a counter in global memory that each block raises when its part is in global memory.
// An acquiring load empties the L1 cache, so a counter that was not there at the first look is watched with
// relaxed ones until it is time.
__device__ __forceinline__ bool count_reached(const int32_t* counter, int32_t count) {
  int32_t now;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return now >= count;
}
__device__ __forceinline__ void await_count(const int32_t* counter, int32_t count) {
  if (count_reached(counter, count)) return;
  int32_t now;
  do {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (now < count);
  count_reached(counter, count);
}
__device__ __forceinline__ void set_count(int32_t* counter, int32_t count) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

// Four 8 x 8 blocks of bf16 to shared memory: `row` is the address of row lane % 8 of block lane / 8, and
// value n of a lane is row lane / 4, columns 2 (lane % 4) and the next of block n.
__device__ __forceinline__ void store_blocks(uint32_t row, const uint32_t* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// ---- Matrix products.

// How a chunk, or several side by side, is read: bits of the tensor core's matrix descriptor.
//   rows_descriptor: the rows of the tile are the rows (or columns) of the product, its columns are summed
//   over; columns_descriptor: the columns are the columns of the product and its rows are summed over;
//   `chunk_bytes` from one chunk of 64 columns to the next.
struct Descriptor {
  uint32_t low, high;
  // The same further on in shared memory.
  __device__ __forceinline__ Descriptor plus(uint32_t bytes) const { return {low + (bytes >> 4), high}; }
  __device__ __forceinline__ uint64_t bits() const {
    uint64_t both;
    asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(high));
    return both;
  }
};
__device__ __forceinline__ Descriptor descriptor(uint32_t address, uint32_t leading) {
  constexpr uint32_t kGroup = 8 * kChunkRowBytes, kSwizzle128 = uint32_t(1) << 30;
  return {(address >> 4) | (leading >> 4) << 16, kGroup >> 4 | kSwizzle128};
}
__device__ __forceinline__ Descriptor rows_descriptor(uint32_t tile) {
  return descriptor(tile, 16);
}
__device__ __forceinline__ Descriptor columns_descriptor(uint32_t tile, uint32_t chunk_bytes) {
  return descriptor(tile, chunk_bytes);
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Keeps the compiler from moving uses of accumulators across the place where it stands.
template <int kCount>
__device__ __forceinline__ void pin(float (&accumulator)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulator[i])::"memory");
}
// Waits until at most kPending committed groups are unfinished; the accumulators of finished ones may be
// read.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define SPS_OUT_8(how, d, i)                                                                           \
  how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3]), how(d[i + 4]), how(d[i + 5]), how(d[i + 6]), \
      how(d[i + 7])
#define SPS_OUT_32(how, d) \
  SPS_OUT_8(how, d, 0), SPS_OUT_8(how, d, 8), SPS_OUT_8(how, d, 16), SPS_OUT_8(how, d, 24)
#define SPS_OUT_48(how, d) SPS_OUT_32(how, d), SPS_OUT_8(how, d, 32), SPS_OUT_8(how, d, 40)
#define SPS_OUT_64(how, d) SPS_OUT_48(how, d), SPS_OUT_8(how, d, 48), SPS_OUT_8(how, d, 56)
#define SPS_REGS_32                                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, "                                                                                                \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPS_REGS_48 \
  SPS_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SPS_REGS_64 \
  SPS_REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d (64 x N) = A (64 x 16) B (16 x N), or d += A B. kColumnsA, kColumnsB: the operand is read by
// columns_descriptor. R0 .. R6 are the numbers of the operands after the accumulators.
template <int kN, bool kAdd, bool kColumnsA, bool kColumnsB>
struct Product;

#define SPS_PRODUCT(N, COUNT, ADD, HOW, R0, R1, R2, R3, R4, R5, R6)                                          \
  template <bool kColumnsA, bool kColumnsB>                                                                  \
  struct Product<N, ADD, kColumnsA, kColumnsB> {                                                             \
    static __device__ __forceinline__ void run(float (&d)[COUNT], Descriptor a, Descriptor b) {              \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " R2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N   \
                   "k16.f32.bf16.bf16 {" SPS_REGS_##COUNT "}, " R0 ", " R1 ", add, 1, 1, " R3 ", " R4        \
                                                          ";\n}\n"                                           \
                   : SPS_OUT_##COUNT(HOW, d)                                                                 \
                   : "l"(a.bits()), "l"(b.bits()), "n"(int(ADD)), "n"(int(kColumnsA)), "n"(int(kColumnsB))); \
    }                                                                                                        \
    static __device__ __forceinline__ void run(float (&d)[COUNT], const uint32_t* a, Descriptor b) {         \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " R5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N   \
                   "k16.f32.bf16.bf16 {" SPS_REGS_##COUNT "}, {" R0 ", " R1 ", " R2 ", " R3 "}, " R4         \
                                                          ", add, 1, 1, " R6 ";\n}\n"                        \
                   : SPS_OUT_##COUNT(HOW, d)                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(int(ADD)),               \
                     "n"(int(kColumnsB)));                                                                   \
    }                                                                                                        \
  };
#define SPS_WRITE(x) "=f"(x)
#define SPS_UPDATE(x) "+f"(x)
#define SPS_PRODUCTS(N, COUNT, ...)                    \
  SPS_PRODUCT(N, COUNT, false, SPS_WRITE, __VA_ARGS__) \
  SPS_PRODUCT(N, COUNT, true, SPS_UPDATE, __VA_ARGS__)
SPS_PRODUCTS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
SPS_PRODUCTS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
SPS_PRODUCTS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
#undef SPS_PRODUCTS
#undef SPS_PRODUCT
#undef SPS_WRITE
#undef SPS_UPDATE
#undef SPS_OUT_8
#undef SPS_OUT_32
#undef SPS_OUT_48
#undef SPS_OUT_64
#undef SPS_REGS_32
#undef SPS_REGS_48
#undef SPS_REGS_64

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Two numbers rounded to bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Accumulator layout of a product, thread `lane` of warp w of the warpgroup: element e of d is row
// 16 w + lane / 4 + 8 (e / 2 % 2), column 8 (e / 4) + 2 (lane % 4) + e % 2. Eight accumulators of 16
// neighbouring columns are, in pairs, one A operand of 16 columns.
template <int kCount>
__device__ __forceinline__ void pack_operand(const float (&d)[kCount], uint32_t (&a)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) a[i] = pack_bf16(d[2 * i], d[2 * i + 1]);
}

// d = A B with both operands in shared memory, summed over the kColumns columns of both.
template <int kColumns, int kN, int kAChunk, int kBChunk>
__device__ __forceinline__ void multiply_rows(float (&d)[kN / 2], uint32_t a, uint32_t b) {
  const Descriptor da = rows_descriptor(a), db = rows_descriptor(b);
  Product<kN, false, false, false>::run(d, da, db);
#pragma unroll
  for (int k = 1; k < kColumns / 16; ++k)
    Product<kN, true, false, false>::run(d, da.plus(k / 4 * kAChunk + k % 4 * 32),
                                         db.plus(k / 4 * kBChunk + k % 4 * 32));
}
// d += A B, A in registers, summed over the kRows rows of B, whose chunks lie kBChunk bytes apart.
template <int kRows, int kN, int kBChunk>
__device__ __forceinline__ void add_columns(float (&d)[kN / 2], const uint32_t (&a)[kRows / 4], uint32_t b) {
  const Descriptor db = columns_descriptor(b, kBChunk);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k)
    Product<kN, true, false, true>::run(d, a + 4 * k, db.plus(k * 16 * kChunkRowBytes));
}
// d = A B, A the transpose of a tile of 64 columns, summed over the kRows rows of both tiles.
template <int kRows>
__device__ __forceinline__ void multiply_transposed(float (&d)[32], uint32_t a, uint32_t b) {
  const Descriptor da = columns_descriptor(a, 16), db = columns_descriptor(b, 16);
  Product<64, false, true, true>::run(d, da, db);
#pragma unroll
  for (int k = 1; k < kRows / 16; ++k)
    Product<64, true, true, true>::run(d, da.plus(k * 16 * kChunkRowBytes), db.plus(k * 16 * kChunkRowBytes));
}

}  // namespace sps::ops::hopper
