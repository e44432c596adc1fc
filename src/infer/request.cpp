#include "infer/request.h"

#include "base/error.h"

namespace sps {

std::vector<int32_t> checked_prompt(const ModelConfig& c, std::span<const int32_t> prompt,
                                    const GenerateOptions& options) {
  check(options.sampling);
  if (options.max_new < 0) usage_error("the number of new tokens is {}: expected 0 or more", options.max_new);
  std::vector<int32_t> ids(prompt.begin(), prompt.end());
  for (const int32_t id : ids)
    if (id < 0 || id >= c.vocab)
      usage_error("the prompt holds id {}: the model's vocabulary has {} ids", id, c.vocab);
  if (ids.empty()) ids.push_back(int32_t(c.eot));
  const auto length = int64_t(ids.size());
  if (options.max_new > c.context || length > c.context - options.max_new)
    usage_error("a prompt of {} tokens and {} new ones do not fit the model's context of {}", length,
                options.max_new, c.context);
  return ids;
}

std::vector<bool> forbidden_ids(const ModelConfig& c, const GenerateOptions& options) {
  std::vector<bool> forbidden(size_t(c.vocab), false);
  for (int64_t id = options.ids > 0 ? options.ids : c.vocab; id < c.vocab; ++id) forbidden[size_t(id)] = true;
  if (!options.stop_at_eot) forbidden[size_t(c.eot)] = true;
  if (c.has_pred() && c.pred_input == PredInput::row) forbidden[size_t(c.pred_row)] = true;
  return forbidden;
}

}  // namespace sps
