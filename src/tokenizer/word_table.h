// Different words and how often each was seen. One thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sps {

class WordTable {
 public:
  static constexpr int64_t kWordOverhead = 48;  // bytes a word takes beside its own, on the average

  void add(std::string_view word, uint64_t hash, int64_t count);  // `hash` of the word, the same each time
  void add(const WordTable& other);
  void clear();                    // keeps its memory
  void drop_up_to(int64_t count);  // removes the words seen at most `count` times

  size_t size() const { return size_; }
  int64_t bytes() const { return int64_t(letters_.size()) + kWordOverhead * int64_t(size_); }

  // Calls visit(word, count) for every word, in no particular order.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const Slot& slot : slots_)
      if (slot.count > 0) visit(word(slot), slot.count);
  }

 private:
  struct Slot {
    uint64_t hash = 0, begin = 0;  // begin: of the word in letters_
    uint64_t length = 0;
    int64_t count = 0;  // 0: no word
  };
  std::string_view word(const Slot& slot) const {
    return std::string_view(letters_).substr(slot.begin, slot.length);
  }
  void grow();

  std::vector<Slot> slots_;  // a power of two, open addressing, at most half full
  std::string letters_;
  size_t size_ = 0;
};

}  // namespace sps
