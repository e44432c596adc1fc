// For tests: training of a BPE as its definition says it, with every pair counted anew for every merge.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tokenizer/bpe_merger.h"

namespace sps {

struct SlowBpe {
  std::vector<std::string> tokens;
  std::vector<Merge> merges;
};

inline SlowBpe slow_bpe(const std::map<std::string, int64_t>& words, std::span<const int32_t, 256> byte_ids,
                        const MergeLimits& limits) {
  SlowBpe bpe;
  bpe.tokens.resize(256);
  for (int b = 0; b < 256; ++b) bpe.tokens[size_t(byte_ids[size_t(b)])] = std::string(1, char(b));
  std::vector<std::pair<std::vector<int32_t>, int64_t>> texts;
  for (const auto& [word, count] : words) {
    std::vector<int32_t> ids;
    for (const char c : word) ids.push_back(byte_ids[static_cast<unsigned char>(c)]);
    texts.emplace_back(std::move(ids), count);
  }
  while (int64_t(bpe.tokens.size()) < limits.tokens) {
    std::map<std::pair<int32_t, int32_t>, int64_t> pairs;
    for (const auto& [ids, count] : texts)
      for (size_t i = 0; i + 1 < ids.size(); ++i) pairs[{ids[i], ids[i + 1]}] += count;
    // The map is in the order of the ids, so the first of the most frequent ones is the one to join.
    std::optional<std::pair<int32_t, int32_t>> best;
    int64_t most = std::max<int64_t>(limits.min_frequency, 1) - 1;
    for (const auto& [pair, count] : pairs) {
      const std::string token = bpe.tokens[size_t(pair.first)] + bpe.tokens[size_t(pair.second)];
      if (int64_t(token.size()) > limits.max_token_bytes || limits.never.contains(token)) continue;
      if (count > most) best = pair, most = count;
    }
    if (!best) break;
    const std::string token = bpe.tokens[size_t(best->first)] + bpe.tokens[size_t(best->second)];
    const auto known = std::find(bpe.tokens.begin(), bpe.tokens.end(), token);
    const auto result = int32_t(known - bpe.tokens.begin());
    if (known == bpe.tokens.end()) bpe.tokens.push_back(token);
    bpe.merges.push_back({best->first, best->second, result});
    for (auto& [ids, count] : texts) {
      std::vector<int32_t> joined;
      for (size_t i = 0; i < ids.size(); ++i)
        if (i + 1 < ids.size() && ids[i] == best->first && ids[i + 1] == best->second)
          joined.push_back(result), ++i;
        else
          joined.push_back(ids[i]);
      ids = std::move(joined);
    }
  }
  return bpe;
}

}  // namespace sps
