// How a GPU cuts the rows of the embedding's gradient, and the device scratch that this takes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sps::ops {

constexpr int64_t kEmbeddingList = 32;  // rows that are added up before a sum leaves its list

// Sums of the lists' two ends (and of all rows, for the start vector), the rows' numbers in three orders, and
// about as much again for sorting them, which CUB alone knows exactly.
constexpr size_t embedding_backward_scratch_bytes(int64_t rows, int64_t d, bool vector) {
  const int64_t lists = (rows + kEmbeddingList - 1) / kEmbeddingList;
  return size_t((vector ? 3 : 2) * lists * d + 6 * rows) * 4;
}

}  // namespace sps::ops
