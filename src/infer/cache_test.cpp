#include "infer/cache.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "model/test_models.h"
#include "model/test_variants.h"

namespace sps {
namespace {

CacheSize size_of(const std::string& settings) {
  return cache_size(make_plan(config_for("s", settings)), DType::bf16);
}

// Two-tower spec, 1.9: K/V of a token in KiB, at twelve layers of width 768 in bf16.
TEST(CacheSize, BytesPerTokenAreThePapers) {
  const std::pair<const char*, int64_t> table[] = {
      {"family=standard", 36},
      {"family=sps window=64", 36},
      {"family=two_tower", 72},
      {"family=sequential", 72},
      {"family=two_tower layers=6", 36},
      {"family=sequential state_layers=3 pred_layers=9", 36},
      {"family=sequential state_layers=9 pred_layers=3", 36},
      {"family=two_tower pred_layers=6", 54},
      {"family=free_pause", 36},
      {"family=free_pause read.level=final", 39},
      {"family=free_pause ffn=pooled", 36},
      {"family=delayed_state window=64", 36},
      {"family=reverse_sps window=64", 36},
      {"family=sps window=full", 72},
  };
  for (const auto& [settings, kib] : table)
    EXPECT_EQ(size_of(settings).bytes_per_position, kib * 1024) << settings;
  EXPECT_EQ(size_of("family=sps window=64").bytes_per_sequence, 12 * 64 * 3072);  // 2.25 MiB
}

// First paper: 1.016 and 1.000 of the standard model's memory at 4096 tokens.
TEST(CacheSize, MemoryAgainstStandard) {
  const double standard = double(size_of("family=standard").bytes(4096));
  EXPECT_EQ(fmt::format("{:.3f}", double(size_of("family=sps window=64").bytes(4096)) / standard), "1.016");
  EXPECT_EQ(fmt::format("{:.3f}", double(size_of("family=free_pause").bytes(4096)) / standard), "1.000");
  // What is taken for one text of 4096 positions.
  const auto taken = [](const std::string& settings) {
    const KeyCaches caches(make_plan(config_for("s", settings)), DType::bf16, Device::cpu,
                           {.slots = 1, .pages = 64, .page = 64});
    return double(caches.paged_bytes() + caches.ring_bytes());
  };
  EXPECT_EQ(taken("family=standard"), standard);
  EXPECT_EQ(fmt::format("{:.3f}", taken("family=sps window=64") / standard), "1.016");
  EXPECT_EQ(fmt::format("{:.3f}", taken("family=free_pause") / standard), "1.000");
  EXPECT_EQ(size_of("family=free_pause").bytes_per_sequence, 0);
  EXPECT_EQ(size_of("family=sps window=0").bytes_per_sequence, 0);
}

TEST(KeyPairs, SlidingWindowBlocksKeepTheirWindow) {
  const Plan plan = make_plan(config_for("s", "family=standard sliding_window=512 full_attention_every=4"));
  const auto pairs = key_pairs(plan);
  ASSERT_EQ(pairs.size(), 12u);
  for (size_t j = 0; j < 12; ++j) {
    const bool full = j % 4 == 3;
    EXPECT_EQ(pairs[j].horizon.kind, full ? Horizon::persistent : Horizon::ring);
    EXPECT_EQ(pairs[j].horizon.steps, full ? 0 : 511);
  }
  // A window as long as the context is no ring.
  const Plan wide = make_plan(config_for("s", "family=standard sliding_window=4096"));
  EXPECT_EQ(cache_size(wide, DType::bf16).bytes_per_position, 36 * 1024);
  EXPECT_EQ(cache_size(wide, DType::bf16).bytes_per_sequence, 0);
}

// What a pair keeps is at least what any reader looks back to, and the memory is what the plan says.
TEST(KeyPairs, EveryTestModel) {
  for (const TestModel& m : test_models()) {
    const ModelConfig c = resolve(m.keys);
    const Plan plan = make_plan(c);
    const KeyCaches caches(plan, DType::f32, Device::cpu, {3, 5, 4});
    const CacheSize size = cache_size(plan, DType::f32);
    EXPECT_EQ(int64_t(caches.paged_bytes()), 5 * 4 * size.bytes_per_position) << m.name;
    EXPECT_EQ(int64_t(caches.ring_bytes()), 3 * size.bytes_per_sequence) << m.name;
    for (int64_t j = 0; j < c.state.layers; ++j)
      EXPECT_EQ(caches.find(KeyPair::state, j) >= 0, plan.state[size_t(j)] != Need::none) << m.name;
    int64_t further = 0;
    for (const KeyPair& pair : caches.pairs())
      further += pair.source == KeyPair::reader || pair.source == KeyPair::read_head;
    EXPECT_EQ(further, plan.read_pairs) << m.name;
  }
}

TEST(NeededPredRows, FollowFromWhatIsKept) {
  const auto rows = [](const std::string& settings) {
    return needed_pred_rows(make_plan(config_for("s", settings)));
  };
  EXPECT_EQ(rows("family=standard"), 0);
  EXPECT_EQ(rows("family=free_pause"), 1);
  EXPECT_EQ(rows("family=two_tower"), 1);
  EXPECT_EQ(rows("family=sps window=0"), 1);
  EXPECT_EQ(rows("family=free_pause window=2"), 25);
  EXPECT_EQ(rows("family=sps window=64"), INT64_MAX);
  EXPECT_EQ(rows("family=free_pause ffn=pooled"), INT64_MAX);
}

}  // namespace
}  // namespace sps
