// What decoding keeps of earlier positions (inference spec, section 1; two-tower spec, 1.9): for each pair of
// keys and values that some block reads, everything (in pages that sequences take as they grow), the last w
// positions (a ring in each sequence's slot), or nothing. Which of the three follows from the bands of its
// readers.
//
// Keys are kept as attention reads them: normed and rotated, in the compute dtype.
#pragma once

#include <cstdint>
#include <vector>

#include "model/key_pairs.h"
#include "ops/decode_attention/decode_attention.h"
#include "tensor/arena.h"

namespace sps {

// How many of a text's last positions need prediction rows before the next ones can be decoded: all of them
// (INT64_MAX) where the state reads them, the last where nothing is kept of them, in between where prediction
// blocks read each other's keys w back: what the last block's kept keys were made of, block by block.
int64_t needed_pred_rows(const Plan& plan);

// A ring that would hold every position of a text counts as persistent.
struct CacheSize {
  int64_t bytes_per_position = 0;  // persistent
  int64_t bytes_per_sequence = 0;  // rings
  // Of one sequence whose text has `positions`.
  int64_t bytes(int64_t positions) const { return positions * bytes_per_position + bytes_per_sequence; }
};
CacheSize cache_size(const Plan& plan, DType dtype);

struct CacheOptions {
  int64_t slots = 1;  // sequences at the same time
  int64_t pages = 1;  // for all of them together
  int64_t page = 64;  // positions of a page
};

// The memory of all pairs. Who owns which page is the caller's business.
class KeyCaches {
 public:
  KeyCaches(const Plan& plan, DType dtype, Device device, const CacheOptions& options);

  const std::vector<KeyPair>& pairs() const { return pairs_; }  // horizons as they are kept
  const ops::KeyCache& cache(size_t pair) const { return caches_[pair]; }
  int64_t find(KeyPair::Source source, int64_t block) const;  // index of a pair, -1 if there is none
  size_t paged_bytes() const { return paged_bytes_; }
  size_t ring_bytes() const { return ring_bytes_; }
  bool has_rings() const { return ring_bytes_ > 0; }

 private:
  std::vector<KeyPair> pairs_;
  std::vector<ops::KeyCache> caches_;
  Arena memory_;
  size_t paged_bytes_ = 0, ring_bytes_ = 0;
};

}  // namespace sps
