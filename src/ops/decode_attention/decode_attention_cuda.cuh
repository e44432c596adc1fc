// Device code that all kernels of decode attention share: queries, the keys that they see, where keys lie,
// and how softmaxes of chunks are joined.
//
// Everything here that rounds is written with one instruction for each step, so that the compiler makes the
// same of it in every kernel.
#pragma once

#include <climits>

#include "ops/attention/attention_cuda.cuh"
#include "ops/cuda.cuh"
#include "ops/decode_attention/decode_attention_cuda.h"
#include "ops/launch.cuh"
#include "ops/ptx.cuh"

namespace sps::ops::decode {

using attention::Interval;

// Rows of a run that a stream asks for.
__device__ inline int asking(const Problem& p, int stream, int run) {
  const DeviceStream& s = p.stream[stream];
  return s.q == nullptr ? 0 : s.count[run];
}
// Most of any stream.
__device__ inline int longest_of(const Problem& p, int run) {
  return max(asking(p, 0, run), asking(p, 1, run));
}
__device__ inline int queries_of(const Problem& p, int run) {
  return (asking(p, 0, run) + asking(p, 1, run)) * p.group;
}

// Query n of a run and key head: numbered stream by stream, position by position, head by head of the group.
struct Query {
  int stream, row, position, head;
  bool live;

  __device__ Query(const Problem& p, int run, int key_head, int n) : stream(0), row(0), position(0), head(0) {
    int t = n / p.group;
    const int of_first = asking(p, 0, run);
    if (t >= of_first) t -= of_first, stream = 1;
    live = t < asking(p, stream, run);
    if (!live) return;
    row = p.stream[stream].row[run] + t, position = p.stream[stream].begin[run] + t;
    head = key_head * p.group + n % p.group;
  }
  // {0, 0} where it sees nothing.
  __device__ Interval keys(const Problem& p, int run, int set) const {
    if (!live) return {0, 0};
    const DeviceStream& s = p.stream[stream];
    const int first = p.stream[p.set[set].stream].first[run];
    const Interval seen = attention::visible_keys(s.band[set], position, max(s.document_start[row], first));
    return seen.begin < seen.end ? seen : Interval{0, 0};
  }
  template <class T>
  __device__ const T* q(const Problem& p) const {
    return static_cast<const T*>(p.stream[stream].q) + row * p.stream[stream].q_stride + head * p.head_dim;
  }
  template <class T>
  __device__ T* o(const Problem& p) const {
    return static_cast<T*>(p.stream[stream].o) + row * p.stream[stream].o_stride + head * p.head_dim;
  }
};

// What several queries see of a set: every key that one of them sees lies in `any`, all of them see `all`.
struct SetKeys {
  Interval any, all;

  __device__ void clear() { any = {INT_MAX, INT_MIN}, all = {INT_MIN, INT_MAX}; }
  __device__ void add_atomically(Interval seen) {  // to shared memory
    if (seen.end > seen.begin) atomicMin(&any.begin, seen.begin), atomicMax(&any.end, seen.end);
    atomicMax(&all.begin, seen.begin), atomicMin(&all.end, seen.end);
  }
  // Positions are not negative; divisions of unsigned numbers are shorter.
  __device__ int first_chunk() const { return int(unsigned(any.begin) / kChunk); }
  __device__ int chunks() const {
    return any.end > any.begin ? int(unsigned(any.end - 1) / kChunk) - first_chunk() + 1 : 0;
  }
  // Keys of a chunk that somebody sees.
  __device__ Interval within(int chunk) const {
    return {max(any.begin, chunk * kChunk), min(any.end, (chunk + 1) * kChunk)};
  }
  // Some query does not see one of those.
  __device__ bool mixed(int chunk) const {
    const Interval keys = within(chunk);
    return !all.covers(keys.begin, keys.end - keys.begin);
  }
};

struct Item {
  int set, chunk;
};
// The nth chunk of the keys of all sets, one after the other.
__device__ inline Item item_of(const SetKeys* sets, int n) {
  for (int set = 0; set < kMaxKeySets - 1; ++set) {
    const int chunks = sets[set].chunks();
    if (n < chunks) return {set, sets[set].first_chunk() + n};
    n -= chunks;
  }
  return {kMaxKeySets - 1, sets[kMaxKeySets - 1].first_chunk() + n};
}
__device__ inline int items_of(const SetKeys* sets) {
  int n = 0;
  for (int set = 0; set < kMaxKeySets; ++set) n += sets[set].chunks();
  return n;
}

// Row of the cache of a position's key, counted over all blocks and heads.
__device__ inline int cache_row(const DeviceKeys& set, int kv_heads, const int32_t* pages_of_slot, int slot,
                                int head, int position) {
  const int in = int(unsigned(position) / unsigned(set.rows));
  const int block = set.paged ? pages_of_slot[in] : slot;
  return (block * kv_heads + head) * set.rows + position - in * set.rows;
}

// Where a key lies: a row of the cache, or ~ a row of the step.
constexpr int kNowhere = INT_MIN;
__device__ inline int locate(const Problem& p, int set, int run, int head, int position) {
  const DeviceKeys& keys = p.set[set];
  const DeviceStream& own = p.stream[keys.stream];
  const int fresh = position - own.begin[run];
  if (fresh >= 0) return ~(own.row[run] + fresh);
  const int slot = p.slot[run];
  return cache_row(keys, p.kv_heads, p.pages + int64_t(slot) * p.per_slot, slot, head, position);
}
// The rows of keys, or of values, of a set and head.
template <class T>
struct RowSource {
  const T *cache, *step;
  int64_t stride;  // of the step's rows
  int head_dim;

  __device__ const T* row(int where) const {
    return where >= 0 ? cache + int64_t(where) * head_dim : step + ~where * stride;
  }
};
template <class T>
__device__ inline RowSource<T> keys_of(const Problem& p, int set, int head) {
  const DeviceKeys& s = p.set[set];
  return {static_cast<const T*>(s.cache_k), static_cast<const T*>(s.k) + int64_t(head) * p.head_dim,
          s.k_stride, p.head_dim};
}
template <class T>
__device__ inline RowSource<T> values_of(const Problem& p, int set, int head) {
  const DeviceKeys& s = p.set[set];
  return {static_cast<const T*>(s.cache_v), static_cast<const T*>(s.v) + int64_t(head) * p.head_dim,
          s.v_stride, p.head_dim};
}

// A softmax under way: the sum is of 2^(score - top). top is -inf as long as no score was higher.
struct Softmax {
  float top = -INFINITY, sum = 0;
};
// What is subtracted from scores: where every score is -inf there is nothing to subtract. A NaN comes out as
// one either way.
__device__ inline float base_of(float top) {
  return top == -INFINITY ? 0.0F : top;
}

// Sums over the keys of both softmaxes are fresh * now + total * old.
struct Factors {
  float old, now;
  __device__ float join(float total, float fresh) const {
    return __fmaf_rn(fresh, now, __fmul_rn(total, old));
  }
};
// Where `top` is the larger of both.
__device__ inline Factors factors_of(float old_top, float fresh_top, float top) {
  const float base = base_of(top);
  return {fast_exp2(__fsub_rn(old_top, base)), fast_exp2(__fsub_rn(fresh_top, base))};
}
__device__ inline Factors join(Softmax& total, const Softmax& fresh) {
  const float top = fmaxf(total.top, fresh.top);
  const Factors f = factors_of(total.top, fresh.top, top);
  total = {top, f.join(total.sum, fresh.sum)};
  return f;
}
// What the sum of weighted values is multiplied with at the end.
__device__ inline float share_of(float sum) {
  return sum == 0 ? 0.0F : __fdiv_rn(1.0F, sum);
}

}  // namespace sps::ops::decode
