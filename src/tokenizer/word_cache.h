// A thread's memory of words and their ids. One slot per hash value, so it never grows; a new word takes the
// place of an old one. All tokenizers of the process share it: a slot says whose word it holds.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace sps {

class WordCache {
 public:
  static constexpr size_t kMaxWord = 24, kMaxIds = 8;  // longer words are not remembered

  // A word padded to its full length with zeros.
  struct Key {
    uint64_t words[3];
    uint32_t length;
    uint64_t hash;
  };
  // `readable`: bytes that may be read from word.data() on, at least its length. 1 <= length <= kMaxWord.
  static Key key(std::string_view word, size_t readable) {
    Key key{{}, uint32_t(word.size()), 0};
    if (readable >= kMaxWord) {
      std::memcpy(key.words, word.data(), kMaxWord);
      for (size_t i = 0; i < 3; ++i) key.words[i] &= kMasks[word.size()][i];
    } else {
      std::memcpy(key.words, word.data(), word.size());
    }
    uint64_t hash = key.words[0] * 0x9E3779B97F4A7C15u;
    hash ^= (key.words[1] + word.size()) * 0xC2B2AE3D27D4EB4Fu;
    hash ^= key.words[2] * 0x165667B19E3779F9u;
    key.hash = (hash ^ hash >> 32) * 0xD6E8FEB86659FD93u;
    return key;
  }

  struct alignas(64) Slot {
    uint64_t words[3] = {};
    uint32_t owner = 0;  // 0: free
    uint16_t length = 0, count = 0;
    int32_t ids[kMaxIds] = {};
  };
  static_assert(sizeof(Slot) == 64);

  static WordCache& of_this_thread() {
    static thread_local WordCache cache;
    return cache;
  }

  void prefetch(const Key& key) const { __builtin_prefetch(&slots_[place(key)]); }
  // Null if the word is not there. `owner` > 0 says whose words are meant.
  const Slot* find(const Key& key, uint32_t owner) const {
    const Slot* pair = &slots_[place(key)];
    for (const Slot* slot = pair; slot != pair + 2; ++slot)
      if (((slot->words[0] ^ key.words[0]) | (slot->words[1] ^ key.words[1]) |
           (slot->words[2] ^ key.words[2])) == 0 &&
          slot->owner == owner && slot->length == key.length)
        return slot;
    return nullptr;
  }
  // At most kMaxIds.
  void put(const Key& key, uint32_t owner, std::span<const int32_t> ids) {
    Slot* slot = &slots_[place(key)];
    slot[1] = slot[0];
    std::memcpy(slot->words, key.words, sizeof key.words);
    slot->owner = owner;
    slot->length = uint16_t(key.length);
    slot->count = uint16_t(ids.size());
    std::memcpy(slot->ids, ids.data(), ids.size_bytes());
  }

 private:
  static size_t place(const Key& key) { return key.hash >> (64 - kBits) & ~size_t{1}; }
  static constexpr int kBits = 16;
  static constexpr auto kMasks = [] {
    std::array<std::array<uint64_t, 3>, kMaxWord + 1> masks{};
    for (size_t length = 0; length <= kMaxWord; ++length)
      for (size_t i = 0; i < 3; ++i) {
        const size_t bytes = length > 8 * i ? length - 8 * i : 0;
        masks[length][i] = bytes >= 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * bytes)) - 1;
      }
    return masks;
  }();
  std::vector<Slot> slots_ = std::vector<Slot>(size_t{1} << kBits);
};

}  // namespace sps
