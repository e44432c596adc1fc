#include "infer/generate.h"

#include "base/error.h"
#include "score/model_input.h"

namespace sps {

std::vector<int32_t> generate(Model& model, std::span<const int32_t> prompt, const GenerateOptions& options,
                              const std::function<void(int32_t)>& each) {
  const ModelConfig& c = model.config();
  if (options.max_new < 0) usage_error("the number of new tokens is {}: expected 0 or more", options.max_new);
  std::vector<int32_t> ids(prompt.begin(), prompt.end());
  for (const int32_t id : ids)
    if (id < 0 || id >= c.vocab) usage_error("the prompt holds id {}: the model's vocabulary has {} ids", id, c.vocab);
  if (ids.empty()) ids.push_back(int32_t(c.eot));
  const auto length = int64_t(ids.size());
  if (length + options.max_new > c.context)
    usage_error("a prompt of {} tokens and {} new ones do not fit the model's context of {}", length, options.max_new,
                c.context);

  std::vector<bool> forbidden(size_t(c.vocab), false);
  for (int64_t id = options.ids > 0 ? options.ids : c.vocab; id < c.vocab; ++id) forbidden[size_t(id)] = true;
  if (!options.stop_at_eot) forbidden[size_t(c.eot)] = true;
  // The row that prediction tokens start from is no text.
  if (c.has_pred() && c.pred_input == PredInput::row) forbidden[size_t(c.pred_row)] = true;

  std::vector<float> logits(size_t(c.vocab));
  NextId next(options.sampling);
  Batch batch;
  std::vector<int32_t> window;
  for (int64_t n = 0; n < options.max_new; ++n) {
    window = ids;
    window.push_back(int32_t(c.eot));  // a target that nobody reads
    batch.fill(window, int64_t(ids.size()), special_ids(c));
    const auto last = int32_t(ids.size()) - 1;
    model.logits(model_input(batch), std::span(&last, 1), view(logits.data(), 1, c.vocab));
    const int32_t id = next.draw(logits, forbidden, uint64_t(n));
    if (id == c.eot) break;
    ids.push_back(id);
    if (each) each(id);
  }
  return {ids.begin() + std::ptrdiff_t(length), ids.end()};
}

}  // namespace sps
