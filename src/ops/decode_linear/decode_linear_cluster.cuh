// y^T = w x^T for 9 to 64 rows of bf16. The blocks of a group are the parts of k: each has its part of all
// rows of x in shared memory, and of every feature's weights it reads its part alone. A group walks over
// neighbouring tiles of features, a warp has one of them at a time. A cluster is one or two groups.
//
//   weights   A warp's lane 0 has the copy engine bring the chunks of the warp's tiles, `depth` of them
//             ahead, the first before the kernel before this one has ended. No other warp is involved.
//   x         Read as it is by each block, its part. Rows to be normed are shared out over the blocks of a
//             cluster, which send each block its part of what comes out.
//   sums      Go to the group's block that ends the row (row % parts), which adds the parts up in order.
//
// A sum takes the same numbers together, in the same order, as those of decode_linear_sums.cuh; weights are
// the left operand here, so that rows of x, which every warp reads, come from shared memory half as often.
#pragma once

#include "ops/decode_linear/decode_linear_product.cuh"
#include "ops/hopper.cuh"

namespace sps::ops::decode_product {

constexpr int kTileFeatures = 16;  // rows of w: SwiGLU's are eight gates and their eight partners
constexpr int kStageBytes = kTileFeatures * kChunkBytes;
constexpr int kPerVector = kVectorBytes / int(sizeof(bf16));

// How a product is shared out inside a block; depends on shapes and the GPU alone, and changes no bit.
struct ClusterPlan {
  int parts = 0;       // 4 or 8 blocks of a group
  int tile_warps = 0;  // have tiles
  int depth = 0;       // stages of each of them
  int turns = 0;       // tiles of each of them
};

// The row of its tile's first eight that is a lane's, beside the same of the last eight. In a chunk that the
// copy engine has written, the 16-byte pieces of row r lie at their number xor r % 8; in this order eight
// lanes that read together meet no bank twice.
__device__ __forceinline__ int tile_row(int lane) {
  const int g = lane / 4;
  return g % 2 * 4 + g / 2;
}

// Where a byte of a row of x lies in a chunk of all rows: rows one below the other, of every other one the
// halves exchanged, so that lanes that read halves of two neighbours meet no bank twice.
__device__ __forceinline__ int place_in_chunk(int row, int byte) {
  return row * kChunkBytes + (byte ^ row % 2 * kHalf);
}

// The sums of a tile and of kRows rows of x. Number j of sum[i][s] belongs to feature tile_row() + 8 (j / 2)
// and row 8 i + 2 t + j % 2, t = lane % 4; s = 0 and 1 make one sum.
template <int kRows>
struct TileSums {
  static_assert(kRows % 8 == 0);
  static constexpr int kTiles = kRows / 8;
  float sum[kTiles][2][4] = {};

  // A chunk of the tile and of x.
  __device__ __forceinline__ void add(const unsigned char* w, const unsigned char* x, int lane) {
    const int t = lane % 4, row = tile_row(lane);
    // A left operand is four registers side by side, of two loads. Of mere copies the compiler makes new ones
    // for every product; it does not know that this is zero.
    const uint32_t zero = blockIdx.y;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* const at = w + row * kChunkBytes + ((half * 4 + t) ^ row) * kVectorBytes;
      const uint4 a = *reinterpret_cast<const uint4*>(at),
                  b = *reinterpret_cast<const uint4*>(at + kStageBytes / 2);
      const auto* const from = x + place_in_chunk(lane / 4, half * kHalf + t * kVectorBytes);
      const uint32_t low[4] = {a.x ^ zero, b.x ^ zero, a.y ^ zero, b.y ^ zero},
                     high[4] = {a.z ^ zero, b.z ^ zero, a.w ^ zero, b.w ^ zero};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(from + 8 * i * kChunkBytes);
        multiply_add(sum[i][0], low, v.x, v.y);
        multiply_add(sum[i][1], high, v.z, v.w);
      }
    }
  }
};

template <int kRows>
struct ClusterShape {
  static constexpr int kWarps = kRows <= 32 ? 10 : 8, kThreads = kWarps * kWarp;

  int ring, x, sums;  // bytes; behind them a barrier for each stage

  __host__ __device__ ClusterShape(const Product<bf16>& p, const ClusterPlan& plan)
      : ring(plan.tile_warps * plan.depth * kStageBytes),
        x(p.part_chunks * kRows * kChunkBytes),
        sums(kRows * plan.tile_warps * kTileFeatures * int(sizeof(float))) {
    // The gain lies there while rows are normed.
    const int gain = p.gain != nullptr ? p.k * int(sizeof(float)) : 0;
    if (sums < gain) sums = gain;
  }
  // Of columns `column` and behind it, as far as one chunk goes, in this or another block's part of x.
  static __device__ __forceinline__ int place_in_x(int row, int column) {
    return column / kChunk<bf16> * kRows * kChunkBytes +
           place_in_chunk(row, column % kChunk<bf16> * int(sizeof(bf16)));
  }
  __host__ __device__ int bytes() const {
    return ring + x + sums + ring / kStageBytes * int(sizeof(uint64_t));
  }
};

// This block's rows of x, one of as many as the cluster has blocks, normed: every block's x_rows get its part
// of them. The norm of norm_row(); a row that is not too long is read once.
template <int kRows>
__device__ __forceinline__ void norm_rows(const Product<bf16>& p, int parts, unsigned char* x_rows,
                                          const float* gain) {
  using Shape = ClusterShape<kRows>;
  constexpr int kKept = 13, kStep = 4 * kWarp;  // fours of a lane; columns of a warp
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int rank = int(cluster_rank()), blocks = int(cluster_blocks());
  const int part_columns = p.part_chunks * kChunk<bf16>;
  for (int row = warp * blocks + rank; row < p.rows; row += Shape::kWarps * blocks) {
    const int64_t from_row = p.pick != nullptr ? __ldcg(p.pick + row) : row;
    const auto read = [&, from = static_cast<const float*>(p.x) + from_row * p.x_stride](int c) {
      return __ldcg(reinterpret_cast<const float4*>(from + c));
    };
    const auto send = [&](int part, int column, float4 v, float scale, int c) {
      const float4 n = normed(v, scale, *reinterpret_cast<const float4*>(gain + c));
      const uint32_t low = pack_bf16(n.x, n.y), high = pack_bf16(n.z, n.w);
      const unsigned char* const to = x_rows + Shape::place_in_x(row, column);
      store_to_block(block_address(to, unsigned(part)), low, high);
      if (blocks > parts) store_to_block(block_address(to, unsigned(part + parts)), low, high);
    };
    if (p.k <= kKept * kStep) {
      float4 kept[kKept];
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int c = i * kStep + 4 * lane;
        kept[i] = c < p.k ? read(c) : make_float4(0, 0, 0, 0);
      }
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kKept; ++i) sum = add_squares(kept[i], sum);
      const float scale = scale_of(sum, p.eps, p.k);
      int part = 0, column = 4 * lane;
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        while (column >= part_columns) column -= part_columns, ++part;
        const int c = i * kStep + 4 * lane;
        if (c < p.k) send(part, column, kept[i], scale, c);
        column += kStep;
      }
    } else {
      const float scale = norm_scale(read, p.eps, p.k);
      for (int c = 4 * lane; c < p.k; c += kStep) send(c / part_columns, c % part_columns, read(c), scale, c);
    }
  }
}

template <int kRows, bool kSwiglu>
__global__ void __launch_bounds__(ClusterShape<kRows>::kThreads, 2)
    cluster_kernel(const __grid_constant__ CUtensorMap map, const Product<bf16> p, const ClusterPlan plan) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Shape = ClusterShape<kRows>;
  constexpr int kThreads = Shape::kThreads, kWarps = Shape::kWarps;
  constexpr int kColumns = kSwiglu ? kTileFeatures / 2 : kTileFeatures;  // of a tile's results
  let_next_start();
  // That this block is there: others send it numbers.
  cluster_arrive();

  extern __shared__ __align__(1024) unsigned char memory[];
  const Shape shape(p, plan);
  unsigned char* const x_rows = memory + shape.ring;
  float* const sums = reinterpret_cast<float*>(x_rows + shape.x);
  const int tid = int(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  const int parts = plan.parts, rank = int(cluster_rank()), part = rank & (parts - 1), group = rank - part;
  const int groups = int(gridDim.x) / parts, walker = int(blockIdx.x) / parts;
  const int each = p.tiles / groups, more = p.tiles % groups;
  const int first_tile = walker * each + min(walker, more),
            end_tile = first_tile + each + (walker < more ? 1 : 0);
  const int part_columns = p.part_chunks * kChunk<bf16>, first_k = part * part_columns;

  // The warp's stages and their barriers.
  const int first_stage = warp * plan.depth;
  const auto stage = [&](int slot) { return memory + (first_stage + slot) * kStageBytes; };
  const auto barrier = [&](int slot) {
    return shared_address(memory + shape.ring + shape.x + shape.sums) +
           uint32_t(first_stage + slot) * uint32_t(sizeof(uint64_t));
  };
  int ask_tile = warp < plan.tile_warps ? first_tile + warp : end_tile, ask_chunk = 0;
  const auto ask = [&](int slot) {
    if (ask_tile >= end_tile) return;
    const uint32_t to = shared_address(stage(slot));
    const int k = first_k + ask_chunk * kChunk<bf16>;
    hopper::barrier_expect(barrier(slot), kStageBytes);
    hopper::load_box(to, &map, barrier(slot), k, ask_tile * kColumns);
    if constexpr (kSwiglu)
      hopper::load_box(to + kStageBytes / 2, &map, barrier(slot), k, p.outputs + ask_tile * kColumns);
    if (++ask_chunk == p.part_chunks) ask_chunk = 0, ask_tile += plan.tile_warps;
  };
  if (lane == 0 && ask_tile < end_tile) {
    hopper::prefetch_map(&map);
    for (int slot = 0; slot < plan.depth; ++slot) hopper::barrier_init(barrier(slot), 1);
    hopper::barrier_init_fence();
    hopper::fence_async_shared();
    for (int slot = 0; slot < plan.depth; ++slot) ask(slot);
  }
  __syncwarp();

  if (p.gain == nullptr) {
    wait_for_previous();
    for (int r = warp; r < p.rows; r += kWarps) {
      const bf16* const from = static_cast<const bf16*>(p.x) + r * p.x_stride + first_k;
      for (int c = lane * kPerVector; c < part_columns; c += kWarp * kPerVector)
        copy_async_16(x_rows + Shape::place_in_x(r, c), from + c, first_k + c < p.k);
    }
  } else {
    for (int i = tid; i < p.k / 4; i += kThreads) copy_async_16(sums + 4 * i, p.gain + 4 * i, true);
    // Behind the end of k.
    for (int r = warp; r < kRows; r += kWarps)
      for (int c = max(p.k - first_k, 0) + lane * kPerVector; c < part_columns; c += kWarp * kPerVector)
        *reinterpret_cast<uint4*>(x_rows + Shape::place_in_x(r, c)) = make_uint4(0, 0, 0, 0);
    copy_async_wait();
    __syncthreads();
    cluster_wait();
    wait_for_previous();
    norm_rows<kRows>(p, parts, x_rows, sums);
    cluster_arrive();
  }

  // A tile's sums of a row lie in the block that ends it: [part][row / parts][tile_warps][kTileFeatures].
  const int row_sums = kTileFeatures * plan.tile_warps, local_rows = parts == 8 ? kRows / 8 : kRows / 4;
  // What a lane ends: of a column, every kStep-th of this block's rows.
  constexpr int kStep = kWarp / kColumns, kEnds = kRows / 4 / kStep;
  const auto each_result = [&](int tile, auto&& f) {
    const int me = hopper::in_place(lane), feature = tile * kColumns + me % kColumns;
#pragma unroll
    for (int j = 0; j < kEnds; ++j) {
      const int local = me / kColumns + j * kStep, row = local * parts + part;
      if (local < local_rows && row < p.rows && feature < p.outputs) f(j, local, row, feature);
    }
  };
  // What sums are added to; it comes while they are made, if there are registers for it.
  constexpr bool kEarly = kRows <= 32;
  float old[kEnds];
  const auto ask_old = [&](int tile) {
    if (!kSwiglu && p.end == DecodeEnd::add && warp < plan.tile_warps && tile < end_tile)
      each_result(tile, [&](int j, int, int row, int feature) {
        old[j] = __ldcg(static_cast<const float*>(p.y) + row * p.y_stride + feature);
      });
  };
  if (kEarly) ask_old(first_tile + warp);

  // All blocks are there, and have sent what they normed.
  cluster_wait();
  if (p.gain == nullptr) {
    copy_async_wait();
    __syncthreads();
  }

  int slot = 0;
  uint32_t parity = 0;
  for (int turn = 0; turn < plan.turns; ++turn) {
    const int tile = first_tile + turn * plan.tile_warps + warp;
    const bool busy = warp < plan.tile_warps && tile < end_tile;
    TileSums<kRows> own;
    if (busy) {
      for (int chunk = 0; chunk < p.part_chunks; ++chunk) {
        hopper::barrier_wait(barrier(slot), parity);
        own.add(stage(slot), x_rows + chunk * kRows * kChunkBytes, lane);
        __syncwarp();
        if (lane == 0) ask(slot);
        if (++slot == plan.depth) slot = 0, parity ^= 1;
      }
    }
    if (turn > 0) cluster_wait();  // the sums are free again
    if (busy) {
      // Of rows 8 i + 2 t and the next.
      const int me = hopper::in_place(lane);
      const uint32_t next = uint32_t(parts == 8 ? row_sums : 2 * row_sums) * uint32_t(sizeof(float));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = me % 4 * 2 + j;
        const uint32_t to = block_address(sums + (part * local_rows + (row < parts ? 0 : 1)) * row_sums +
                                              warp * kTileFeatures + tile_row(me),
                                          unsigned(group + (row & (parts - 1))));
#pragma unroll
        for (int i = 0; i < TileSums<kRows>::kTiles; ++i) {
          if (8 * i + row >= p.rows) break;
          store_to_block(to + i * next, own.sum[i][0][j] + own.sum[i][1][j]);
          store_to_block(to + i * next + kTileFeatures / 2 * uint32_t(sizeof(float)),
                         own.sum[i][0][j + 2] + own.sum[i][1][j + 2]);
        }
      }
    }
    cluster_arrive();
    if (!kEarly) ask_old(tile);
    cluster_wait();
    if (busy)
      each_result(tile, [&](int j, int local, int row, int feature) {
        const float* const from = sums + local * row_sums + warp * kTileFeatures + lane % kColumns;
        // The parts of a sum, in order.
        const auto total = [&](int behind) {
          float sum = 0;
#pragma unroll 4
          for (int i = 0; i < parts; ++i) sum += from[i * local_rows * row_sums + behind];
          return sum;
        };
        const float sum = total(0);
        if constexpr (kSwiglu)
          static_cast<bf16*>(p.y)[row * p.y_stride + feature] =
              from_float<bf16>(silu_times<bf16>(sum, total(kTileFeatures / 2)));
        else if (p.end == DecodeEnd::add)
          static_cast<float*>(p.y)[row * p.y_stride + feature] = old[j] + sum;
        else
          put_result(p, row, feature, sum);
      });
    if (turn + 1 < plan.turns) {
      cluster_arrive();
      if (kEarly) ask_old(tile + plan.tile_warps);
    }
  }
#endif
}

}  // namespace sps::ops::decode_product
