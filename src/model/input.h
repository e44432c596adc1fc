// What one forward pass reads: `batch` sequences of `length` tokens, row after row. data/batch.h makes it
// from windows of a token file.
#pragma once

#include <cstdint>
#include <span>

namespace sps {

struct ModelInput {
  int64_t batch = 0, length = 0;
  std::span<const int32_t> tokens;   // [batch * length] ids below the vocabulary
  std::span<const int32_t> targets;  // next id, or -1 where no loss is counted; may be empty for logits alone
  std::span<const int32_t> document_start;  // first position of the row's document in its sequence
  std::span<const int32_t> positions;       // rotary position of the row, below the context
  int64_t rows() const { return batch * length; }
};

}  // namespace sps
