#include "score/score.h"

#include <cmath>
#include <numbers>
#include <vector>

#include "data/batch.h"
#include "score/model_input.h"

namespace sps {

double Score::bits_per_byte() const { return bytes > 0 ? nll / std::numbers::ln2 / double(bytes) : 0; }

Score score_windows(Model& model, const TokenFile& file, const ValidationWindows& windows, int64_t batch,
                    const Tokenizer* tokenizer, const std::function<void(int64_t done)>& progress) {
  const ModelConfig& c = model.config();
  const int64_t length = c.context;
  const auto bytes_of = [&](int32_t id, int32_t previous) {
    return tokenizer == nullptr ? 0 : int64_t(tokenizer->text_of(id, previous).size());
  };

  Score score;
  Batch rows;
  std::vector<double> nll;
  for (int64_t begin = 0; begin < windows.count(); begin += batch) {
    const int64_t n = std::min(batch, windows.count() - begin);
    rows.fill(file, std::span(windows.starts()).subspan(size_t(begin), size_t(n)), length, special_ids(c));
    nll.assign(size_t(n * length), 0.0);
    model.evaluate(model_input(rows), nll);
    for (size_t r = 0; r < nll.size(); ++r) {
      if (rows.targets[r] < 0) continue;
      score.nll += nll[r];
      score.bytes += bytes_of(rows.targets[r], rows.tokens[r]);
      ++score.scored;
    }
    if (progress) progress(begin + n);
  }
  return score;
}

}  // namespace sps
