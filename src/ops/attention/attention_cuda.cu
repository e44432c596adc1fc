// The way from the operation's arguments to kernels.
#include <algorithm>

#include "ops/attention/attention_cuda.h"
#include "ops/attention/attention_hopper.h"
#include "ops/cuda.cuh"

namespace sps::ops {

namespace attention {

namespace {

constexpr float kLog2e = 1.44269504F;
constexpr int kLanesOfRow = 8, kRowThreads = 256, kRowsOfBlock = kRowThreads / kLanesOfRow;

// Eight lanes add up a row; the rows of a block are neighbours, so that o and d_o are read in whole sectors
// and the sums are written side by side.
template <class T>
__global__ void __launch_bounds__(kRowThreads) statistics_kernel(const __grid_constant__ Problem p) {
  const int tiles = int(p.statistics.padded) / kRowsOfBlock, lane = int(threadIdx.x) % kLanesOfRow;
  int block = int(blockIdx.x);
  const int row = block % tiles * kRowsOfBlock + int(threadIdx.x) / kLanesOfRow;
  block /= tiles;
  const int head = block % p.heads;
  block /= p.heads;
  const int sequence = block % p.batch, stream = block / p.batch;
  const DeviceQueries& queries = p.queries[stream];
  float sum = 0, lse = -INFINITY;
  if (row < p.length) {
    const int64_t r = int64_t(sequence) * p.length + row;
    const T* o = static_cast<const T*>(queries.o.data) + r * queries.o.stride + head * p.head_dim;
    const T* d_o = static_cast<const T*>(queries.d_o.data) + r * queries.d_o.stride + head * p.head_dim;
    if (p.aligned) {
      constexpr int kWide = 16 / sizeof(T);
      for (int c = lane * kWide; c < p.head_dim; c += kLanesOfRow * kWide) {
        float x[kWide], y[kWide];
        load(o + c, x);
        load(d_o + c, y);
#pragma unroll
        for (int i = 0; i < kWide; ++i) sum += x[i] * y[i];
      }
    } else {
      for (int c = lane; c < p.head_dim; c += kLanesOfRow) sum += to_float(o[c]) * to_float(d_o[c]);
    }
    lse = static_cast<const float*>(queries.lse.data)[r * queries.lse.stride + head];
  }
#pragma unroll
  for (int step = kLanesOfRow / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0U, sum, step);
  if (lane != 0) return;
  const int64_t at = p.statistics_of(stream, sequence, head) + row;
  p.statistics.lse2[at] = lse == -INFINITY ? INFINITY : lse * kLog2e;
  p.statistics.delta[at] = sum;
}

DeviceRows rows_of(const Tensor& t) {
  return {t.data, t.stride, t.dtype};
}

bool aligned(const Problem& p, const DeviceRows& rows) {
  const size_t size = dtype_size(rows.dtype);
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && size_t(rows.stride) * size % 16 == 0 &&
         size_t(p.head_dim) * size % 16 == 0;
}

// All that kernels read or write in vectors; those that are not there have no data and stride 0.
bool all_aligned(const Problem& p) {
  return std::ranges::all_of(
             p.queries,
             [&](const auto& s) { return aligned(p, s.q) && aligned(p, s.o) && aligned(p, s.d_o); }) &&
         std::ranges::all_of(p.keys, [&](const auto& s) { return aligned(p, s.k) && aligned(p, s.v); });
}

DeviceBand band_of(Band band, int64_t length) {
  if (band.empty() || band.lo >= length) return {};
  return {int32_t(band.lo), int32_t(std::min(band.hi, length))};
}

}  // namespace

Problem make_problem(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                     const QueryGrads& query_grads, const KeyGrads& key_grads) {
  Problem p;
  p.document_start = shape.document_start.data();
  p.batch = int32_t(shape.batch), p.length = int32_t(shape.length);
  p.heads = int32_t(shape.heads), p.kv_heads = int32_t(shape.kv_heads), p.group = p.heads / p.kv_heads;
  p.head_dim = int32_t(shape.head_dim);
  p.scale = shape.scale, p.scale_log2 = shape.scale * kLog2e;
  p.skip_tiles = shape.skip_tiles;
  for (size_t s = 0; s < queries.size(); ++s) {
    const QueryStream& from = queries[s];
    if (!from.q) continue;
    p.dtype = from.q.dtype;
    DeviceQueries& to = p.queries[p.streams++];
    to.q = rows_of(from.q), to.o = rows_of(from.o), to.lse = rows_of(from.lse);
    to.d_o = rows_of(query_grads[s].d_o), to.dq = rows_of(query_grads[s].dq);
  }
  for (size_t k = 0; k < keys.size(); ++k) {
    if (!keys[k].k) continue;
    DeviceKeys& to = p.keys[p.sets];
    to.k = rows_of(keys[k].k), to.v = rows_of(keys[k].v);
    to.dk = rows_of(key_grads[k].dk), to.dv = rows_of(key_grads[k].dv),
    to.accumulate = key_grads[k].accumulate;
    int stream = 0;
    for (const QueryStream& from : queries)
      if (from.q) p.queries[stream++].band[p.sets] = band_of(from.band[k], shape.length);
    ++p.sets;
  }
  p.aligned = all_aligned(p);
  return p;
}

Problem make_problem(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys) {
  return make_problem(shape, queries, keys, {}, {});
}

void row_statistics(const Exec& ex, Problem& p) {
  p.statistics.padded = padded_length(p.length);
  const int64_t rows = p.statistics.padded * p.heads * p.batch * p.streams;
  if (rows == 0) return;
  p.statistics.lse2 = reinterpret_cast<float*>(
      device_scratch(ex, DeviceSlot::rows, statistics_bytes(p.batch, p.length, p.heads, p.streams)));
  p.statistics.delta = p.statistics.lse2 + rows;
  with_device_type(p.dtype, [&](auto t) {
    statistics_kernel<decltype(t)><<<unsigned(rows / kRowsOfBlock), kRowThreads, 0, stream_of(ex)>>>(p);
  });
  SPS_LAUNCHED();
}

bool tensor_cores_serve(const Problem& p) {
  // Offsets within a tile are 32 bits wide.
  constexpr int64_t kMostStride = int64_t{1} << 22;
  const auto narrow = [](const DeviceRows& rows) { return rows.stride < kMostStride; };
  return p.dtype == DType::bf16 && p.aligned && p.head_dim % 8 == 0 && p.head_dim <= 128 && p.scale > 0 &&
         std::ranges::all_of(p.queries, [&](const auto& s) { return narrow(s.q) && narrow(s.d_o); }) &&
         std::ranges::all_of(p.keys, [&](const auto& s) { return narrow(s.k) && narrow(s.v); });
}

}  // namespace attention

void attention_forward_cuda(const Exec& ex, const AttentionShape& shape, const QueryStreams& queries,
                            const KeySets& keys) {
  const attention::Problem p = attention::make_problem(shape, queries, keys);
  if (p.streams == 0 || p.batch == 0 || p.length == 0) return;
  if (attention::hopper_serves(p)) return attention::forward_hopper(ex, p);
  attention::tensor_cores_serve(p) ? attention::forward_tensor_cores(ex, p) : attention::forward_check(ex, p);
}

void attention_backward_cuda(const Exec& ex, const AttentionShape& shape, const QueryStreams& queries,
                             const KeySets& keys, const QueryGrads& query_grads, const KeyGrads& key_grads) {
  attention::Problem p = attention::make_problem(shape, queries, keys, query_grads, key_grads);
  if (p.batch == 0 || p.length == 0) return;
  attention::row_statistics(ex, p);
  if (attention::hopper_serves(p)) return attention::backward_hopper(ex, p);
  attention::tensor_cores_serve(p) ? attention::backward_tensor_cores(ex, p)
                                   : attention::backward_check(ex, p);
}

}  // namespace sps::ops
