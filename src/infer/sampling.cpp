#include "infer/sampling.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace sps {

void check(const SamplingOptions& o) {
  if (!(o.temperature >= 0) || !std::isfinite(o.temperature))
    usage_error("temperature = {}: expected 0 (greedy) or a positive number", o.temperature);
  if (o.top_k < 0) usage_error("top_k = {}: expected 0 (all) or a positive number", o.top_k);
  if (!(o.top_p > 0 && o.top_p <= 1))
    usage_error("top_p = {}: expected a number above 0 and at most 1", o.top_p);
  if (!(o.min_p >= 0 && o.min_p <= 1)) usage_error("min_p = {}: expected a number from 0 to 1", o.min_p);
  if (!(o.repetition_penalty > 0) || !std::isfinite(o.repetition_penalty))
    usage_error("repetition_penalty = {}: expected a positive number (1 changes nothing)",
                o.repetition_penalty);
}

IdSet id_set(const std::vector<bool>& ids) {
  IdSet words(size_t(ops::id_words(int64_t(ids.size()))), 0);
  for (size_t id = 0; id < ids.size(); ++id)
    if (ids[id]) words[id / 32] |= int32_t(1U << (id % 32));
  return words;
}

NextId::NextId(const SamplingOptions& options) : options_(options), rng_(options.seed, "sampling") {
  check(options);
}

ops::SampleRow NextId::row(uint64_t n, int64_t set) const {
  ops::SampleRow row;
  row.temperature = options_.temperature, row.top_p = options_.top_p, row.min_p = options_.min_p;
  row.uniform = rng_.uniform(n);
  row.repetition_penalty = float(options_.repetition_penalty);
  row.top_k = int32_t(std::min(options_.top_k, ops::kMostIds));
  row.set = int32_t(set);
  return row;
}

int32_t NextId::draw(std::span<const float> logits, const std::vector<bool>& forbidden, uint64_t n,
                     const std::vector<bool>& seen) const {
  const auto vocab = int64_t(logits.size());
  const auto tensor = [&](IdSet& set) {
    return set.empty() ? Tensor{} : view(set.data(), 1, int64_t(set.size()));
  };
  IdSet never = id_set(forbidden), before = id_set(seen);
  const ops::SampleRow settings = row(n, 0);
  ops::Sampled drawn;
  ops::sample({}, view(logits.data(), 1, vocab), {&settings, 1}, tensor(never), tensor(before), {&drawn, 1});
  if (drawn.problem != ops::SampleProblem::none) fail("{}", problem_text(drawn));
  return drawn.id;
}

std::string problem_text(const ops::Sampled& drawn) {
  if (drawn.problem == ops::SampleProblem::not_a_number)
    return fmt::format("the logit of id {} is not a number", drawn.id);
  return "no id is left to choose from: every logit is -inf or forbidden";
}

}  // namespace sps
