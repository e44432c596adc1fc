// y^T = w x^T for up to 64 rows of bf16. The blocks of a cluster are the parts of k: each has its part of all
// rows of x in shared memory, and of every feature's weights it reads its part alone. A cluster walks over
// neighbouring tiles of features, a warp has one of them at a time.
//
//   weights   A warp's lane 0 has the copy engine bring the chunks of the warp's tiles, `depth` of them
//             ahead, the first before the kernel before this one has ended. No other warp is involved.
//   x         Comes as it is by the copy engine, to each block its part. Rows to be normed are read by the
//             warps, which multiply them by the gain.
//   sums      Go from warp to warp, to the cluster's block that ends the row (row % parts), where the parts
//             are added up in order. So do the squares of rows to be normed.
//
// Blocks never wait for each other as a whole: what is sent counts its bytes at a barrier of the receiver's.
//
// A sum takes the same numbers together, in the same order, as those of decode_linear_sums.cuh; weights are
// the left operand here, so that rows of x, which every warp reads, come from shared memory half as often.
#pragma once

#include "ops/decode_linear/decode_linear_product.cuh"
#include "ops/hopper.cuh"

namespace sps::ops::decode_product {

// What is multiplied together is a set of features (rows of w; SwiGLU's are eight gates and their eight
// partners). A tile has one set, or two: these share what is read of x, and their sums travel together.
constexpr int kSetFeatures = 16;
constexpr int kSetBytes = kSetFeatures * kChunkBytes;  // of a stage
constexpr int kBarrierBytes = int(sizeof(uint64_t));

// How a product is shared out inside a block; depends on shapes and the GPU alone, and changes no bit.
struct ClusterPlan {
  int tile_warps = 0;  // have tiles
  int depth = 0;       // stages of each of them
  int early = 0;       // as many are asked for before x is there
  int turns = 0;       // tiles of each of them
};

// In a chunk as the copy engine writes it, rows lie one below the other and the 16-byte pieces of row r at
// their number xor r % 8. Of eight rows those of lanes 0 .. 3, 4 .. 7, ... are in this order: so eight lanes
// that read together meet no bank twice.
__device__ __forceinline__ int row_of(int lane) {
  const int g = lane / 4;
  return g % 2 * 4 + g / 2;
}
__device__ __forceinline__ int place_in_chunk(int row, int byte) {
  return row * kChunkBytes + (byte ^ (row & 7) * kVectorBytes);
}

// What a lane multiplies of half a chunk of a tile and of kRows rows of x. In a stage SwiGLU's gates lie
// before all of their partners.
template <int kRows, int kSets, bool kSwiglu>
struct HalfChunk {
  static constexpr int kTiles = kRows / 8, kEight = kSetBytes / 2;
  static constexpr int kNextSet = kSwiglu ? kEight : kSetBytes, kPartner = kSwiglu ? kSets * kEight : kEight;
  uint32_t low[kSets][4], high[kSets][4];
  uint4 x[kTiles];

  // zero: 0, which the compiler does not know; in a register.
  __device__ __forceinline__ void load(const unsigned char* w, const unsigned char* x_chunk, int half,
                                       int lane, uint32_t zero) {
    const int at = place_in_chunk(row_of(lane), half * kHalf + lane % 4 * kVectorBytes);
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const uint4 a = *reinterpret_cast<const uint4*>(w + at + s * kNextSet),
                  b = *reinterpret_cast<const uint4*>(w + at + s * kNextSet + kPartner);
      // A left operand is four registers side by side, of two loads. Of mere copies the compiler makes new
      // ones for every product.
      low[s][0] = a.x ^ zero, low[s][1] = b.x ^ zero, low[s][2] = a.y ^ zero, low[s][3] = b.y ^ zero;
      high[s][0] = a.z ^ zero, high[s][1] = b.z ^ zero, high[s][2] = a.w ^ zero, high[s][3] = b.w ^ zero;
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      x[i] = *reinterpret_cast<const uint4*>(x_chunk + at + 8 * i * kChunkBytes);
  }
};

// The sums of a tile and of kRows rows of x. With t = lane % 4, of sum[set][i][s]
//   number 0, 1   belong to the set's feature row_of(lane) and rows 8 i + t and 8 i + t + 4
//   number 2, 3   to the feature eight further and the same rows
// s = 0 and 1 make one sum.
template <int kRows, int kSets>
struct TileSums {
  static_assert(kRows % 8 == 0);
  static constexpr int kTiles = kRows / 8;
  float sum[kSets][kTiles][2][4] = {};

  template <bool kSwiglu>
  __device__ __forceinline__ void add(const HalfChunk<kRows, kSets, kSwiglu>& c) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        multiply_add(sum[s][i][0], c.low[s], c.x[i].x, c.x[i].y);
        multiply_add(sum[s][i][1], c.high[s], c.x[i].z, c.x[i].w);
      }
  }
  __device__ __forceinline__ float of(int set, int i, int number) const {
    return sum[set][i][0][number] + sum[set][i][1][number];
  }
};

template <int kRows, int kSets>
struct ClusterShape {
  static constexpr int kWarps = kRows <= 16 ? 10 : 8, kThreads = kWarps * kWarp;

  // Bytes. Behind them are barriers: of each stage, of the sums of each warp that has tiles, of the room for
  // them, of x, of squares.
  int ring, x, sums, gain, squares;

  __host__ __device__ ClusterShape(const Product<bf16>& p, const ClusterPlan& plan)
      : ring(plan.tile_warps * plan.depth * kSets * kSetBytes),
        x(p.part_chunks * kRows * kChunkBytes),
        sums(kRows * plan.tile_warps * kSets * kSetFeatures * int(sizeof(float))),
        gain(p.gain != nullptr ? p.part_chunks * kChunk<bf16> * int(sizeof(float)) : 0),
        squares(p.gain != nullptr ? kRows * int(sizeof(float2)) : 0) {}
  __host__ __device__ int bytes(const ClusterPlan& plan) const {
    return ring + x + sums + gain + squares + (plan.tile_warps * (plan.depth + 2) + 2) * kBarrierBytes;
  }
};

// This block's part of rows to be normed, multiplied by its part of the gain; their squares go to the blocks
// that end the rows, twice each, where squares[part][row / kParts] arrive.
template <int kRows, int kParts, int kWarps>
__device__ __forceinline__ void gain_rows(const Product<bf16>& p, unsigned char* x_rows, const float* gain,
                                          float2* squares, uint64_t* arrived, bool sends) {
  // Rows; fours of a lane; columns of a warp.
  constexpr int kAtOnce = kRows <= 16 ? 2 : 4, kKept = 4, kStep = 4 * kWarp;
  constexpr int kColumns = kChunk<bf16>;
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp, part = int(cluster_rank());
  const int first_k = part * p.part_chunks * kColumns, columns = min(p.k - first_k, p.part_chunks * kColumns);
#pragma unroll 1
  for (int first_row = warp; first_row < p.rows; first_row += kAtOnce * kWarps) {
    const float* from[kAtOnce];
    float sum[kAtOnce] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int row = first_row + j * kWarps;
      from[j] = nullptr;
      if (row < p.rows)
        from[j] = static_cast<const float*>(p.x) + first_k +
                  (p.pick != nullptr ? __ldcg(p.pick + row) : row) * p.x_stride;
    }
#pragma unroll 1
    for (int first = 4 * lane; first < columns; first += kKept * kStep) {
      float4 kept[kAtOnce][kKept];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
          const int c = first + i * kStep;
          kept[j][i] = make_float4(0, 0, 0, 0);
          if (from[j] != nullptr && c < columns)
            kept[j][i] = __ldcg(reinterpret_cast<const float4*>(from[j] + c));
        }
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int c = first + i * kStep;
        if (c >= columns) break;
        const float4 by = *reinterpret_cast<const float4*>(gain + c);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (from[j] == nullptr) continue;
          sum[j] += squares_of(kept[j][i]);
          const float4 n = times(kept[j][i], by);
          *reinterpret_cast<uint2*>(
              x_rows + c / kColumns * (kRows * kChunkBytes) +
              place_in_chunk(first_row + j * kWarps, c % kColumns * int(sizeof(bf16)))) =
              make_uint2(pack_bf16(n.x, n.y), pack_bf16(n.z, n.w));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int row = first_row + j * kWarps;
      const float all = warp_sum(sum[j]);
      if (sends && lane == 0 && row < p.rows) {
        const auto block = unsigned(row % kParts);
        hopper::send(block_address(squares + part * (kRows / kParts) + row / kParts, block),
                     block_address(arrived, block), all, all);
      }
    }
  }
}

template <int kRows, int kParts, bool kSwiglu, int kSets>
__global__ void __launch_bounds__(ClusterShape<kRows, kSets>::kThreads, 2)
    cluster_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                   const Product<bf16> p, const ClusterPlan plan) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Shape = ClusterShape<kRows, kSets>;
  constexpr int kWarps = Shape::kWarps;  // where rows are normed; else there are a tile's warps, and one
  constexpr int kStageBytes = kSets * kSetBytes;
  constexpr int kSetColumns = kSwiglu ? kSetFeatures / 2 : kSetFeatures, kColumns = kSets * kSetColumns;
  let_next_start();

  extern __shared__ __align__(1024) unsigned char memory[];
  const Shape shape(p, plan);
  unsigned char* const x_rows = memory + shape.ring;
  float* const sums = reinterpret_cast<float*>(x_rows + shape.x);
  float* const gain = sums + shape.sums / int(sizeof(float));
  float2* const squares = reinterpret_cast<float2*>(gain + shape.gain / int(sizeof(float)));
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(squares + shape.squares / int(sizeof(float2)));
  const int tid = int(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  const int part = int(cluster_rank());
  // What loops need at hand: else the compiler fetches it anew each time.
  const int part_chunks = hopper::in_place(p.part_chunks);
  const auto zero = uint32_t(hopper::in_place(int(blockIdx.y)));
  const int walkers = int(gridDim.x) / kParts, walker = int(blockIdx.x) / kParts;
  const int each = p.tiles / walkers, more = p.tiles % walkers;
  const int first_tile = walker * each + min(walker, more),
            end_tile = first_tile + each + (walker < more ? 1 : 0);
  const int first_k = part * p.part_chunks * kChunk<bf16>;

  // The warp's stages and their barriers; sums that other warps send it, room that they have for its own.
  const int first_stage = warp * plan.depth;
  const auto stage = [&](int slot) { return memory + (first_stage + slot) * kStageBytes; };
  const auto stage_full = [&](int slot) { return shared_address(barriers + first_stage + slot); };
  uint64_t* const sums_full = barriers + plan.tile_warps * plan.depth + warp;
  uint64_t* const sums_free = sums_full + plan.tile_warps;
  uint64_t *const x_full = barriers + plan.tile_warps * (plan.depth + 2), *const squares_full = x_full + 1;
  // Rows are sent eight by eight: of each feature pair a part's warp sends two numbers a row.
  const int row_tiles = (p.rows + 7) / 8;
  constexpr int kUnit = kParts == 4 ? 4 : 2;  // numbers that a lane sends a block of eight rows
  const uint32_t sums_bytes = uint32_t(kSets * kParts * row_tiles * 8 * kUnit) * uint32_t(sizeof(float));

  int ask_tile = warp < plan.tile_warps ? first_tile + warp : end_tile, ask_chunk = 0;
  const auto ask = [&](int slot) {  // by all lanes
    if (ask_tile >= end_tile) return;
    if (hopper::elected()) {
      const uint32_t to = shared_address(stage(slot));
      const int k = first_k + ask_chunk * kChunk<bf16>;
      hopper::barrier_expect(stage_full(slot), kStageBytes);
      hopper::load_box(to, &w_map, stage_full(slot), k, ask_tile * kColumns);
      if constexpr (kSwiglu)
        hopper::load_box(to + kStageBytes / 2, &w_map, stage_full(slot), k, p.outputs + ask_tile * kColumns);
    }
    if (++ask_chunk == part_chunks) ask_chunk = 0, ask_tile += plan.tile_warps;
  };
  if (warp < plan.tile_warps) {
    if (lane == 0) {
      for (int slot = 0; slot < plan.depth; ++slot) hopper::barrier_init(stage_full(slot), 1);
      hopper::barrier_init(shared_address(sums_full), 1);
      hopper::barrier_init(shared_address(sums_free), kParts);
      if (warp == 0) hopper::barrier_init(shared_address(x_full), 1);
      if (warp == 0) hopper::barrier_init(shared_address(squares_full), 1);
      hopper::barrier_init_fence();
    }
    __syncwarp();
    hopper::fence_async_shared();
    for (int slot = 0; slot < plan.early; ++slot) ask(slot);
  }
  if (lane == 0 && warp < plan.tile_warps) {
    if (first_tile + warp < end_tile) hopper::barrier_expect(shared_address(sums_full), sums_bytes);
    if (warp == 0 && p.gain == nullptr) hopper::barrier_expect(shared_address(x_full), uint32_t(shape.x));
    if (warp == 0 && p.gain != nullptr) {
      const int ended = (p.rows - part + kParts - 1) / kParts;  // rows, by this block
      hopper::barrier_expect(shared_address(squares_full),
                             uint32_t(ended * kParts) * uint32_t(sizeof(float2)));
    }
  }
  const bool brings_x = p.gain == nullptr && tid == int(blockDim.x) - kWarp;
  if (brings_x) hopper::prefetch_map(&x_map);
  __syncwarp();
  cluster_arrive_relaxed();
  if (p.gain != nullptr) {
    for (int c = 4 * tid; c < min(p.k - first_k, p.part_chunks * kChunk<bf16>); c += 4 * Shape::kThreads)
      copy_async_16(gain + c, p.gain + first_k + c, true);
    // Behind the end of k.
    for (int r = warp; r < kRows; r += kWarps)
      for (int c = max(p.k - first_k, 0) + lane * 8; c < p.part_chunks * kChunk<bf16>; c += kWarp * 8)
        *reinterpret_cast<uint4*>(x_rows + c / kChunk<bf16> * (kRows * kChunkBytes) +
                                  place_in_chunk(r, c % kChunk<bf16> * int(sizeof(bf16)))) =
            make_uint4(0, 0, 0, 0);
    copy_async_wait();
    __syncthreads();
  }

  // The sums that come to a warp: [part][row / 8][feature % 8] of kUnit numbers, for feature and the one
  // eight further: one row of eight that is this block's, or two. A lane ends every 32nd of [row /
  // 8][feature].
  constexpr int kEnds = kRows <= 32 ? 1 : kRows / 32, kEachRows = kUnit / 2;
  const auto each_result = [&](int tile, int rows, auto&& f) {
    const int me = hopper::in_place(lane);
#pragma unroll
    for (int n = 0; n < kEnds; ++n) {
      const int unit = me + n * kWarp, feature = tile * kColumns + unit % 8;
#pragma unroll
      for (int j = 0; j < kEachRows; ++j) {
        const int row = unit / 8 * 8 + part + j * kParts;
        if (row < rows) f(n, j, row, feature);  // of the tile's first set
      }
    }
  };
  // What sums are added to; it comes while they are made, if there are registers for it.
  constexpr bool kEarly = kRows <= 32;
  float old[kSets][kEnds][kEachRows][2];
  const auto ask_old = [&](int tile) {
    if (!kSwiglu && p.end == DecodeEnd::add && warp < plan.tile_warps && tile < end_tile)
      each_result(tile, p.rows, [&](int n, int j, int row, int feature) {
        const float* const from = static_cast<const float*>(p.y) + row * p.y_stride;
#pragma unroll
        for (int h = 0; h < 2 * kSets; ++h)
          if (feature + 8 * h < p.outputs) old[h / 2][n][j][h % 2] = __ldcg(from + feature + 8 * h);
      });
  };

  // The first round is a rehearsal, while there is nothing to do but wait: of whatever lies in shared memory,
  // for nobody. By the second one the instructions have come to the multiprocessor. (The product behind
  // attention takes 0.6 microseconds less of 5.9, a step of 16 texts 1 %, on an H200.)
#ifdef SPS_RACECHECK
  constexpr bool kRehearses = false;
#else
  constexpr bool kRehearses = kRows <= 32;  // else registers are short
#endif
#pragma unroll 1
  for (int round = kRehearses ? 0 : 1; round < 2; ++round) {
    // The same code for both: the compiler must not know which it is.
    const auto counts = [&] { return !kRehearses || hopper::in_place(round) != 0; };
    if (counts()) {
      cluster_wait();  // all blocks are there, and their barriers
      wait_for_previous();
    }
    if (p.gain != nullptr) {
      gain_rows<kRows, kParts, kWarps>(p, x_rows, gain, squares, squares_full, counts());
      __syncthreads();
    } else if (brings_x && counts()) {
      for (int chunk = 0; chunk < p.part_chunks; ++chunk)
        hopper::load_box(shared_address(x_rows + chunk * (kRows * kChunkBytes)), &x_map,
                         shared_address(x_full), first_k + chunk * kChunk<bf16>, 0);
    }
    if (kEarly) ask_old(first_tile + warp);

    int slot = 0;
    uint32_t parity = 0;
    // The first tile's weights that are on their way; not one by one between products.
    if (counts() && warp < plan.tile_warps && first_tile + warp < end_tile)
      for (int chunk = 0; chunk < min(plan.early, part_chunks); ++chunk)
        hopper::barrier_wait(stage_full(chunk), 0);
    if (counts() && p.gain == nullptr &&
        (warp == 0 || (warp < plan.tile_warps && first_tile + warp < end_tile)))
      hopper::barrier_wait(shared_address(x_full), 0);
    // What is asked for now holds up nobody's x.
    if (counts() && warp < plan.tile_warps)
      for (int later = plan.early; later < plan.depth; ++later) ask(later);
    float scale[kEnds][kEachRows];
#pragma unroll 1
    for (int turn = 0; turn < (counts() ? plan.turns : 1); ++turn) {
      const int tile = first_tile + turn * plan.tile_warps + warp;
      if (warp >= plan.tile_warps || tile >= end_tile) break;
      TileSums<kRows, kSets> own;
      const auto x_chunk = [&](int chunk) { return x_rows + chunk * (kRows * kChunkBytes); };
      if constexpr (kSets == 1 && kRows <= 32) {
        // Half a chunk is loaded while the one before is multiplied.
        HalfChunk<kRows, kSets, kSwiglu> first, second;
        const auto wait = [&](int chunk) {
          if (counts() && (turn > 0 || chunk >= plan.early)) hopper::barrier_wait(stage_full(slot), parity);
        };
        wait(0);
        first.load(stage(slot), x_rows, 0, lane, zero);
        for (int chunk = 0; chunk < (counts() ? part_chunks : 1); ++chunk) {
          second.load(stage(slot), x_chunk(chunk), 1, lane, zero);
          own.add(first);
          const int done = slot;
          if (++slot == plan.depth) slot = 0, parity ^= 1;
          if (chunk + 1 < part_chunks && counts()) {
            wait(chunk + 1);
            first.load(stage(slot), x_chunk(chunk + 1), 0, lane, zero);
          }
          own.add(second);
          __syncwarp();
          if (counts()) ask(done);
        }
      } else {
        HalfChunk<kRows, kSets, kSwiglu> half;
        for (int chunk = 0; chunk < (counts() ? part_chunks : 1); ++chunk) {
          if (counts()) hopper::barrier_wait(stage_full(slot), parity);
          half.load(stage(slot), x_chunk(chunk), 0, lane, zero);
          own.add(half);
          half.load(stage(slot), x_chunk(chunk), 1, lane, zero);
          own.add(half);
          __syncwarp();
          if (counts()) ask(slot);
          if (++slot == plan.depth) slot = 0, parity ^= 1;
        }
      }

      const int me = hopper::in_place(lane);
      constexpr int kSetRoom = kRows * kSetFeatures;
      float* const room = sums + warp * (kSets * kSetRoom);
      if (turn > 0) hopper::barrier_wait(shared_address(sums_free), uint32_t(turn - 1) & 1);
#pragma unroll
      for (int j = 0; j < 4 / kUnit; ++j) {  // the two rows of a lane go to one block, or to one each
        const unsigned block = unsigned(me % 4 + 4 * j);
        const uint32_t to = block_address(room + ((part * row_tiles) * 8 + row_of(me)) * kUnit, block),
                       full = block_address(sums_full, block);
        for (int i = 0; i < kRows / 8; ++i) {
          if (8 * i >= (counts() ? p.rows : 0)) break;
#pragma unroll
          for (int s = 0; s < kSets; ++s) {
            const uint32_t at = to + uint32_t(s * kSetRoom + i * 8 * kUnit) * uint32_t(sizeof(float));
            if constexpr (kUnit == 4)
              hopper::send(at, full, own.of(s, i, 0), own.of(s, i, 2), own.of(s, i, 1), own.of(s, i, 3));
            else
              hopper::send(at, full, own.of(s, i, j), own.of(s, i, 2 + j));
          }
        }
      }
      if (turn == 0) {  // while they are on their way
        if (p.gain != nullptr && counts()) hopper::barrier_wait(shared_address(squares_full), 0);
        each_result(tile, p.rows, [&](int n, int j, int row, int) {
          float sum = 0;
          if (p.gain != nullptr)
#pragma unroll
            for (int from = 0; from < kParts; ++from)
              sum += squares[from * (kRows / kParts) + row / kParts].x;
          scale[n][j] = p.gain != nullptr ? scale_of(sum, p.eps, p.k) : 1;
        });
      }
      if (!kEarly) ask_old(tile);
      if (counts()) hopper::barrier_wait(shared_address(sums_full), uint32_t(turn) & 1);
      const bool again = counts() && turn + 1 < plan.turns && tile + plan.tile_warps < end_tile;
      if (again && lane == 0) hopper::barrier_expect(shared_address(sums_full), sums_bytes);

      // The parts of a sum, in order.
      float total[kSets][kEnds][kUnit] = {};
#pragma unroll
      for (int n = 0; n < kEnds; ++n)
        if (me + n * kWarp < row_tiles * 8)
#pragma unroll
          for (int s = 0; s < kSets; ++s)
#pragma unroll
            for (int from = 0; from < kParts; ++from) {
              const auto sum = *reinterpret_cast<const Pack<float, kUnit>*>(
                  room + s * kSetRoom + (from * row_tiles * 8 + me + n * kWarp) * kUnit);
#pragma unroll
              for (int i = 0; i < kUnit; ++i) total[s][n][i] += sum.at[i];
            }
      if (again) {
        // The room is free again; no block ends that waits for this.
        __syncwarp();
        if (lane < kParts) hopper::arrive_at_block(block_address(sums_free, unsigned(lane)));
      }
      each_result(tile, counts() ? p.rows : 0, [&](int n, int j, int row, int first) {
#pragma unroll
        for (int s = 0; s < kSets; ++s) {
          const int feature = first + s * kSetColumns;
          const float low = scale[n][j] * total[s][n][2 * j], high = scale[n][j] * total[s][n][2 * j + 1];
          if constexpr (kSwiglu) {
            if (feature < p.outputs)
              static_cast<bf16*>(p.y)[row * p.y_stride + feature] =
                  from_float<bf16>(silu_times<bf16>(low, high));
          } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int at = feature + 8 * h;
              if (at >= p.outputs) break;
              const float sum = h == 0 ? low : high;
              if (p.end == DecodeEnd::add)
                static_cast<float*>(p.y)[row * p.y_stride + at] = old[s][n][j][h] + sum;
              else
                put_result(p, row, at, sum);
            }
          }
        }
      });
      if (kEarly && again) ask_old(tile + plan.tile_warps);
    }
  }
#endif
}

}  // namespace sps::ops::decode_product
