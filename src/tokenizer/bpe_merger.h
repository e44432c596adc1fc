// The second half of training a BPE: from counted words to merges (bpe_trainer.h says what is computed).
//
// Each pair knows its frequency and the words it was seen in; a heap gives the most frequent one. Joining a
// pair visits its words alone and changes the frequencies of its neighbours there, so the work is in
// proportion to what changes. Entries of the heap may be too high: they are corrected when they come up.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tokenizer/bpe_model.h"

namespace sps {

struct MergeLimits {
  int64_t tokens = 0;  // stop with this many, bytes included
  int64_t min_frequency = 1;
  int64_t max_token_bytes = INT64_MAX;
  std::unordered_set<std::string> never;  // tokens that may not be made, as bytes
};

class BpeMerger {
 public:
  // `byte_ids` of the 256 bytes are also the first tokens.
  explicit BpeMerger(std::span<const int32_t, 256> byte_ids);

  void add_word(std::string_view word, int64_t count);
  // Call once, after all words.
  void run(const MergeLimits& limits, const std::function<void(int64_t tokens)>& progress = {});

  const std::vector<std::string>& tokens() const { return tokens_; }  // bytes of each id
  const std::vector<Merge>& merges() const { return merges_; }

 private:
  struct Word {
    uint64_t begin;  // in symbols_
    uint32_t length;
    int64_t count;
  };
  struct Pair {
    int32_t left, right;
    int64_t count = 0;
    uint64_t gained = 0;          // the last merge that made it more frequent
    std::vector<uint32_t> words;  // every word that holds it, and some that did
  };
  struct Candidate {
    int64_t count;
    int32_t left, right;
    uint32_t pair;
    bool operator<(const Candidate& o) const {
      return count != o.count ? count < o.count : left != o.left ? left > o.left : right > o.right;
    }
  };
  void count_pairs();
  void offer(uint32_t pair, const MergeLimits& limits);
  uint32_t find_or_insert(int32_t left, int32_t right);
  void join(uint32_t pair, int32_t result);
  void rehash();

  std::vector<int32_t> byte_ids_;
  std::vector<std::string> tokens_;
  std::vector<Merge> merges_;
  std::vector<int32_t> symbols_;  // the words, end to end; a word gets shorter in place
  std::vector<Word> words_;
  std::vector<Pair> pairs_;
  std::vector<uint32_t> table_;  // open addressing over pairs_, UINT32_MAX: free
  std::priority_queue<Candidate> heap_;
  std::vector<uint32_t> touched_;  // pairs that the current merge made more frequent
};

}  // namespace sps
