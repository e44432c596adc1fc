// For tests: a small byte-level BPE, trained on the test corpus.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/test_corpus.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/bpe_trainer.h"

namespace sps {

inline BpeTokenizer make_test_bpe(int64_t vocab_size = 300, uint64_t seed = 1) {
  BpeTrainerOptions options;
  options.vocab_size = vocab_size;
  BpeTrainer trainer(options);
  trainer.add(std::vector<std::string>{test_documents(200, seed)});
  return BpeTokenizer(trainer.train());
}

// Its tokenizer.json in dir/name; returns the file.
inline std::filesystem::path write_test_bpe(const TestDir& dir, const std::string& name,
                                            int64_t vocab_size = 300, uint64_t seed = 1) {
  return dir.write(name, make_test_bpe(vocab_size, seed).to_json());
}

}  // namespace sps
