#include "tokenizer/word_table.h"

#include <algorithm>
#include <utility>

namespace sps {

void WordTable::add(std::string_view word, uint64_t hash, int64_t count) {
  if (2 * size_ >= slots_.size()) grow();
  const size_t mask = slots_.size() - 1;
  for (size_t at = hash & mask;; at = (at + 1) & mask) {
    Slot& slot = slots_[at];
    if (slot.count == 0) {
      slot = {hash, letters_.size(), word.size(), count};
      letters_ += word;
      ++size_;
      return;
    }
    if (slot.hash == hash && this->word(slot) == word) {
      slot.count += count;
      return;
    }
  }
}

void WordTable::add(const WordTable& other) {
  for (const Slot& slot : other.slots_)
    if (slot.count > 0) add(other.word(slot), slot.hash, slot.count);
}

void WordTable::clear() {
  if (size_ > 0) std::fill(slots_.begin(), slots_.end(), Slot{});
  letters_.clear();
  size_ = 0;
}

void WordTable::drop_up_to(int64_t count) {
  const WordTable old = std::exchange(*this, WordTable{});
  for (const Slot& slot : old.slots_)
    if (slot.count > count) add(old.word(slot), slot.hash, slot.count);
}

void WordTable::grow() {
  const std::vector<Slot> old =
      std::exchange(slots_, std::vector<Slot>(std::max<size_t>(64, 2 * slots_.size())));
  const size_t mask = slots_.size() - 1;
  for (const Slot& slot : old) {
    if (slot.count == 0) continue;
    size_t at = slot.hash & mask;
    while (slots_[at].count > 0) at = (at + 1) & mask;
    slots_[at] = slot;
  }
}

}  // namespace sps
