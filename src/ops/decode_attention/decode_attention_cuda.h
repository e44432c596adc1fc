// Decode attention on a GPU: the description of a call that every kernel takes by value.
//
// decode_attention.cu makes a Problem of the arguments, chooses the kernels and keeps keys;
// decode_attention_check.cu serves every shape in f32 and bf16 with plain f32 arithmetic; bf16 heads that are
// a multiple of 8 wide, up to 128, go to tensor cores (sm_80 and later): decode_attention_split.cu has the
// runs of one position, decode_attention_walk.cu the longer ones.
//
// Keys are taken in chunks of kChunk positions, counted from the text's first one. A chunk has a softmax of
// its own, and chunks are joined in order, set after set. So the bits do not depend on who takes which chunk.
#pragma once

#include <optional>

#include "ops/attention/attention_cuda.h"
#include "ops/decode_attention/decode_attention_kernels.h"

namespace sps::ops::decode {

using attention::DeviceBand;

constexpr int kChunk = 64;
constexpr int kQueryTile = 8;          // queries that share what tensor cores do
constexpr int kMostTurnedQueries = 8;  // that share a key, where rows are turned on their way

struct DeviceStream {
  const int32_t *row = nullptr, *count = nullptr, *begin = nullptr, *first = nullptr;  // by run
  const int32_t* document_start = nullptr;                                             // by row
  const void* q = nullptr;  // null: the stream asks nothing
  void* o = nullptr;
  int64_t q_stride = 0, o_stride = 0;
  const float* gain = nullptr;  // of queries that are turned
  DeviceBand band[kMaxKeySets];
};

struct DeviceKeys {
  const void *k = nullptr, *v = nullptr;  // of the step
  int64_t k_stride = 0, v_stride = 0;
  void *cache_k = nullptr, *cache_v = nullptr;
  int32_t rows = 1;           // of a block of the cache
  bool whole_chunks = false;  // which is whole chunks
  bool paged = false;
  int32_t stream = 0;
  // Of a call that turns and keeps: where the turned keys go (null: they are turned already), the norm's
  // gain.
  void* turned = nullptr;
  int64_t turned_stride = 0;
  const float* gain = nullptr;
  bool keep = false;
};

// How rows are turned on their way, see rope_units.cuh.
struct Rotation {
  const float *cos = nullptr, *sin = nullptr;
  int64_t cos_stride = 0, sin_stride = 0;
  int32_t pairs = 0, units = 0;
  bool adjacent = false, norm = false;
  float eps = 0;
};

struct Problem {
  DeviceStream stream[kMaxQueryStreams];
  DeviceKeys set[kMaxKeySets];
  const int32_t *slot = nullptr, *pages = nullptr;
  int32_t per_slot = 0;
  int32_t runs = 0, longest = 0;
  int32_t heads = 1, kv_heads = 1, group = 1, head_dim = 1;
  int32_t streams = 0;     // that ask
  int32_t most_items = 0;  // chunks of all sets that a position can see, whatever its place
  float scale_log2 = 1;    // from dot products to scores in units of log 2
  DType dtype = DType::f32;
  bool aligned = false;  // all rows can be moved 16 bytes at a time
  bool turns = false;    // queries and keys are turned, and keys kept
  Rotation rotation;
};

// What chunks leave for a tile of queries until they are joined: of every query the softmax of each chunk,
// then of every query its sums of each chunk. A tile is up to kQueryTile queries of a run of one position and
// a key head.
struct Partials {
  float* data = nullptr;
  unsigned* done = nullptr;  // by tile: chunks that are there; 0 between calls
  int32_t queries = 0;       // room for so many
  int32_t items = 0;         // and for so many chunks
  int32_t width = 0;         // of sums: the head's, rounded up to what kernels are made for
  int32_t tiles = 0;         // of a run and key head
  int32_t count = 0;         // tiles of the whole call

  constexpr int64_t of_tile() const { return int64_t{queries} * items * (2 + width); }
  // [items] of a query: softmax, as two numbers; sums.
  constexpr float* softmax(int tile, int query) const {
    return data + tile * of_tile() + int64_t{query} * items * 2;
  }
  constexpr float* sums(int tile, int query) const {
    return data + tile * of_tile() + (int64_t{queries} * 2 + int64_t{query} * width) * items;
  }
};
// Of the call's kind, see DecodeSchedules: every warp's record, kRecordBytes each. One that an earlier call
// of the step has left bears the step's number in each of its 16 bytes.
struct Schedule {
  void* records = nullptr;  // null: none is left
  const int32_t* number = nullptr;
};
constexpr int kRecordBytes = 32 * 16;

// What kernels are made for.
constexpr int padded_head(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : 128;
}
// In the device's scratch: the same places for every call of the same shape.
Partials partials_of(const Exec& ex, const Problem& p);

// Of a call that turns and keeps; nothing where there is no kernel for it.
std::optional<Problem> rotated_problem(const DecodeShape& shape, const DecodeStep& step,
                                       const DecodeQuerySet& queries, const DecodeKeySets& keys,
                                       const DecodeRotation& rotation);

void attend_check(const Exec& ex, const Problem& p);
void attend_split(const Exec& ex, const Problem& p, const Schedule& schedule);
void attend_walk(const Exec& ex, const Problem& p);

}  // namespace sps::ops::decode
