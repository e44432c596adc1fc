#include "tensor/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "base/threads.h"

namespace sps {
namespace {

// One description, run against a planning and a real arena.
std::vector<Tensor> describe(Arena& arena) {
  std::vector<Tensor> t{arena.take(DType::f32, 3, 5), arena.take(DType::bf16, 7, 1)};
  {
    const Arena::Scope scope(arena);
    t.push_back(arena.take(DType::f64, 100, 3));
    {
      const Arena::Scope inner(arena);
      t.push_back(arena.take(DType::f32, 10, 10));
    }
    t.push_back(arena.take(DType::f32, 20, 10));
  }
  t.push_back(arena.take(DType::i32, 9, 9));
  return t;
}

TEST(Arena, PlanEqualsReality) {
  Arena plan;
  EXPECT_TRUE(plan.planning());
  const std::vector<Tensor> planned = describe(plan);
  Arena real(plan.peak(), Device::cpu);
  EXPECT_FALSE(real.planning());
  const std::vector<Tensor> taken = describe(real);
  EXPECT_EQ(real.used(), plan.used());
  EXPECT_EQ(real.peak(), plan.peak());
  ASSERT_EQ(planned.size(), taken.size());
  for (size_t i = 0; i < taken.size(); ++i) {
    EXPECT_EQ(planned[i].data, nullptr);
    EXPECT_NE(taken[i].data, nullptr);
    EXPECT_EQ(planned[i].rows, taken[i].rows);
    EXPECT_EQ(planned[i].cols, taken[i].cols);
    EXPECT_EQ(planned[i].dtype, taken[i].dtype);
    EXPECT_TRUE(taken[i].dense());
  }
}

TEST(Arena, TensorsAreAlignedAndApart) {
  Arena arena(4096, Device::cpu);
  const Tensor a = arena.take(DType::bf16, 1, 1), b = arena.take(DType::f32, 3, 7),
               c = arena.take(DType::f64, 1, 1);
  for (const Tensor& t : {a, b, c}) EXPECT_EQ(reinterpret_cast<uintptr_t>(t.data) % 64, 0u);
  EXPECT_EQ(static_cast<std::byte*>(b.data) - static_cast<std::byte*>(a.data), 256);
  EXPECT_EQ(static_cast<std::byte*>(c.data) - static_cast<std::byte*>(b.data), 256);
}

TEST(Arena, StartsZeroed) {
  Arena arena(1000, Device::cpu);
  const Tensor t = arena.take(DType::f32, 1, 192);
  for (int64_t i = 0; i < 192; ++i) EXPECT_EQ(t.as<float>()[i], 0);
}

TEST(Arena, ScopesShareMemoryAndThePeakRemembersTheLargest) {
  Arena arena(8192, Device::cpu);
  arena.take(DType::f32, 1, 16);
  void* first = nullptr;
  {
    const Arena::Scope scope(arena);
    first = arena.take(DType::f32, 1, 1024).data;
  }
  EXPECT_EQ(arena.used(), 256u);
  {
    const Arena::Scope scope(arena);
    EXPECT_EQ(arena.take(DType::f32, 1, 16).data, first);
  }
  EXPECT_EQ(arena.used(), 256u);
  EXPECT_EQ(arena.peak(), 256u + 4096u);
}

TEST(Arena, EmptyTensorsTakeNothing) {
  Arena arena(64, Device::cpu);
  EXPECT_TRUE(arena.take(DType::f32, 0, 100).empty());
  EXPECT_TRUE(arena.take(DType::f32, 100, 0).empty());
  EXPECT_EQ(arena.used(), 0u);
}

// Sizes are summed in 64 bits.
TEST(Arena, PlansBeyondFourGigabytes) {
  Arena plan;
  plan.take(DType::f32, int64_t{1} << 20, int64_t{1} << 14);
  EXPECT_EQ(plan.peak(), size_t{1} << 36);
}

TEST(Arena, MovesWithItsMemory) {
  Arena a(1024, Device::cpu);
  const Tensor t = a.take(DType::f32, 1, 16);
  t.as<float>()[3] = 7;
  const Arena b = std::move(a);
  EXPECT_EQ(b.used(), 256u);
  EXPECT_EQ(t.as<float>()[3], 7);
}

TEST(ArenaDeathTest, TakingMoreThanPlannedAborts) {
  Arena arena(512, Device::cpu);
  arena.take(DType::f32, 1, 65);
  EXPECT_DEATH(arena.take(DType::f32, 1, 1), "internal error");
  EXPECT_DEATH(Arena().take(DType::f32, -1, 1), "internal error");
}

TEST(ThreadScratch, GrowsOnceAndStays) {
  // A thread of its own, so that nothing has grown before.
  std::thread([] {
    const size_t growths = thread_scratch_growths(), bytes = thread_scratch_bytes();
    std::byte* p = thread_scratch(ScratchSlot::kernel, 1000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 64, 0u);
    std::memset(p, 1, 1000);
    EXPECT_EQ(thread_scratch(ScratchSlot::kernel, 500), p);
    EXPECT_EQ(thread_scratch(ScratchSlot::kernel, 1000), p);
    EXPECT_EQ(thread_scratch_growths(), growths + 1);
    EXPECT_EQ(thread_scratch_bytes(), bytes + 1024);

    std::byte* other = thread_scratch(ScratchSlot::gemm, 64);
    EXPECT_NE(other, p) << "slots are apart";
    thread_scratch(ScratchSlot::kernel, 5000);
    EXPECT_EQ(thread_scratch_growths(), growths + 3);
    EXPECT_EQ(thread_scratch_bytes(), bytes + 256 + 5120);
  }).join();
}

TEST(ThreadScratch, IsGivenBackWhenAThreadEnds) {
  const size_t bytes = thread_scratch_bytes();
  std::thread([&] {
    thread_scratch(ScratchSlot::kernel, 1 << 20);
    EXPECT_EQ(thread_scratch_bytes(), bytes + (1 << 20));
  }).join();
  EXPECT_EQ(thread_scratch_bytes(), bytes);
}

TEST(ThreadScratch, EachThreadHasItsOwn) {
  std::byte* mine = thread_scratch(ScratchSlot::kernel, 64);
  std::byte* theirs = nullptr;
  std::thread([&] { theirs = thread_scratch(ScratchSlot::kernel, 64); }).join();
  EXPECT_NE(mine, theirs);
}

}  // namespace
}  // namespace sps
