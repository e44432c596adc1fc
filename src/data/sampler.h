// Which windows of a token file a training step and an evaluation see.
//
// Training. Epoch e cuts the file into units: windows that start at offset_e + context * u, u = 0..units-1. A
// window is `context` inputs and one more token, the last target; neighbours share that one token. offset_e
// is drawn from (seed, e) among all that leave room for the units, so window borders move from epoch to epoch
// and no token of the file is left out for ever; every epoch has the same number of units. Runs of
// `chunk_units` units stay together and in order, the runs are shuffled with (seed, e).
//   Sample n (counted over all epochs, 64-bit) is unit n % units of epoch n / units: a function of (file,
//   context, seed, chunk_units, n) alone. So the number of samples seen is the whole state: a resume at any
//   n, with any number of ranks and any accumulation, continues the uninterrupted run. Rank r of R takes the
//   samples with n % R == r. chunk_units 1 shuffles single windows and needs 4 bytes of memory per window of
//   the file. The paper's reference uses 262144: a batch is then a few consecutive pieces of text, which
//   reads the disk in order and mixes badly.
//
// Validation. A fixed set of windows that do not overlap in what they score: all of them in order, or, for a
// smaller number of tokens, the first of a fixed shuffle. The same for every model and seed, each position
// scored once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/token_file.h"

namespace sps {

struct SamplerOptions {
  int64_t context = 0;  // inputs of a window
  uint64_t seed = 0;
  int64_t chunk_units = 1;
  int64_t rank = 0, world = 1;
};

// Refers to the file, which must outlive it. Calls on one object must not overlap: the order of one epoch is
// kept.
class Sampler {
 public:
  // An error if the file has fewer than context + 1 tokens.
  Sampler(const TokenFile& file, const SamplerOptions& options);

  // First token of sample n's window.
  int64_t start(uint64_t n);
  // The starts of this rank's part of samples [begin, begin + count), in order.
  void batch(uint64_t begin, int64_t count, std::vector<int64_t>& starts);

  int64_t units() const { return units_; }                           // samples of an epoch
  uint64_t epoch(uint64_t n) const { return n / uint64_t(units_); }  // of sample n
  int64_t offset(uint64_t epoch) const;                              // first window of an epoch
  // Tokens of the file that an epoch does not show, at the two ends; other ones in each epoch.
  int64_t dropped_tokens() const;
  // Hash of the ids of samples [begin, end): equal streams, equal hashes.
  std::string stream_hash(uint64_t begin, uint64_t end);

 private:
  const TokenFile& file_;
  SamplerOptions options_;
  int64_t units_ = 0, offsets_ = 0;  // offsets: how many an epoch may choose from
  uint64_t order_epoch_ = 0;
  std::vector<uint32_t> order_;  // of the chunks in order_epoch_
  int64_t short_place_ = 0;      // where in it the last, perhaps short, chunk stands
};

class ValidationWindows {
 public:
  // eval_tokens 0: every window. Otherwise enough windows to score that many positions, if there are so many;
  // smaller sets are prefixes of larger ones until the set is all of them.
  ValidationWindows(const TokenFile& file, int64_t context, int64_t eval_tokens = 0);

  int64_t count() const { return int64_t(starts_.size()); }
  int64_t start(int64_t i) const { return starts_[size_t(i)]; }
  const std::vector<int64_t>& starts() const { return starts_; }
  bool complete() const { return count() == available_; }
  int64_t dropped_tokens() const { return dropped_; }  // after the last whole window of the file

 private:
  std::vector<int64_t> starts_;
  int64_t available_ = 0, dropped_ = 0;
};

}  // namespace sps
