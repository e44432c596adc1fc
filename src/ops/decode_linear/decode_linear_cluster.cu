// How the kernel of decode_linear_cluster.cuh is launched.
#include "ops/decode_linear/decode_linear_cluster.cuh"

#include <algorithm>

#include "ops/decode_linear/decode_linear_cluster.h"
#include "ops/tensor_map.h"

namespace sps::ops::decode_product {

namespace {

// Bytes of shared memory that a block can have with another one of so many beside it on the multiprocessor.
int shared_beside(int other) {
  static const int all = [] {
    int bytes = 0;
    SPS_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0));
    return bytes;
  }();
  static const int reserved = [] {
    int bytes = 0;
    SPS_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrReservedSharedMemoryPerBlock, 0));
    return bytes;
  }();
  return all - other - 2 * reserved;
}
int half_shared() {
  return shared_beside(0) / 2;
}

// Clusters of so many blocks that the GPU runs side by side, a block on a multiprocessor.
int count_clusters(int blocks) {
  const auto kernel = &cluster_kernel<16, 4, false, 1>;
  SPS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared()));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(blocks), attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(ClusterShape<16, 1>::kThreads);
  config.dynamicSmemBytes = size_t(most_shared());
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 0;
  SPS_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  return clusters;
}
int most_clusters(int blocks) {
  static const int of_four = count_clusters(4), of_eight = count_clusters(8);
  return blocks == 8 ? of_eight : of_four;
}

// As many stages as fit, in as few turns as give about so many; depth = 0: not even one for each warp.
template <int kRows, int kSets>
ClusterPlan plan_of(const Product<bf16>& p, int most_tiles, int shared) {
  constexpr int kWarps = ClusterShape<kRows, kSets>::kWarps, kStageBytes = kSets * kSetBytes;
  ClusterPlan best;
  for (int turns = int(ceil_div(most_tiles, kWarps)); turns <= most_tiles; ++turns) {
    ClusterPlan plan{int(ceil_div(most_tiles, turns)), 0, 0, turns};
    const int room = shared - ClusterShape<kRows, kSets>(p, plan).bytes(plan);
    if (room > 0)
      plan.depth = std::min(turns * p.part_chunks, room / (plan.tile_warps * (kStageBytes + kBarrierBytes)));
    if (4 * plan.depth * plan.tile_warps > 5 * best.depth * best.tile_warps) best = plan;
    if (plan.tile_warps <= kWarps / 2) break;  // more warps make a product faster
  }
  return best;
}

// Boxes of a chunk of `box_rows` rows; what lies outside is zero.
CUtensorMap chunk_map(const bf16* data, int k, int64_t rows, int64_t stride, int box_rows) {
  const cuuint64_t sizes[] = {cuuint64_t(k), cuuint64_t(rows)};
  const cuuint64_t strides[] = {cuuint64_t(rows > 1 ? stride : k) * sizeof(bf16)};
  const cuuint32_t box[] = {kChunk<bf16>, cuuint32_t(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(data), sizes, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  SPS_CHECK(result == CUDA_SUCCESS);
  return map;
}

template <int kRows, int kParts, bool kSwiglu, int kSets>
bool launch_sets(const Exec& ex, Product<bf16> p, int clusters) {
  using Shape = ClusterShape<kRows, kSets>;
  constexpr int kStageBytes = kSets * kSetBytes;
  constexpr int kEnough = 32 << 10;  // bytes of weights under way on a multiprocessor
  constexpr int kAlone = 512 << 10;  // bytes of a block's weights
  constexpr int kBeside = 88 << 10;  // bytes of a block that stands beside a larger one
  constexpr int kTileRows = kSets * (kSwiglu ? kSetFeatures / 2 : kSetFeatures);
  p.tiles = int(ceil_div(p.outputs, kTileRows));
  clusters = std::min(clusters, p.tiles);
  const int most_tiles = int(ceil_div(p.tiles, clusters));
  // Behind a kernel whose blocks are still there, blocks of half a multiprocessor's memory come in pairs to
  // where there is room for two, and have half the time. With much to bring that costs more than what they
  // would have brought by the time that the multiprocessor is theirs (a head on an H200: 70 microseconds for
  // 37).
  const bool alone = int64_t{most_tiles} * p.part_chunks * kStageBytes >= kAlone;
  ClusterPlan plan = plan_of<kRows, kSets>(p, most_tiles, alone ? most_shared() : half_shared());
  const int stages = std::min(most_tiles * p.part_chunks, kEnough / kStageBytes);
  if (plan.depth * plan.tile_warps < stages) plan = plan_of<kRows, kSets>(p, most_tiles, most_shared());
  if (kSets > 1 && most_tiles <= Shape::kWarps) {
    // All weights ahead, and room for the next kernel's blocks that need none of their own.
    const ClusterPlan whole{most_tiles, p.part_chunks, 0, 1};
    if (Shape(p, whole).bytes(whole) <= shared_beside(kBeside)) plan = whole;
  }
  if (plan.depth == 0) return false;
  if (kSets == 1 && p.gain == nullptr && plan.turns == 1 && plan.depth == p.part_chunks) {
    // So that it stands beside such blocks.
    ClusterPlan less = plan;
    while (Shape(p, less).bytes(less) > kBeside && 4 * less.depth > 3 * p.part_chunks) --less.depth;
    if (Shape(p, less).bytes(less) <= kBeside) plan = less;
  }
  // What a ring asks for beyond the time that memory takes stands in a line with what the next kernel asks
  // for, and keeps this one's x waiting. Not so where most of the tiles are there before the product begins,
  // or where it walks over so many that the next kernel matters little. (Measured on an H200.)
  const int bridge = (plan.turns * kSets == 1 ? 60 : 40) << 10;  // bytes
  const int ring_stages = plan.turns * p.part_chunks, stage_bytes = plan.tile_warps * kStageBytes;
  plan.early = plan.depth;
  if (!alone && plan.turns * kSets <= 4 && 5 * plan.depth < 3 * ring_stages)
    plan.early = std::clamp((bridge + stage_bytes / 2) / stage_bytes, 1, plan.depth);
  // Whoever has no tile is there for the norm alone.
  const int warps = p.gain != nullptr ? Shape::kWarps : std::min(plan.tile_warps + 1, Shape::kWarps);
  const LaunchShape shape{dim3(unsigned(clusters * kParts)), dim3(unsigned(warps * kWarp)),
                          size_t(Shape(p, plan).bytes(plan)), unsigned(kParts)};
  const CUtensorMap w_map =
      chunk_map(p.w, p.k, kSwiglu ? 2 * int64_t{p.outputs} : p.outputs, p.w_stride, kTileRows);
  const CUtensorMap x_map =
      p.gain != nullptr ? w_map : chunk_map(static_cast<const bf16*>(p.x), p.k, p.rows, p.x_stride, kRows);
  launch_behind(ex, shape, &cluster_kernel<kRows, kParts, kSwiglu, kSets>, w_map, x_map, p, plan);
  return true;
}

template <int kRows, int kParts, bool kSwiglu>
bool launch_rows(const Exec& ex, const Product<bf16>& p) {
  const int clusters = most_clusters(kParts);
  if (clusters == 0) return false;
  // Where a set for each warp is not enough: in pairs, whose sums travel once. Not of heads, which have the
  // time, and whose rings hold more.
  if constexpr (kRows == 16 || kRows == 32) {
    const auto sets = ceil_div(p.outputs, kSwiglu ? kSetFeatures / 2 : kSetFeatures);
    const auto each = ceil_div(sets, clusters);
    if (each > ClusterShape<kRows, 1>::kWarps && each <= 4 * ClusterShape<kRows, 1>::kWarps &&
        launch_sets<kRows, kParts, kSwiglu, 2>(ex, p, clusters))
      return true;
  }
  return launch_sets<kRows, kParts, kSwiglu, 1>(ex, p, clusters);
}

}  // namespace

bool launch_cluster(const Exec& ex, const Product<bf16>& p) {
  if (!starts_behind() || p.k < kChunk<bf16>) return false;
  const auto with_rows = [&]<int kRows>() {
    const bool swiglu = p.end == DecodeEnd::swiglu;
    if (parts_of(p.k) == 4)
      return swiglu ? launch_rows<kRows, 4, true>(ex, p) : launch_rows<kRows, 4, false>(ex, p);
    return swiglu ? launch_rows<kRows, 8, true>(ex, p) : launch_rows<kRows, 8, false>(ex, p);
  };
  if (p.rows <= 8) return with_rows.template operator()<8>();
  if (p.rows <= 16) return with_rows.template operator()<16>();
  if (p.rows <= 32) return with_rows.template operator()<32>();
  return with_rows.template operator()<64>();
}

}  // namespace sps::ops::decode_product
