#include "base/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace sps {
namespace {

class Threads : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_thread_count(GetParam()); }
  void TearDown() override { set_thread_count(before_); }

 private:
  int before_ = thread_count();
};

TEST_P(Threads, CountIsWhatWasSet) {
  EXPECT_EQ(thread_count(), GetParam());
  EXPECT_EQ(thread_index(), 0);
}

TEST_P(Threads, EachIndexOnce) {
  for (const int64_t n : {0, 1, 2, 3, 1000}) {
    std::vector<std::atomic<int>> visits(size_t(n + 1));
    std::atomic<int> bad_index{0};
    parallel_for(n, [&](int64_t i) {
      ++visits[size_t(i)];
      if (thread_index() < 0 || thread_index() >= GetParam()) ++bad_index;
    });
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(visits[size_t(i)], 1) << i << " of " << n;
    EXPECT_EQ(visits[size_t(n)], 0);
    EXPECT_EQ(bad_index, 0);
  }
  parallel_for(-3, [](int64_t) { FAIL() << "no pieces"; });
}

TEST_P(Threads, NestedCallsRunOnTheCallingThread) {
  constexpr int64_t outer = 20, inner = 30;
  std::vector<std::atomic<int>> visits(outer * inner);
  std::atomic<int> moved{0};
  parallel_for(outer, [&](int64_t i) {
    const int thread = thread_index();
    parallel_for(inner, [&](int64_t j) {
      ++visits[size_t(i * inner + j)];
      if (thread_index() != thread) ++moved;
    });
  });
  for (const auto& v : visits) EXPECT_EQ(v, 1);
  EXPECT_EQ(moved, 0);
}

TEST_P(Threads, ChunksTileTheRange) {
  for (const int64_t n : {0, 1, 7, 8, 9, 100})
    for (const int64_t size : {1, 8, 200}) {
      std::vector<std::atomic<int>> visits(size_t(n) + 1);
      std::atomic<int> bad{0};
      parallel_chunks(n, size, [&](int64_t begin, int64_t end) {
        // Borders depend on n and size alone.
        if (begin % size != 0 || begin >= end || (end != n && end != begin + size)) ++bad;
        for (int64_t i = begin; i < end; ++i) ++visits[size_t(i)];
      });
      EXPECT_EQ(bad, 0);
      for (int64_t i = 0; i < n; ++i) EXPECT_EQ(visits[size_t(i)], 1) << i << " of " << n << " by " << size;
    }
}

INSTANTIATE_TEST_SUITE_P(Counts, Threads, testing::Values(1, 2, 5));

}  // namespace
}  // namespace sps
