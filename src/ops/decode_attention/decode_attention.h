// Attention of the new rows of several sequences over keys that earlier steps have kept (a cache) and over
// the rows of the step itself: decoding one position of every sequence, and prompts taken in pieces. The
// formula, bands and documents are those of attention.h: one softmax over the union of up to three key sets,
// for one or two query streams (states x and predictions p), which read every key once for both.
//
// Runs      A step consists of runs: run r is a few consecutive positions of the sequence in slot[r]. Of
// stream
//           s it has the rows row[r] .. row[r] + count[r] - 1, at positions begin[r], begin[r] + 1, ...; keys
//           of positions before first[r] do not exist (predictions that were never computed). Both streams'
//           rows end at the run's last position.
// Visible   position j to a query at position i  iff  lo <= i - j <= hi, j >= document start of the query's
//           row, j >= first. Keys before begin[r] come from the cache, the others from the step's own rows.
// Cache     Position j of slot s lies in row j % rows of a block: of page page_table[s * pages_per_slot + j /
// rows]
//           where it is paged (everything is kept), of slot s where it is a ring (the last `rows` positions).
//           In a block the rows of a head lie together: k, v are [blocks * kv_heads * rows, head_dim].
// Shapes    q, o [rows of the stream, heads*head_dim]; a set's k, v [rows of its stream, kv_heads*head_dim].
//           Query head h reads key head h / (heads / kv_heads). All lists are int32 in the device's memory.
// Types     q, k, v, o and the cache of one act dtype (f32, bf16; f64 in the reference). Softmax in f32.
// Errors    Shapes are SPS_CHECKed; a band must not reach further back than a ring.
// Order     On a GPU the lists and what the cache holds of earlier steps are read before the kernel before
// has
//           ended: between those who write them and this stands a copy, or a kernel launched the ordinary
//           way.
//
// The bits of a row depend on its query, the keys it sees and their positions: not on how a sequence is cut
// into steps, on the other rows of the step, or on the number of threads. A row that sees nothing gives
// zeros.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/attention/attention.h"
#include "ops/rope/rope.h"
#include "tensor/exec.h"
#include "tensor/memory.h"

namespace sps::ops {

struct KeyCache {
  Tensor k, v;       // empty: nothing is kept
  int64_t rows = 0;  // of a page, or of a ring
  bool paged = false;
};

struct PageTable {
  std::span<const int32_t> pages;  // [slots, per_slot]
  int64_t per_slot = 0;
};

// The rows of one stream in a step. Lists of one number a run, but for document_start: one a row, the first
// position of the row's document in its sequence.
struct StepRows {
  std::span<const int32_t> row, count, begin, first;
  std::span<const int32_t> document_start;
};

// What a call must find out before it can begin (which keys a part of a GPU takes, and where they lie) is the
// same for all calls of a step that differ in the places of rows alone. The first of them leaves it here for
// the others; no bit depends on it. For one step at a time; on a CPU nothing is left.
class DecodeSchedules {
 public:
  static constexpr size_t kMostKinds = 8;  // of calls; what more there are find out for themselves
  static constexpr int kKeyNumbers = 48;
  using Key = std::array<int32_t, kKeyNumbers>;  // all that calls of a kind have in common

  DecodeSchedules() = default;
  explicit DecodeSchedules(const Exec& ex);  // takes the device's memory
  // The kind's place, of bytes() / kMostKinds; null: there is none. Forgets no kind.
  std::byte* place(const Key& kind);
  size_t bytes() const { return memory_.size(); }

 private:
  Bytes memory_;
  std::vector<Key> kinds_;
};

struct DecodeStep {
  int64_t runs = 0;
  int64_t longest = 0;  // most rows of a run
  std::span<const int32_t> slot;
  std::array<StepRows, kMaxQueryStreams> stream;
  PageTable table;
  DecodeSchedules* schedules = nullptr;  // may be missing
  std::span<const int32_t> number = {};  // beside them: one that no other step with them has; not 0
};

struct DecodeShape {
  int64_t heads = 1, kv_heads = 1, head_dim = 1;
  float scale = 1;
};

struct DecodeQueries {  // q empty: the stream is absent
  Tensor q, o;
  std::array<Band, kMaxKeySets> band{Band::none(), Band::none(), Band::none()};
};
struct DecodeKeys {  // k empty: the set is absent, no band may ask for it
  Tensor k, v;
  int stream = 0;  // whose rows k and v are
  KeyCache cache;
};

void decode_attention(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                      const std::array<DecodeQueries, kMaxQueryStreams>& queries,
                      const std::array<DecodeKeys, kMaxKeySets>& keys);

// Puts the step's keys into their caches (a ring takes the last of them); several sets at once, each of its
// own number of heads. After the attention that reads them.
void keep_keys(const Exec& ex, int64_t head_dim, const DecodeStep& step, std::span<const DecodeKeys> keys);

// What comes before and after attention in a step of one position a run, for a kernel that does all of it:
// queries and keys are as the product left them, and
//   decode_attention(.., with_rotation)  =  rope_forward of every stream's q and of every turned set's k,
//                                           decode_attention of what that gives, keep_keys of the sets to
//                                           keep
// to the bit. Each row is turned by its position. A set whose cache is a ring may be kept by its last reader
// only.
struct DecodeRotation {
  RopeTable table;
  float eps = 0;                                // of the norms
  std::array<Tensor, kMaxQueryStreams> q_gain;  // empty: no norm
  struct Set {
    Tensor k;     // like the set's own, takes the turned keys; empty: they are turned already
    Tensor gain;  // empty: no norm
    bool keep = false;
  };
  std::array<Set, kMaxKeySets> set;
};

// Whether there is such a kernel for this call: on a GPU, bf16, heads and rotated parts of whole units of 16
// columns, rows of whole 16 bytes, at most 8 queries for a key, norms everywhere or nowhere.
bool decode_attention_rotates(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                              const std::array<DecodeQueries, kMaxQueryStreams>& queries,
                              const std::array<DecodeKeys, kMaxKeySets>& keys,
                              const DecodeRotation& rotation);
void decode_attention(const Exec& ex, const DecodeShape& shape, const DecodeStep& step,
                      const std::array<DecodeQueries, kMaxQueryStreams>& queries,
                      const std::array<DecodeKeys, kMaxKeySets>& keys, const DecodeRotation& with_rotation);

}  // namespace sps::ops
