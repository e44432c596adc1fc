#include "tokenizer/long_word.h"

#include <algorithm>

#include "base/error.h"

namespace sps {

namespace {

// Where the tokens of a word end, in order; the end of the last one is the last that was added.
class Borders {
 public:
  explicit Borders(size_t bytes) : ends_(bytes + 1) {}

  void add(size_t end) { ends_[end] = true; }
  // Takes `count` tokens away from the end, or all there are; `end` is the last border and becomes the new
  // one.
  void take_back(size_t count, size_t& end) {
    for (; count > 0 && end > 0; --count) {
      ends_[end] = false;
      end = before(end);
    }
  }
  size_t before(size_t end) const {
    do --end;
    while (end > 0 && !ends_[end]);
    return end;
  }
  size_t after(size_t end) const {
    do ++end;
    while (!ends_[end]);
    return end;
  }

 private:
  std::vector<bool> ends_;
};

}  // namespace

void LongWordMerger::merge_window(std::string_view bytes, std::vector<int32_t>& ids) const {
  if (bytes.size() > MergeTable::kMaxSymbols)
    fail("a text has a word whose tokens depend on more than {} bytes around them", MergeTable::kMaxSymbols);
  ids.resize(bytes.size());
  std::transform(bytes.begin(), bytes.end(), ids.begin(),
                 [&](char c) { return byte_ids_[static_cast<unsigned char>(c)]; });
  ids.resize(merges_.apply(ids).count);
}

bool LongWordMerger::are_neighbours(std::string_view left, std::string_view right) const {
  std::vector<int32_t> ids;
  merge_window(std::string(left).append(right), ids);
  return ids.size() == 2 && ids[0] == index_.find(left) && ids[1] == index_.find(right);
}

void LongWordMerger::merge(std::string_view word,
                           const std::function<void(std::span<const int32_t>)>& take) const {
  Borders borders(word.size());
  std::vector<int32_t> ids;
  size_t window = window_, back = back_;
  for (size_t begin = 0; begin < word.size();) {
    const size_t end = begin + std::min(window, word.size() - begin);
    merge_window(word.substr(begin, end - begin), ids);
    const auto text = [&](size_t at, int32_t id) { return word.substr(at, index_.bytes(id).size()); };
    if (begin > 0) {
      const size_t before = borders.before(begin);
      if (!are_neighbours(word.substr(before, begin - before), text(begin, ids[0]))) {
        borders.take_back(back, begin);
        back *= 2;
        window *= 2;
        continue;
      }
    }
    size_t kept = ids.size();
    if (end < word.size()) kept -= std::min(back_, (kept + 1) / 2);
    if (kept == 0) window *= 2;  // a token as long as the window
    for (size_t i = 0; i < kept; ++i) borders.add(begin += index_.bytes(ids[i]).size());
  }
  ids.clear();
  for (size_t begin = 0; begin < word.size();) {
    const size_t end = borders.after(begin);
    ids.push_back(index_.find(word.substr(begin, end - begin)));
    begin = end;
    if (ids.size() < window_ && begin < word.size()) continue;
    take(ids);
    ids.clear();
  }
}

}  // namespace sps
