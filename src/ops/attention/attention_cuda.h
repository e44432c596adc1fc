// Attention on a GPU: the entry points, and the description of a call that every kernel takes by value.
//
// attention_cuda.cu makes a Problem of the arguments, chooses the kernels and has the statistics of the
// backward pass; attention_cuda_check.cu serves any shape in f32 and bf16 with plain f32 arithmetic;
// attention_cuda_forward.cu and attention_cuda_backward.cu serve bf16 on tensor cores (sm_80 and later),
// where rows are aligned and head_dim is a multiple of 8 up to 128.
// attention_hopper*.cu serve it on Hopper at head_dim 64, 96 and 128.
#pragma once

#include "ops/attention/attention_kernels.h"
#include "ops/attention/attention_scratch.h"

namespace sps::ops {

void attention_forward_cuda(const Exec& ex, const AttentionShape& shape, const QueryStreams& queries,
                            const KeySets& keys);
void attention_backward_cuda(const Exec& ex, const AttentionShape& shape, const QueryStreams& queries,
                             const KeySets& keys, const QueryGrads& query_grads, const KeyGrads& key_grads);

namespace attention {

// Rows in GPU memory: element (r, c) is data[r * stride + c], r counted over all sequences.
struct DeviceRows {
  void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::f32;
};

// Key j is visible to query i iff lo <= i - j <= hi and document_start[i] <= j. 0 <= lo <= hi <= length <
// 2^30; a band that shows nothing is {2^30, 0}, which gives an empty interval of keys for every range of
// queries, and of queries for every range of keys, without overflow.
struct DeviceBand {
  int32_t lo = int32_t{1} << 30, hi = 0;
};

struct DeviceQueries {
  DeviceRows q, o, lse;  // lse f32
  DeviceRows d_o, dq;    // backward
  DeviceBand band[kMaxKeySets];
};
struct DeviceKeys {
  DeviceRows k, v;
  DeviceRows dk, dv;  // backward
  bool accumulate = false;

  constexpr bool wanted() const { return dk.data != nullptr; }
};

// What the backward pass needs of every row, f32: lse in units of log 2 (+inf where a row sees nothing, so
// that its probabilities are 0) and delta = sum(d_o * o). Row i of a stream, sequence and head is at
// Problem::statistics_of() + i; rows from length to padded hold +inf and 0.
struct RowStatistics {
  static constexpr int kPad = int(kStatisticsPad);  // padded is a multiple
  float* lse2 = nullptr;
  float* delta = nullptr;
  int64_t padded = 0;
};

// Streams and sets that are absent have been left out: the rest is numbered 0 .. streams-1 and 0 .. sets-1.
struct Problem {
  DeviceQueries queries[kMaxQueryStreams];
  DeviceKeys keys[kMaxKeySets];
  RowStatistics statistics;                 // backward
  const int32_t* document_start = nullptr;  // in GPU memory, [batch * length]
  int32_t streams = 0, sets = 0;
  int32_t batch = 0, length = 0, head_dim = 0;
  int32_t heads = 0, kv_heads = 0, group = 1;  // group = heads / kv_heads
  float scale = 1, scale_log2 = 1;             // scale_log2 = scale * log2(e)
  DType dtype = DType::f32;
  bool aligned = false;  // every head of every row of q, k, v, o, d_o begins at a multiple of 16 bytes
  bool skip_tiles = true;

  // Where the statistics of a stream, sequence and head begin.
  constexpr int64_t statistics_of(int stream, int sequence, int head) const {
    return ((int64_t(stream) * batch + sequence) * heads + head) * statistics.padded;
  }
};

Problem make_problem(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys);
// With gradients. The statistics are set by row_statistics().
Problem make_problem(const AttentionShape& shape, const QueryStreams& queries, const KeySets& keys,
                     const QueryGrads& query_grads, const KeyGrads& key_grads);

// Takes device scratch for problem.statistics and fills it from o, d_o and lse. First step of every backward.
void row_statistics(const Exec& ex, Problem& problem);

void forward_check(const Exec& ex, const Problem& problem);
void backward_check(const Exec& ex, const Problem& problem);

bool tensor_cores_serve(const Problem& problem);
void forward_tensor_cores(const Exec& ex, const Problem& problem);
void backward_tensor_cores(const Exec& ex, const Problem& problem);

}  // namespace attention

}  // namespace sps::ops
