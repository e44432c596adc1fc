#include "infer/generate.h"

#include "score/model_input.h"

namespace sps {

std::vector<int32_t> generate(Model& model, std::span<const int32_t> prompt, const GenerateOptions& options,
                              const EachId& each) {
  const ModelConfig& c = model.config();
  std::vector<int32_t> ids = checked_prompt(c, prompt, options);
  const auto length = std::ptrdiff_t(ids.size());
  const std::vector<bool> forbidden = forbidden_ids(c, options);
  std::vector<bool> seen(size_t(c.vocab), false);
  for (const int32_t id : ids) seen[size_t(id)] = true;

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
    const int32_t id = next.draw(logits, forbidden, uint64_t(n), seen);
    if (id == c.eot) break;
    ids.push_back(id);
    seen[size_t(id)] = true;
    if (each && !each(id, logits)) break;
  }
  return {ids.begin() + length, ids.end()};
}

}  // namespace sps
