#include "tokenizer/bpe_merger.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace sps {

namespace {

constexpr uint32_t kFree = UINT32_MAX;

uint64_t mix(int32_t left, int32_t right) {
  uint64_t x = (uint64_t(uint32_t(left)) << 32 | uint32_t(right)) * 0x9E3779B97F4A7C15;
  return x ^ (x >> 32);
}

}  // namespace

BpeMerger::BpeMerger(std::span<const int32_t, 256> byte_ids)
    : byte_ids_(byte_ids.begin(), byte_ids.end()), tokens_(256) {
  for (int b = 0; b < 256; ++b) tokens_[size_t(byte_ids_[size_t(b)])] = std::string(1, char(b));
}

void BpeMerger::add_word(std::string_view word, int64_t count) {
  SPS_CHECK(words_.size() < kFree && word.size() < kFree);
  words_.push_back({symbols_.size(), uint32_t(word.size()), count});
  for (const char c : word) symbols_.push_back(byte_ids_[static_cast<unsigned char>(c)]);
}

void BpeMerger::rehash() {
  table_.assign(std::max<size_t>(1024, 2 * table_.size()), kFree);
  const size_t mask = table_.size() - 1;
  for (uint32_t i = 0; i < pairs_.size(); ++i) {
    size_t at = mix(pairs_[i].left, pairs_[i].right) & mask;
    while (table_[at] != kFree) at = (at + 1) & mask;
    table_[at] = i;
  }
}

uint32_t BpeMerger::find_or_insert(int32_t left, int32_t right) {
  if (2 * pairs_.size() >= table_.size()) rehash();
  const size_t mask = table_.size() - 1;
  for (size_t at = mix(left, right) & mask;; at = (at + 1) & mask) {
    const uint32_t i = table_[at];
    if (i == kFree) {
      SPS_CHECK(pairs_.size() < kFree);
      pairs_.push_back({.left = left, .right = right, .words = {}});
      return table_[at] = uint32_t(pairs_.size() - 1);
    }
    if (pairs_[i].left == left && pairs_[i].right == right) return i;
  }
}

void BpeMerger::count_pairs() {
  // Words are made of bytes yet, so a square table finds their pairs; a first pass sizes the lists exactly.
  std::vector<uint32_t> square(256 * 256, kFree), words(256 * 256, 0), last(256 * 256, kFree);
  const auto for_each = [&](auto&& visit) {
    for (uint32_t w = 0; w < words_.size(); ++w)
      for (const int32_t *s = &symbols_[words_[w].begin], *end = s + words_[w].length; s + 1 < end; ++s)
        visit(w, size_t(s[0]) * 256 + size_t(s[1]));
  };
  for_each([&](uint32_t w, size_t cell) {
    if (last[cell] != w) ++words[cell], last[cell] = w;
  });
  for (size_t cell = 0; cell < square.size(); ++cell) {
    if (words[cell] == 0) continue;
    square[cell] = find_or_insert(int32_t(cell / 256), int32_t(cell % 256));
    pairs_[square[cell]].words.reserve(words[cell]);
  }
  for_each([&](uint32_t w, size_t cell) {
    Pair& pair = pairs_[square[cell]];
    pair.count += words_[w].count;
    if (pair.words.empty() || pair.words.back() != w) pair.words.push_back(w);
  });
}

void BpeMerger::offer(uint32_t i, const MergeLimits& limits) {
  const Pair& pair = pairs_[i];
  if (pair.count < limits.min_frequency) return;
  const size_t bytes = tokens_[size_t(pair.left)].size() + tokens_[size_t(pair.right)].size();
  if (int64_t(bytes) <= limits.max_token_bytes) heap_.push({pair.count, pair.left, pair.right, i});
}

void BpeMerger::join(uint32_t merged, int32_t result) {
  const int32_t a = pairs_[merged].left, b = pairs_[merged].right;
  const std::vector<uint32_t> words = std::exchange(pairs_[merged].words, {});
  touched_.clear();
  const auto gain = [&](int32_t left, int32_t right, uint32_t w) {
    const uint32_t i = find_or_insert(left, right);
    Pair& pair = pairs_[i];
    pair.count += words_[w].count;
    if (std::exchange(pair.gained, merges_.size()) != merges_.size()) touched_.push_back(i);
    if (pair.words.empty() || pair.words.back() != w) pair.words.push_back(w);
  };
  const auto lose = [&](int32_t left, int32_t right, uint32_t w) {
    pairs_[find_or_insert(left, right)].count -= words_[w].count;
  };
  for (const uint32_t w : words) {
    int32_t* const s = &symbols_[words_[w].begin];
    const size_t n = words_[w].length;
    size_t i = 0;
    while (i + 1 < n && !(s[i] == a && s[i + 1] == b)) ++i;
    if (i + 1 >= n) continue;
    size_t out = i;
    while (i < n) {
      if (i + 1 < n && s[i] == a && s[i + 1] == b) {
        if (out > 0) {
          lose(s[out - 1], a, w);
          gain(s[out - 1], result, w);
        }
        s[out++] = result;
        i += 2;
        if (i < n) {
          lose(b, s[i], w);
          gain(result, s[i], w);
        }
      } else {
        s[out++] = s[i++];
      }
    }
    words_[w].length = uint32_t(out);
  }
  pairs_[merged].count = 0;
}

void BpeMerger::run(const MergeLimits& limits, const std::function<void(int64_t)>& progress) {
  std::unordered_map<std::string, int32_t> ids;
  for (size_t i = 0; i < tokens_.size(); ++i) ids.emplace(tokens_[i], int32_t(i));
  count_pairs();
  for (uint32_t i = 0; i < pairs_.size(); ++i) offer(i, limits);
  while (int64_t(tokens_.size()) < limits.tokens && !heap_.empty()) {
    const Candidate best = heap_.top();
    heap_.pop();
    if (best.count != pairs_[best.pair].count) {
      offer(best.pair, limits);
      continue;
    }
    std::string token = tokens_[size_t(best.left)] + tokens_[size_t(best.right)];
    if (limits.never.contains(token)) continue;
    const auto [known, fresh] = ids.try_emplace(std::move(token), int32_t(tokens_.size()));
    if (fresh) tokens_.push_back(known->first);
    merges_.push_back({best.left, best.right, known->second});
    join(best.pair, known->second);
    for (const uint32_t pair : touched_) offer(pair, limits);
    if (progress && merges_.size() % 256 == 0) progress(int64_t(tokens_.size()));
  }
}

}  // namespace sps
