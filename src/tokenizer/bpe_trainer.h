// Training of a byte-level BPE (Sennrich et al., "Neural machine translation of rare words with subword
// units", ACL 2016): count the words of the texts, then join the most frequent pair of neighbouring tokens
// again and again.
//
//   BpeTrainer trainer({.vocab_size = 32768});
//   while (...) trainer.add(texts);
//   BpeModel model = trainer.train();
//
// Ids: 0..255 the bytes in the order of GPT-2's printable alphabet ("!" is 0), then one id for each new token
// in the order of the merges, then end of text, then the other special tokens. Of pairs that are equally
// frequent the one with the smaller left, then right id is joined. The pairs of a word overlap ("aaa" holds
// "aa" twice); joining goes from left to right. With the same splits, special tokens and frequencies these
// are the merges that Hugging Face's BpeTrainer finds.
//
// The result depends on the options and on the sequence of add() calls alone, not on threads; as long as no
// word was dropped, not even on the order of the texts. Memory: the table of different words, at most
// table_bytes, and about three times as much while merging.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bpe_model.h"

namespace sps {

struct BpeTrainerOptions {
  int64_t vocab_size = 32768;              // all ids: bytes, merged tokens, special tokens
  std::string pattern = "llama3";          // a name of named_pattern() or a regular expression
  std::string eot = "<|endoftext|>";       // the special token that ends a text
  std::vector<std::string> special;        // further special tokens; texts that spell one are ordinary text
  int64_t min_frequency = 2;               // of a pair that is joined
  int64_t max_token_bytes = 128;           // of a joined token
  int64_t max_word_bytes = 1024;           // longer words are counted in parts of this size
  int64_t table_bytes = int64_t{1} << 29;  // of memory for different words; beyond it the rarest are dropped
};

struct BpeTrainerStats {
  uint64_t texts = 0, text_bytes = 0, words = 0, different_words = 0;
  uint64_t dropped_words = 0;      // different words that left the table ...
  uint64_t dropped_frequency = 0;  // ... each seen at most this often since it came in
};

class BpeTrainer {
 public:
  // Usage errors: a vocabulary too small for bytes and special tokens, a bad pattern, special tokens that are
  // empty, equal, not UTF-8, or written like a single byte in a vocabulary file.
  explicit BpeTrainer(BpeTrainerOptions options);
  ~BpeTrainer();
  BpeTrainer(const BpeTrainer&) = delete;
  BpeTrainer& operator=(const BpeTrainer&) = delete;

  // Counts the words of the texts, on all threads. Batches of some megabytes keep threads busy; a batch's
  // different words are held beside the table.
  void add(std::span<const std::string> texts);

  // Empties the table. `progress` hears now and then how many ids there are. Texts that are too small for the
  // vocabulary give a smaller one; none at all is an error.
  BpeModel train(const std::function<void(int64_t ids)>& progress = {});

  const BpeTrainerStats& stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// "gpt2", "llama3", "qwen2", "o200k": the splits of these models. Anything else is a regular expression; a
// usage error if it is a bare word.
std::vector<SplitStep> named_pattern(std::string_view name_or_pattern);

}  // namespace sps
