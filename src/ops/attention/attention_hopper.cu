// The hosts' side of the Hopper kernels: what they serve, tensor maps, the order of work.
#include <algorithm>
#include <cstdlib>

#include "ops/attention/attention_hopper.cuh"
#include "ops/attention/attention_hopper.h"
#include "ops/attention/attention_hopper_host.h"
#include "ops/tensor_map.h"

namespace sps::ops::attention {

namespace {

// The copy engine, and stores of 16 bytes, want every row to start at a multiple of 16 bytes.
bool aligned(const DeviceRows& rows) {
  const auto bytes = int64_t(dtype_size(rows.dtype));
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.stride * bytes % 16 == 0;
}

}  // namespace

bool hopper_serves(const Problem& p) {
#ifndef SPS_HAS_HOPPER
  return false;
#endif
  if (gpu_info().major != 9 || gpu_info().minor != 0 || p.dtype != DType::bf16) return false;
  if (p.head_dim != 64 && p.head_dim != 96 && p.head_dim != 128) return false;
  if (!(p.scale > 0)) return false;  // the largest product is then the largest score
  for (int s = 0; s < p.streams; ++s)
    for (const DeviceRows& rows : {p.queries[s].q, p.queries[s].o, p.queries[s].d_o, p.queries[s].dq})
      if (!aligned(rows)) return false;
  for (int s = 0; s < p.sets; ++s)
    for (const DeviceRows& rows : {p.keys[s].k, p.keys[s].v, p.keys[s].dk, p.keys[s].dv})
      if (!aligned(rows)) return false;
  return true;
}

CUtensorMap tile_map(const Problem& p, const DeviceRows& rows, int heads, int box_rows) {
  const auto row = cuuint64_t(rows.stride) * sizeof(__nv_bfloat16);
  const cuuint64_t sizes[] = {cuuint64_t(p.head_dim), cuuint64_t(heads), cuuint64_t(p.length),
                              cuuint64_t(p.batch)};
  const cuuint64_t strides[] = {p.head_dim * sizeof(__nv_bfloat16), row, row * cuuint64_t(p.length)};
  const cuuint32_t box[] = {hopper::kChunkColumns, 1, cuuint32_t(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, rows.data, sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  SPS_CHECK(result == CUDA_SUCCESS);
  return map;
}

bool seen_alike(const Problem& p, int set) {
  if (p.streams < 2) return false;
  const DeviceBand a = p.queries[0].band[set], b = p.queries[1].band[set];
  if (a.hi < a.lo || b.hi < b.lo) return a.hi < a.lo && b.hi < b.lo;
  return std::abs(a.lo - b.lo) + std::abs(a.hi - b.hi) <= 64;
}

HopperSchedule make_schedule(const Problem& p, int tiles, int readers, int64_t row_bytes, int32_t* counter) {
  const int key_heads = p.batch * p.kv_heads;
  HopperSchedule s;
  s.tiles = tiles;
  s.heads = key_heads * readers;
  s.items = tiles * s.heads;
  s.section = section_of(key_heads, row_bytes, p.length) * readers;
  s.counter = counter;
  return s;
}

}  // namespace sps::ops::attention
