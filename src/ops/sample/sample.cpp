#include "ops/sample/sample.h"

#include <vector>

#include "ops/rowwise.h"
#include "ops/sample/sample_kernels.h"
#include "tensor/device.h"

namespace sps::ops {

void sample(const Exec& ex, Tensor logits, std::span<const SampleRow> rows, Tensor forbidden, Tensor seen,
            std::span<Sampled> drawn) {
  const int64_t count = logits.rows, vocab = logits.cols;
  SPS_CHECK(logits.dtype == DType::f32 || (logits.dtype == DType::f64 && ex.device == Device::cpu));
  SPS_CHECK(int64_t(rows.size()) == count && int64_t(drawn.size()) == count);
  if (count == 0) return;
  SPS_CHECK(vocab > 0 && vocab <= kMostIds);
  SPS_CHECK(forbidden.dtype == DType::i32 && is_shape(forbidden, forbidden.rows, id_words(vocab)));
  SPS_CHECK(seen.empty() || (seen.dtype == DType::i32 && is_shape(seen, forbidden.rows, forbidden.cols)));
  if constexpr (kCudaBuilt)
    if (ex.device == Device::cuda) return sample_cuda(ex, logits, rows, forbidden, seen, drawn);
  for (const SampleRow& row : rows) SPS_CHECK(row.set >= 0 && row.set < forbidden.rows);
  parallel_for(count, [&](int64_t r) {
    const int64_t set = rows[size_t(r)].set;
    std::vector<float> rounded;
    const float* from = nullptr;
    if (logits.dtype == DType::f64) {
      rounded.assign(logits.row<double>(r), logits.row<double>(r) + vocab);
      from = rounded.data();
    } else {
      from = logits.row<float>(r);
    }
    int32_t* const seen_words = seen.empty() ? nullptr : seen.row<int32_t>(set);
    const Sampled s =
        sample_row_cpu({from, size_t(vocab)}, rows[size_t(r)], forbidden.row<int32_t>(set), seen_words);
    if (seen_words != nullptr && s.problem == SampleProblem::none)
      seen_words[s.id / 32] |= int32_t(1U << (s.id % 32));
    drawn[size_t(r)] = s;
  });
}

}  // namespace sps::ops
