// Choosing the next id from rows of logits (inference spec, section 5), each row with settings of its own.
// All paths are exact and defined for every input: ties go to the lowest id, top_k keeps exactly k ids, top_p
// the smallest set that reaches p.
//
// The order of the rules: repetition penalty, forbidden ids, greedy if the temperature is 0; else
// temperature, top_k, top_p of what top_k left, min_p, one draw: the ids are laid end to end, each as long as
// it is likely, by size if there was top_k or top_p, else by number, and the one at `uniform` of the whole is
// taken.
//
// Shapes   logits [rows, vocab]; rows and drawn one for each of them; forbidden, seen [sets,
// id_words(vocab)]:
//          bit id % 32 of word id / 32 says that a set holds an id. Row r looks at set rows[r].set of both.
//          `seen` (may be empty) are the ids of the text so far; the id that is drawn is added. Rows that run
//          at once must not share a set. All of it lies on the device, rows where no kernel of the stream
//          writes; drawn may lie in pinned host memory.
// Types    logits f32 (f64 where there is no GPU: rounded to f32 first); sets i32. Probabilities in f64.
// Devices  On a GPU a probability is rounded to about 2^-46 (for 50,000 ids) of the likeliest id's, and exp
// may
//          differ in the last bit: a draw is the CPU's unless its random number, or top_p's or min_p's bound,
//          comes so near to where two ids meet. Sums there are exact, so that they have no order.
// Errors   Shapes are SPS_CHECKed. What a row's numbers make impossible is said in `problem`.
#pragma once

#include <span>

#include "tensor/exec.h"

namespace sps::ops {

inline constexpr int64_t kMostIds = int64_t{1} << 22;

inline int64_t id_words(int64_t vocab) {
  return (vocab + 31) / 32;
}

struct SampleRow {
  double temperature = 0;  // 0: the largest logit
  double top_p = 1;        // (0, 1]
  double min_p = 0;        // [0, 1]: only ids at least so likely, as a part of the likeliest's probability
  double uniform = 0;      // the random number of the draw, in [0, 1)
  float repetition_penalty = 1;  // > 0: logits of seen ids are divided by it, negative ones multiplied
  int32_t top_k = 0;             // 0: all
  int32_t set = 0;
  int32_t log_probability = 0;  // 1: wanted
};

enum class SampleProblem : int32_t {
  none,
  not_a_number,  // the logit of `id` (the lowest such) is NaN
  nothing_left,  // every logit is -inf or forbidden
};

struct Sampled {
  // Natural logarithm of the probability that the model itself gives the id: softmax of the logits as they
  // are, forbidden ids included. NaN if one of them is; 0 if not wanted.
  double log_probability = 0;
  int32_t id = -1;
  SampleProblem problem = SampleProblem::none;
};

void sample(const Exec& ex, Tensor logits, std::span<const SampleRow> rows, Tensor forbidden, Tensor seen,
            std::span<Sampled> drawn);

// The same number for any id, on the CPU. -inf where it is impossible.
double log_probability(std::span<const float> logits, int32_t id);

}  // namespace sps::ops
