// The pairs of keys and values that a model's blocks read, and how far back (two-tower spec, 1.9 and 5.3):
// what decoding keeps.
#pragma once

#include "model/plan.h"

namespace sps {

// One pair of keys and values of every position.
struct KeyPair {
  enum Source : uint8_t { state, pred, reader, read_head } source = state;
  int64_t block = 0;     // state block; prediction block (pred, reader); 0 for the read head
  int64_t kv_heads = 1;  // of head_dim numbers each, keys and values
  Horizon horizon;       // of all its readers
};

// In a fixed order: state blocks, read head, prediction blocks, readers.
std::vector<KeyPair> key_pairs(const Plan& plan);

}  // namespace sps
