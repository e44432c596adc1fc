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
  std::vector<int64_t> token_bytes;  // per id, filled as ids turn up
  if (tokenizer != nullptr) token_bytes.assign(size_t(tokenizer->vocab_size()), -1);
  const auto bytes_of = [&](int32_t id) {
    if (size_t(id) >= token_bytes.size()) return int64_t{0};
    int64_t& n = token_bytes[size_t(id)];
    if (n < 0) n = int64_t(tokenizer->decode(std::span(&id, 1)).size());
    return n;
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
      score.bytes += bytes_of(rows.targets[r]);
      ++score.scored;
    }
    if (progress) progress(begin + n);
  }
  return score;
}

}  // namespace sps
