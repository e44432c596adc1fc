#include "infer/page_pool.h"

#include <numeric>

#include "base/check.h"

namespace sps {

PagePool::PagePool(int64_t pages) : pages_(size_t(pages)), free_(size_t(pages)) {
  std::iota(free_.rbegin(), free_.rend(), 0);
}

int32_t PagePool::take() {
  SPS_CHECK(available() > 0);
  int32_t page = 0;
  if (!free_.empty()) {
    page = free_.back();
    free_.pop_back();
  } else {
    page = idle_.begin()->second;
    idle_.erase(idle_.begin());
    contents_.erase(pages_[size_t(page)].contents);
  }
  pages_[size_t(page)] = {};
  pages_[size_t(page)].owners = 1;
  return page;
}

void PagePool::give_back(int32_t page) {
  Page& p = pages_[size_t(page)];
  SPS_CHECK(p.owners > 0);
  if (--p.owners > 0) return;
  if (p.prefix == kStart) {
    free_.push_back(page);
    return;
  }
  p.released = ++clock_;
  idle_.emplace(p.released, page);
}

PagePool::Prefix PagePool::remember(int32_t page, Prefix before, std::span<const int32_t> ids) {
  Page& p = pages_[size_t(page)];
  SPS_CHECK(p.owners > 0 && p.prefix == kStart);
  const auto [at, fresh] = contents_.try_emplace({before, {ids.begin(), ids.end()}}, page);
  if (!fresh) return pages_[size_t(at->second)].prefix;  // another page has the same keys
  p.contents = at;
  return p.prefix = ++last_prefix_;
}

PagePool::Found PagePool::find(Prefix before, std::span<const int32_t> ids) {
  const auto at = contents_.find({before, {ids.begin(), ids.end()}});
  if (at == contents_.end()) return {};
  Page& p = pages_[size_t(at->second)];
  if (p.owners++ == 0) idle_.erase({p.released, at->second});
  return {at->second, p.prefix};
}

}  // namespace sps
