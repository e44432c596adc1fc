// Who owns which page of cache memory, and which pages hold the beginning of a text that may come again. Keys
// of a page depend on all ids up to its end, so a page is remembered under its ids and the page before it,
// compared in full. Memory that nobody owns is taken first, then what is only remembered, what was used
// longest ago before the rest.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace sps {

class PagePool {
 public:
  explicit PagePool(int64_t pages);

  // Stands for a text up to the end of a page; kStart for the empty one. Never given to another text.
  using Prefix = int64_t;
  static constexpr Prefix kStart = 0;

  int64_t available() const { return int64_t(free_.size() + idle_.size()); }
  int32_t take();                // a page of its own; there must be one
  void give_back(int32_t page);  // one owner less

  // The full page holds these ids, behind `before`. Returns the prefix that ends here.
  Prefix remember(int32_t page, Prefix before, std::span<const int32_t> ids);
  // A page that holds these ids behind `before`, with one owner more; page -1 if there is none.
  struct Found {
    int32_t page = -1;
    Prefix prefix = kStart;
  };
  Found find(Prefix before, std::span<const int32_t> ids);

 private:
  using Contents = std::map<std::pair<Prefix, std::vector<int32_t>>, int32_t>;  // to the page
  struct Page {
    int64_t owners = 0, released = 0;
    Prefix prefix = kStart;  // kStart: not remembered
    Contents::iterator contents;
  };
  std::vector<Page> pages_;
  std::vector<int32_t> free_;                   // the next to be taken last
  std::set<std::pair<int64_t, int32_t>> idle_;  // remembered without an owner, by time of release
  Contents contents_;
  int64_t clock_ = 0;
  Prefix last_prefix_ = kStart;
};

}  // namespace sps
