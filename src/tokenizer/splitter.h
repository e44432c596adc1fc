// Pre-tokenization: cuts a text into the words that merges do not cross. The patterns of the well-known
// families run as hand-written scanners, any other one by PCRE2.
//
// Every byte is in exactly one piece. A byte that is not part of valid UTF-8 is a character of no class:
// neither letter nor number nor white space.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/bpe_model.h"

namespace sps {

// What a cutter keeps about one text from call to call.
class CutState {
 public:
  virtual ~CutState() = default;
};

// One step. Immutable: threads share it.
class Cutter {
 public:
  virtual ~Cutter() = default;
  // The ends of the next pieces of `text`, of which the first begins at `begin` < text.size(). Returns how
  // many, at least one. `begin` is 0 or where the call before ended; `state` is empty at the first call for a
  // text.
  virtual size_t cut(std::string_view text, size_t begin, std::span<size_t> ends,
                     std::unique_ptr<CutState>& state) const = 0;
};

namespace patterns {
// As the families' own files write them.
extern const std::string_view gpt2;             // GPT-2, SmolLM after its digits step
extern const std::string_view gpt2_tiktoken;    // the same pieces
extern const std::string_view cl100k;           // Llama 3
extern const std::string_view cl100k_tiktoken;  // differs where a text ends in white space with line breaks
extern const std::string_view cl100k_written;   // cl100k_tiktoken as it is written to a tokenizer.json
extern const std::string_view qwen2;
extern const std::string_view o200k;
}  // namespace patterns

// Whether the pattern is run by a scanner; such patterns leave nothing between matches.
bool is_known_pattern(std::string_view pattern);
// A pattern that matches exactly `text`.
std::string pattern_of_text(std::string_view text);

// A scanner if the pattern is known.
std::unique_ptr<Cutter> make_cutter(const SplitStep& step);
// PCRE2, known or not: UTF, Unicode classes, `$` only at the end of the text, empty matches do not count.
// Error if the pattern is not valid; cut() throws Error where the pattern takes too much time or memory on a
// text.
std::unique_ptr<Cutter> make_regex_cutter(std::string_view pattern);

// All steps of a model, one after the other.
class Splitter {
 public:
  explicit Splitter(const std::vector<SplitStep>& steps);

  // Calls word(piece) for every piece, in order.
  template <class Word>
  void for_each(std::string_view text, Word&& word) const {
    run(0, text, word);
  }

 private:
  static constexpr size_t kBlock = 128;

  template <class Word>
  void run(size_t step, std::string_view text, Word& word) const {
    if (step == cutters_.size()) {
      if (!text.empty()) word(text);
      return;
    }
    size_t ends[kBlock];
    std::unique_ptr<CutState> state;
    for (size_t begin = 0; begin < text.size();) {
      const size_t n = cutters_[step]->cut(text, begin, ends, state);
      for (size_t i = 0; i < n; begin = ends[i++]) {
        const auto piece = text.substr(begin, ends[i] - begin);
        if (step + 1 == cutters_.size())
          word(piece);
        else
          run(step + 1, piece, word);
      }
    }
  }

  std::vector<std::unique_ptr<Cutter>> cutters_;
};

}  // namespace sps
