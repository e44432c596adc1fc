// The merges of a BPE, and how they turn the bytes of a word into tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tokenizer/bpe_model.h"

namespace sps {

class MergeTable {
 public:
  // Ids must not be negative. If a pair is there twice, repeated() says where it came again and the first
  // counts.
  explicit MergeTable(std::span<const Merge> merges);
  int64_t repeated() const { return repeated_; }  // -1: none

  struct Applied {
    size_t count;         // of tokens that are left, at the front of the symbols
    uint32_t last_merge;  // its place in the list; kNoMerge if there was none
  };
  static constexpr uint32_t kNoMerge = UINT32_MAX;
  // Merges `symbols` up, at each time the earliest pair of the list and of equal ones the leftmost.
  // O(n log n).
  Applied apply(std::span<int32_t> symbols) const;

  static constexpr size_t kMaxSymbols = size_t{1} << 30;

 private:
  struct Entry {
    int32_t left, right;  // left -1: free
    uint32_t rank;
    int32_t result;
  };
  // An entry whose rank is kNoMerge if the pair is no merge.
  const Entry& find(int32_t left, int32_t right) const {
    const Entry* entry = &entries_[slot(left, right)];
    while (entry->left != left || entry->right != right) {
      if (entry->left < 0) return *entry;
      if (++entry == entries_.data() + entries_.size()) entry = entries_.data();
    }
    return *entry;
  }
  size_t slot(int32_t left, int32_t right) const {
    return size_t((uint64_t(uint32_t(left)) << 32 | uint32_t(right)) * 0x9E3779B97F4A7C15u >> shift_);
  }
  Applied apply_short(std::span<int32_t> symbols) const;
  Applied apply_long(std::span<int32_t> symbols) const;

  std::vector<Entry> entries_;  // open addressing, a power of two, at most half full
  int shift_;
  int64_t repeated_ = -1;
};

}  // namespace sps
