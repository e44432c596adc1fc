// How the kernel of decode_linear_cluster.cuh is launched.
#include "ops/decode_linear/decode_linear_cluster.cuh"

#include <algorithm>

#include "ops/decode_linear/decode_linear_cluster.h"
#include "ops/tensor_map.h"

namespace sps::ops::decode_product {

namespace {

// Bytes of shared memory that a block can have with another kernel's beside it on the multiprocessor.
int half_shared() {
  static const int bytes = [] {
    int all = 0, reserved = 0;
    SPS_CUDA(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0));
    SPS_CUDA(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, 0));
    return all / 2 - reserved;
  }();
  return bytes;
}

// Clusters of so many blocks that the GPU runs side by side, a block on a multiprocessor.
int count_clusters(int blocks) {
  const auto kernel = &cluster_kernel<16, false>;
  SPS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared()));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = unsigned(blocks), attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(ClusterShape<16>::kThreads);
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
template <int kRows>
ClusterPlan plan_of(const Product<bf16>& p, int parts, int most_tiles, int shared) {
  constexpr int kWarps = ClusterShape<kRows>::kWarps;
  ClusterPlan best;
  for (int turns = int(ceil_div(most_tiles, kWarps)); turns <= most_tiles; ++turns) {
    ClusterPlan plan{parts, int(ceil_div(most_tiles, turns)), 0, turns};
    const int room = shared - ClusterShape<kRows>(p, plan).bytes();
    if (room > 0)
      plan.depth =
          std::min(turns * p.part_chunks, room / (plan.tile_warps * (kStageBytes + int(sizeof(uint64_t)))));
    if (4 * plan.depth * plan.tile_warps > 5 * best.depth * best.tile_warps) best = plan;
    if (plan.tile_warps <= kWarps / 2) break;  // more warps make a product faster
  }
  return best;
}

CUtensorMap weights_map(const Product<bf16>& p) {
  const bool swiglu = p.end == DecodeEnd::swiglu;
  const auto rows = cuuint64_t(swiglu ? 2 * p.outputs : p.outputs);
  const cuuint64_t sizes[] = {cuuint64_t(p.k), rows};
  const cuuint64_t strides[] = {cuuint64_t(rows > 1 ? p.w_stride : p.k) * sizeof(bf16)};
  const cuuint32_t box[] = {kChunk<bf16>, cuuint32_t(swiglu ? kTileFeatures / 2 : kTileFeatures)};
  const cuuint32_t steps[] = {1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(p.w), sizes, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  SPS_CHECK(result == CUDA_SUCCESS);
  return map;
}

template <int kRows>
bool launch_rows(const Exec& ex, Product<bf16> p) {
  constexpr int kEnough = 32 << 10;  // bytes of weights under way on a multiprocessor
  const int parts = parts_of(p.k);
  p.tiles = int(ceil_div(p.outputs, p.end == DecodeEnd::swiglu ? kTileFeatures / 2 : kTileFeatures));
  // Of rows that are normed, each cluster norms all.
  const int together = p.gain != nullptr && parts == 4 && 2 * most_clusters(8) >= most_clusters(4) ? 2 : 1;
  const int blocks = parts * together;
  const int clusters = std::min(most_clusters(blocks), int(ceil_div(p.tiles, together)));
  if (clusters == 0) return false;
  const int most_tiles = int(ceil_div(p.tiles, clusters * together));
  ClusterPlan plan = plan_of<kRows>(p, parts, most_tiles, half_shared());
  const int stages = std::min(most_tiles * p.part_chunks, kEnough / kStageBytes);
  if (plan.depth * plan.tile_warps < stages) plan = plan_of<kRows>(p, parts, most_tiles, most_shared());
  if (plan.depth == 0) return false;
  const LaunchShape shape{dim3(unsigned(clusters * blocks)), dim3(ClusterShape<kRows>::kThreads),
                          size_t(ClusterShape<kRows>(p, plan).bytes()), unsigned(blocks)};
  const auto kernel =
      p.end == DecodeEnd::swiglu ? &cluster_kernel<kRows, true> : &cluster_kernel<kRows, false>;
  launch_behind(ex, shape, kernel, weights_map(p), p, plan);
  return true;
}

}  // namespace

bool launch_cluster(const Exec& ex, const Product<bf16>& p) {
  if (!starts_behind() || p.k < kChunk<bf16>) return false;
  if (p.rows <= 16) return launch_rows<16>(ex, p);
  if (p.rows <= 32) return launch_rows<32>(ex, p);
  return launch_rows<64>(ex, p);
}

}  // namespace sps::ops::decode_product
