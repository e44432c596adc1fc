// The code behind sample.h; shapes already checked, some rows.
#pragma once

#include "ops/sample/sample.h"

namespace sps::ops {

// Sets of one row. `seen` may be null.
Sampled sample_row_cpu(std::span<const float> logits, const SampleRow& row, const int32_t* forbidden,
                       const int32_t* seen);
void sample_cuda(const Exec& ex, Tensor logits, std::span<const SampleRow> rows, Tensor forbidden,
                 Tensor seen, std::span<Sampled> drawn);

}  // namespace sps::ops
