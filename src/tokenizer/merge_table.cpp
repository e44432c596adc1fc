#include "tokenizer/merge_table.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace sps {

namespace {
constexpr size_t kShort = 40;  // up to here looking at every pair beats a heap
}

MergeTable::MergeTable(std::span<const Merge> merges) {
  const size_t size = std::bit_ceil(2 * merges.size() + 2);
  entries_.assign(size, {-1, -1, kNoMerge, -1});
  shift_ = 64 - std::countr_zero(size);
  for (size_t i = 0; i < merges.size(); ++i) {
    const auto& [left, right, result] = merges[i];
    SPS_CHECK(left >= 0 && right >= 0 && result >= 0);
    auto& entry = const_cast<Entry&>(find(left, right));
    if (entry.left < 0)
      entry = {left, right, uint32_t(i), result};
    else if (repeated_ < 0)
      repeated_ = int64_t(i);
  }
}

MergeTable::Applied MergeTable::apply(std::span<int32_t> symbols) const {
  if (symbols.size() < 2) return {symbols.size(), kNoMerge};
  return symbols.size() <= kShort ? apply_short(symbols) : apply_long(symbols);
}

MergeTable::Applied MergeTable::apply_short(std::span<int32_t> symbols) const {
  struct Pair {
    uint32_t rank;
    int32_t result;
  };
  Pair pairs[kShort];  // pairs[i]: of symbols i and i + 1
  size_t n = symbols.size();
  uint32_t last = kNoMerge;
  const auto look = [&](size_t i) {
    const Entry& entry = find(symbols[i], symbols[i + 1]);
    pairs[i] = {entry.rank, entry.result};
  };
  for (size_t i = 0; i + 1 < n; ++i) look(i);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i)
      if (pairs[i].rank < pairs[best].rank) best = i;
    if (pairs[best].rank == kNoMerge) break;
    last = pairs[best].rank;
    symbols[best] = pairs[best].result;
    --n;
    for (size_t i = best + 1; i < n; ++i) symbols[i] = symbols[i + 1];
    for (size_t i = best + 1; i + 1 < n; ++i) pairs[i] = pairs[i + 1];
    if (best > 0) look(best - 1);
    if (best + 1 < n) look(best);
  }
  return {n, last};
}

// A list of symbols and a heap of pairs. An entry of the heap may be out of date; it is when the pair that
// stands at its position has another rank, or none.
MergeTable::Applied MergeTable::apply_long(std::span<int32_t> symbols) const {
  const size_t n = symbols.size();
  SPS_CHECK(n <= kMaxSymbols);
  constexpr int32_t kGone = -1;
  uint32_t last = kNoMerge;
  std::vector<int32_t> previous(n), next(n);
  std::vector<uint64_t> heap;  // rank, then position: both ascending
  const auto after = std::greater<uint64_t>();
  for (size_t i = 0; i < n; ++i) {
    previous[i] = int32_t(i) - 1;
    next[i] = i + 1 < n ? int32_t(i + 1) : -1;
    if (i + 1 == n) break;
    const uint32_t rank = find(symbols[i], symbols[i + 1]).rank;
    if (rank != kNoMerge) heap.push_back(uint64_t(rank) << 32 | i);
  }
  std::make_heap(heap.begin(), heap.end(), after);
  const auto offer = [&](int32_t i) {
    const uint32_t rank = find(symbols[size_t(i)], symbols[size_t(next[size_t(i)])]).rank;
    if (rank == kNoMerge) return;
    heap.push_back(uint64_t(rank) << 32 | uint32_t(i));
    std::push_heap(heap.begin(), heap.end(), after);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), after);
    const auto rank = uint32_t(heap.back() >> 32);
    const auto i = size_t(uint32_t(heap.back()));
    heap.pop_back();
    if (symbols[i] == kGone || next[i] < 0) continue;
    const auto right = size_t(next[i]);
    const Entry& entry = find(symbols[i], symbols[right]);
    if (entry.rank != rank) continue;
    last = rank;
    symbols[i] = entry.result;
    symbols[right] = kGone;
    next[i] = next[right];
    if (next[i] >= 0) previous[size_t(next[i])] = int32_t(i);
    if (previous[i] >= 0) offer(previous[i]);
    if (next[i] >= 0) offer(int32_t(i));
  }
  return {size_t(std::remove(symbols.begin(), symbols.end(), kGone) - symbols.begin()), last};
}

}  // namespace sps
