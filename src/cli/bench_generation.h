// Generation speed of several models side by side: whole prompts and the steps that follow them, through an
// Engine, as its users see them: a step has ended when the ids that it drew are known.
#pragma once

#include <string>
#include <vector>

#include "cli/bench_subject.h"
#include "infer/engine.h"
#include "infer/step_cost.h"

namespace sps {

struct GenerationBench {
  std::vector<int64_t> batches;
  int64_t prompt = 0;           // of each text
  std::vector<int64_t> tokens;  // new ones of each text, one number for each batch
  int64_t step_rows = 0;        // 0: whole prompts of a batch in one step, as far as 16384 positions go
  int rounds = 1;
  SamplingOptions sampling;  // each text has a seed of its own, counted on from this one
  bool program = true;  // see DecoderOptions
  bool ceiling = true;  // measure the memory's, once a round
  int64_t rows_of(int64_t batch) const;
};

// What one model did with one batch, over all rounds; seconds.
struct GenerationTimes {
  std::vector<double> prefill;                 // until every text had its first new token: one number a round
  std::vector<double> whole;                   // until every text had its last
  std::vector<double> step_medians;            // of each round's steps
  std::vector<double> steps;                   // in which every text took one token, of all rounds
  std::vector<double> bytes_per_second;        // the median of each round's steps
  std::vector<double> step_tokens_per_second;  // of each round: tokens of its steps by the sum of their times
  StepBytes bytes;                             // of the mean step of a round
  EngineMemory memory;
  // What memory could do then, bytes per second: read, before and after each turn on a CPU; copied, after
  // each round on a GPU. One number a round.
  std::vector<double> ceilings;
  size_t scratch = 0;                     // of the operations, bytes
  uint64_t drawn = 0;                     // hash of the first round's ids, step by step
  ops::DecodeProgram::Launches programs;  // on a GPU: in its graphs, and of them by mail
  std::string error;                      // not measured: why (no memory for so many texts)
};

// Each model takes its turn in every round with every batch, so that all see the same machine; a round before
// them that goes a few tokens far warms up. Prompts are random and alike for all models; every text goes on
// to its last token, always with the most likely one. An engine is made anew for each turn, so that only the
// weights of all models lie in memory together. Usage error if a text does not fit a model's context.
std::vector<std::vector<GenerationTimes>> bench_generation(const std::vector<BenchSubject>& subjects,
                                                           DType dtype, Device device,
                                                           const GenerationBench& bench);

// The q-th part of the values lies below it. Not of none.
double quantile(std::vector<double> values, double q);
inline double median(std::vector<double> values) {
  return quantile(std::move(values), 0.5);
}

}  // namespace sps
