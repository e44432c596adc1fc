// Merges words of any length in bounded memory: a bit for each byte of the word, and one window of symbols.
//
// Tokens in a row are what merging their bytes gives exactly if each two neighbours are what merging the
// bytes of the two gives: merging goes by rank and from left to right, so as long as no merge crosses a
// border, both sides take the steps they take alone, and the first merge to cross one would also cross it
// with the two neighbours alone. So a word is merged window by window. The last tokens of a window, which
// more text could change, are merged again as the beginning of the next one, and the two tokens at that
// border must be such neighbours. If they are not, the border goes back and the window grows, at the most to
// the whole word.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "tokenizer/merge_table.h"
#include "tokenizer/token_index.h"

namespace sps {

class LongWordMerger {
 public:
  static constexpr size_t kWindow = size_t{1} << 16;  // shorter words are merged at once

  // `window`: bytes, to begin with; `back`: tokens of a window that are merged again.
  LongWordMerger(const MergeTable& merges, const TokenIndex& index, const std::array<int32_t, 256>& byte_ids,
                 size_t window = kWindow, size_t back = 32)
      : merges_(merges), index_(index), byte_ids_(byte_ids), window_(window), back_(back) {}

  // Gives the ids in order, some at a time. Error if the tokens are such that a window would have to be
  // larger than MergeTable can take.
  void merge(std::string_view word, const std::function<void(std::span<const int32_t>)>& take) const;

 private:
  void merge_window(std::string_view bytes, std::vector<int32_t>& ids) const;
  bool are_neighbours(std::string_view left, std::string_view right) const;

  const MergeTable& merges_;
  const TokenIndex& index_;
  const std::array<int32_t, 256>& byte_ids_;
  size_t window_, back_;
};

}  // namespace sps
