// Runs of one position: what is read is the keys, once for the queries of both streams and of all heads of a
// group. Warps, as many as multiprocessors hold beside each other, take items each for itself
// (decode_attention_split.cuh), and none waits for a barrier.
#include <algorithm>

#include "ops/decode_attention/decode_attention_split.cuh"

namespace sps::ops::decode {

namespace {

constexpr int kWarps = 2;       // of a block: what the driver takes of shared memory comes once for both
constexpr int kMostWarps = 16;  // of a multiprocessor, that leave records

// Warps that a multiprocessor holds: a warp's registers follow from that.
template <int D>
constexpr int kResident = D <= 64   ? 12
                          : D <= 96 ? 8
                                    : 6;

// Blocks part, part + parts, ... are neighbours: the GPU hands out blocks one multiprocessor after the other,
// and with neighbours together all multiprocessors have the same number of items.
template <int D, bool kTurns>
__global__ void __launch_bounds__(kWarps* kWarp, kResident<D> / kWarps)
    split_kernel(const __grid_constant__ Problem p, const __grid_constant__ Partials partials,
                 const __grid_constant__ Schedule schedule, int parts) {
  let_next_start();
  extern __shared__ __align__(128) char memory[];
  const int block = int(blockIdx.x), me = int(threadIdx.x) / kWarp;
  SplitWarp<D, kTurns> warp(p, partials, reinterpret_cast<WarpShared<D>*>(memory)[me]);
  const Share share{block % parts, parts, block / parts * kWarps + me, int(gridDim.x) / parts * kWarps};
  if (warp.start(share, schedule) > 0)
    warp.finish([](int, int) { wait_for_previous(); });
  else if (block == 0)  // the others may end at once: the grid ends when this one has waited
    wait_for_previous();
}

int shared_of_multiprocessor() {
  static const int bytes = [] {
    int device = 0, n = 0;
    SPS_CUDA(cudaGetDevice(&device));
    SPS_CUDA(cudaDeviceGetAttribute(&n, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    return n;
  }();
  return bytes;
}

template <int D>
void launch(const Exec& ex, const Problem& p, Schedule schedule) {
  constexpr int kShared = kWarps * int(sizeof(WarpShared<D>)), kOfBlock = 1024;  // that the driver takes
  const Partials partials = partials_of(ex, p);
  const int64_t most = int64_t{partials.count} * p.most_items;
  SPS_CHECK(most < INT32_MAX);
  const int64_t parts = std::min<int64_t>(most, gpu_info().multiprocessors),
                blocks = std::max(1, shared_of_multiprocessor() / (kShared + kOfBlock)),
                of_part = std::min(ceil_div(ceil_div(most, parts), kWarps), blocks);
  const LaunchShape shape{dim3(unsigned(parts * of_part)), dim3(kWarps * kWarp), kShared};
  if (parts * of_part * kWarps > gpu_info().multiprocessors * kMostWarps) schedule = {};
  launch_behind(ex, shape, p.turns ? split_kernel<D, true> : split_kernel<D, false>, p, partials, schedule,
                int(parts));
}

}  // namespace

Partials partials_of(const Exec& ex, const Problem& p) {
  const int of_position = p.streams * p.group;
  Partials partials;
  partials.tiles = (of_position + kQueryTile - 1) / kQueryTile;
  const int64_t count = int64_t{p.runs} * p.kv_heads * partials.tiles;
  SPS_CHECK(count < INT32_MAX);
  partials.count = int32_t(count), partials.queries = std::min(of_position, kQueryTile);
  partials.items = (p.most_items + 1) / 2 * 2;  // so that sums begin at whole 16 bytes
  partials.width = padded_head(p.head_dim);
  const int64_t floats = count * partials.of_tile();
  partials.data =
      reinterpret_cast<float*>(device_scratch(ex, DeviceSlot::partial, size_t(floats) * sizeof(float)));
  partials.done =
      reinterpret_cast<unsigned*>(device_scratch(ex, DeviceSlot::counters, size_t(count) * sizeof(unsigned)));
  return partials;
}

void attend_split(const Exec& ex, const Problem& p, const Schedule& schedule) {
  const int width = padded_head(p.head_dim);
  (width == 64 ? launch<64> : width == 96 ? launch<96> : launch<128>)(ex, p, schedule);
}

}  // namespace sps::ops::decode

size_t sps::ops::schedule_bytes_cuda() {
  return size_t(gpu_info().multiprocessors) * decode::kMostWarps * decode::kRecordBytes;
}
