#include "tensor/graph.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "base/error.h"
#include "tensor/device.h"
#include "tensor/memory.h"

namespace sps {
namespace {

class StreamGraphTest : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

// Two copies in a chain: what the second one reads is what the first one has written in the same start.
TEST_F(StreamGraphTest, RunsWhenItIsStartedOnWhatIsThereThen) {
  const Exec ex = open_gpu();
  constexpr size_t kNumbers = 1000, kBytes = kNumbers * sizeof(int32_t);
  Bytes from(kBytes, Memory::pinned), a(kBytes, Memory::device), b(kBytes, Memory::device),
      to(kBytes, Memory::pinned);
  auto* in = reinterpret_cast<int32_t*>(from.data());
  const auto* out = reinterpret_cast<const int32_t*>(to.data());
  StreamGraph graph;
  EXPECT_FALSE(graph);
  std::iota(in, in + kNumbers, 1);
  graph.record(ex, [&] {
    copy_bytes(ex, a.data(), from.data(), kBytes);
    copy_bytes(ex, b.data(), a.data(), kBytes);
    copy_bytes(ex, to.data(), b.data(), kBytes);
  });
  synchronize(ex);
  EXPECT_TRUE(graph);
  EXPECT_EQ(out[0], 0);  // recorded, not run
  for (const int32_t first : {5, 17}) {
    std::iota(in, in + kNumbers, first);
    graph.start(ex);
    synchronize(ex);
    for (size_t i = 0; i < kNumbers; ++i) ASSERT_EQ(out[i], first + int32_t(i));
  }
}

TEST_F(StreamGraphTest, WhatIsThrownLeavesTheStreamAsItWas) {
  const Exec ex = open_gpu();
  Bytes a(64, Memory::device), b(64, Memory::device);
  StreamGraph graph;
  EXPECT_THROW(graph.record(ex,
                            [&] {
                              copy_bytes(ex, a.data(), b.data(), 64);
                              fail("half way");
                            }),
               Error);
  EXPECT_FALSE(graph);
  copy_bytes(ex, a.data(), b.data(), 64);
  EXPECT_NO_THROW(synchronize(ex));
  graph.record(ex, [&] { copy_bytes(ex, a.data(), b.data(), 64); });
  EXPECT_TRUE(graph);
}

// What is issued: the work of a new key, twice; then nothing, until scratch grows or others have come.
TEST_F(StreamGraphTest, KeysAreIssuedThenRecordedThenStarted) {
  const Exec ex = open_gpu();
  constexpr size_t kBytes = sizeof(int32_t);
  Bytes from(kBytes, Memory::pinned), there(kBytes, Memory::device), to(kBytes, Memory::pinned);
  auto* in = reinterpret_cast<int32_t*>(from.data());
  const auto* out = reinterpret_cast<const int32_t*>(to.data());
  StreamGraphs<int> graphs(2);
  int issued = 0, number = 0;
  const auto issues_of = [&](int key) {
    const int before = issued;
    *in = ++number;
    graphs.run(ex, key, [&] {
      ++issued;
      copy_bytes(ex, there.data(), from.data(), kBytes);
      copy_bytes(ex, to.data(), there.data(), kBytes);
    });
    synchronize(ex);
    EXPECT_EQ(*out, number);
    return issued - before;
  };
  EXPECT_EQ(issues_of(1), 1);
  EXPECT_EQ(issues_of(1), 1);
  EXPECT_EQ(issues_of(1), 0);
  EXPECT_EQ(issues_of(2), 1);
  EXPECT_EQ(issues_of(1), 0);
  EXPECT_EQ(issues_of(3), 1);  // 2 makes room
  EXPECT_EQ(issues_of(1), 0);
  EXPECT_EQ(issues_of(3), 1);
  EXPECT_EQ(issues_of(3), 0);
  EXPECT_EQ(issues_of(2), 1);  // 1 makes room
  device_scratch(ex, DeviceSlot::partial, device_scratch_bytes() + 1);
  EXPECT_EQ(issues_of(3), 1);
  EXPECT_EQ(issues_of(3), 0);
}

}  // namespace
}  // namespace sps
