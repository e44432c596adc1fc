#include "infer/page_pool.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace sps {
namespace {

using Ids = std::vector<int32_t>;

TEST(PagePool, PagesAreTakenAndGivenBack) {
  PagePool pool(3);
  std::set<int32_t> taken;
  for (int i = 0; i < 3; ++i) taken.insert(pool.take());
  EXPECT_EQ(taken, (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(pool.available(), 0);
  pool.give_back(1);
  EXPECT_EQ(pool.available(), 1);
  EXPECT_EQ(pool.take(), 1);
}

TEST(PagePool, APageIsFoundBehindTheSameText) {
  PagePool pool(4);
  const int32_t a = pool.take(), b = pool.take();
  const auto one = pool.remember(a, PagePool::kStart, Ids{1, 2});
  const auto two = pool.remember(b, one, Ids{3, 4});
  EXPECT_EQ(pool.find(PagePool::kStart, Ids{3, 4}).page, -1);
  EXPECT_EQ(pool.find(one, Ids{3, 5}).page, -1);
  EXPECT_EQ(pool.find(two, Ids{3, 4}).page, -1);
  const auto found = pool.find(one, Ids{3, 4});
  EXPECT_EQ(found.page, b);
  EXPECT_EQ(found.prefix, two);
  // Two owners: it is free after the second.
  pool.give_back(b);
  EXPECT_EQ(pool.available(), 2);
  pool.give_back(b);
  EXPECT_EQ(pool.available(), 3);
  EXPECT_EQ(pool.find(one, Ids{3, 4}).page, b);  // and remembered still
  EXPECT_EQ(pool.available(), 2);
  // The same text in another page: the prefix is the same, the page is its owner's alone.
  const int32_t c = pool.take();
  EXPECT_EQ(pool.remember(c, PagePool::kStart, Ids{1, 2}), one);
  pool.give_back(c);
  EXPECT_EQ(pool.find(PagePool::kStart, Ids{1, 2}).page, a);
}

TEST(PagePool, WhatWasUsedLongestAgoIsForgottenFirst) {
  PagePool pool(3);
  for (const int32_t id : {7, 8, 9}) {
    const int32_t page = pool.take();
    pool.remember(page, PagePool::kStart, Ids{id});
    pool.give_back(page);
    if (id == 8) pool.give_back(pool.find(PagePool::kStart, Ids{7}).page);  // used again
  }
  EXPECT_EQ(pool.available(), 3);
  pool.take();
  EXPECT_EQ(pool.find(PagePool::kStart, Ids{8}).page, -1);
  EXPECT_NE(pool.find(PagePool::kStart, Ids{7}).page, -1);
  pool.take();  // 7 has an owner
  EXPECT_EQ(pool.find(PagePool::kStart, Ids{9}).page, -1);
  EXPECT_EQ(pool.available(), 0);
}

// Random use against a list of owners: no page has two texts, and the count is right.
TEST(PagePool, RandomUse) {
  PagePool pool(8);
  const Rng rng(1, "pages");
  std::multiset<int32_t> owned;
  std::map<int32_t, int32_t> text;  // the id that an owned page holds
  for (uint64_t n = 0; n < 4000; ++n) {
    const auto choice = rng.below(3 * n, 3);
    const auto id = int32_t(rng.below(3 * n + 1, 12));
    if (choice == 0 && pool.available() > 0) {
      const int32_t page = pool.take();
      EXPECT_EQ(owned.count(page), 0u);
      owned.insert(page);
      text[page] = id;
      pool.remember(page, PagePool::kStart, Ids{id});
    } else if (choice == 1) {
      const auto found = pool.find(PagePool::kStart, Ids{id});
      if (found.page < 0) continue;
      EXPECT_EQ(text.at(found.page), id);
      owned.insert(found.page);
    } else if (!owned.empty()) {
      const auto at = std::next(owned.begin(), std::ptrdiff_t(rng.below(3 * n + 2, owned.size())));
      pool.give_back(*at);
      owned.erase(at);
    }
    EXPECT_EQ(pool.available(), 8 - int64_t(std::set<int32_t>(owned.begin(), owned.end()).size()));
  }
}

}  // namespace
}  // namespace sps
