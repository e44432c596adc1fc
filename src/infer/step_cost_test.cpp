#include "infer/step_cost.h"

#include <gtest/gtest.h>

#include <array>

#include "infer/test_decoder.h"
#include "model/test_models.h"

namespace sps {
namespace {

// Width 16, two heads of 8, FFN 24, vocabulary 29, two blocks: in numbers, a block's queries have 256, its
// keys and values 512, its output 256, its FFN 3 * 24 * 16 = 1152; a norm has 16, the head 464.
constexpr double kQ = 256, kKv = 512, kOut = 256, kFfn = 1152, kNorm = 16, kHead = 464, kRow = 16;
constexpr double kBlock = kQ + kKv + kOut + kFfn;

Plan plan_of(const std::string& name) {
  for (const TestModel& m : test_models())
    if (m.name == name) return make_plan(resolve(m.keys));
  ADD_FAILURE() << name;
  return {};
}

StepBytes bytes_of(const std::string& name, DType dtype, const std::vector<int64_t>& positions) {
  return StepTraffic(plan_of(name), dtype).of(positions);
}

TEST(StepTraffic, StandardByHand) {
  const StepBytes f32 = bytes_of("standard", DType::f32, {0});
  EXPECT_EQ(f32.weights, 4 * (2 * kBlock + 5 * kNorm + kHead + kRow));
  EXPECT_EQ(f32.keys, 2 * 32 * 4);  // written, both blocks: a key and a value of 16 numbers each
  EXPECT_EQ(f32.logits, 2 * 29 * 4);
  // Three texts in bf16: products and caches take half, norms and embedding rows do not; the weights are read
  // once.
  const StepBytes bf16 = bytes_of("standard", DType::bf16, {3, 10, 0});
  EXPECT_EQ(bf16.weights, 2 * (2 * kBlock + kHead) + 4 * (5 * kNorm + 3 * kRow));
  EXPECT_EQ(bf16.keys, 2 * 32 * 2 * (3 + 13));
  EXPECT_EQ(bf16.logits, 3 * 2 * 29 * 4);
  EXPECT_EQ(bf16.total(), bf16.weights + bf16.keys + bf16.logits);
}

// A byte for each weight of a product and two for each 64 of a row, or what is left of it.
TEST(StepTraffic, WeightsIn8BitsByHand) {
  const Plan narrow = plan_of("standard");
  const StepBytes bytes = StepTraffic(narrow, DType::bf16, true).of(std::vector<int64_t>{3, 10, 0});
  const double block = 48 * 18 + 16 * 18 + 48 * 18 + 16 * 26;  // queries, keys and values; output; FFN
  EXPECT_EQ(bytes.weights, 2 * block + 29 * 18 + 4 * (5 * kNorm + 3 * kRow));
  const StepBytes bf16 = bytes_of("standard", DType::bf16, {3, 10, 0});
  EXPECT_EQ(bytes.keys, bf16.keys);
  EXPECT_EQ(bytes.logits, bf16.logits);

  ModelKeys keys = test_models().front().keys;
  keys.d_model = 80;
  const StepBytes wide = StepTraffic(make_plan(resolve(keys)), DType::bf16, true).of(std::vector<int64_t>{0});
  EXPECT_EQ(wide.weights, 2 * ((240 + 80 + 48) * 84 + 80 * 26) + 29 * 84 + 4 * 6 * 80);
}

// sps(2): the predictions share every weight, the last state block makes keys and values alone, and every
// block keeps a ring of two predictions.
TEST(StepTraffic, SpsByHand) {
  for (const int64_t before : {0, 1, 7}) {
    const StepBytes b = bytes_of("sps_w2", DType::f32, {before});
    EXPECT_EQ(b.weights, 4 * (2 * kBlock + 5 * kNorm + kHead + 2 * kRow));
    EXPECT_EQ(b.keys, 2 * 32 * 4 * double(2 + before + std::min<int64_t>(before, 2)));
  }
}

// Neither keys nor weights beside the standard model's but the start vector.
TEST(StepTraffic, FreePauseByHand) {
  const StepBytes pause = bytes_of("free_pause", DType::bf16, {9, 9}),
                  standard = bytes_of("standard", DType::bf16, {9, 9});
  EXPECT_EQ(pause.weights, standard.weights + 4 * kRow);
  EXPECT_EQ(pause.keys, standard.keys);
  EXPECT_EQ(pause.logits, standard.logits);
}

// Towers of two blocks each: the prediction blocks have queries of their own, and keys and values projected
// from the finished state; their embeddings come from a table of their own.
TEST(StepTraffic, SequentialByHand) {
  const StepBytes b = bytes_of("sequential", DType::f32, {4});
  EXPECT_EQ(b.weights, 4 * (4 * kBlock + (4 + 4 + 2 + 1) * kNorm + kHead + 2 * kRow));
  EXPECT_EQ(b.keys, 4 * 32 * 4 * (1 + 4));
}

// The cache's own figures: what a text keeps is what a later step reads, where everything is read once.
TEST(StepTraffic, KeysAreTheCaches) {
  for (const TestModel& m : test_models()) {
    const ModelConfig config = resolve(m.keys);
    const Plan plan = make_plan(config);
    const CacheSize size = cache_size(plan, DType::bf16);
    const std::array<int64_t, 1> none{0}, some{9};
    const StepTraffic traffic(plan, DType::bf16);
    const double read = traffic.of(some).keys - traffic.of(none).keys;
    // A block that reads the level of another reads its keys once more.
    EXPECT_GE(read, double(9 * size.bytes_per_position)) << m.name;
  }
}

TEST(PrefillFlops, StandardByHand) {
  const Flops f = decoder_prefill_flops(plan_of("standard"), 5);
  EXPECT_EQ(f.qkv, 2 * 2 * 5 * (kQ + kKv));
  EXPECT_EQ(f.out, 2 * 2 * 5 * kOut);
  EXPECT_EQ(f.ffn, 2 * 2 * 5 * kFfn);
  EXPECT_EQ(f.scores, 2 * 2 * 16 * 15);  // 15 pairs
  EXPECT_EQ(f.weighted, f.scores);
  EXPECT_EQ(f.softmax, 2 * 3 * 2 * 15);
  EXPECT_EQ(f.head, 2 * kHead);
}

// The prediction row of the last position alone; the last state block makes keys and values only.
TEST(PrefillFlops, FreePauseByHand) {
  const Flops f = decoder_prefill_flops(plan_of("free_pause"), 5);
  EXPECT_EQ(f.qkv, 2 * (5 * (2 * kKv + kQ) + 2 * kQ));
  EXPECT_EQ(f.out, 2 * (5 + 2) * kOut);
  EXPECT_EQ(f.ffn, 2 * (5 + 2) * kFfn);
  EXPECT_EQ(f.scores, 2 * 16 * (15 + 2 * 5));
}

// sps(2) runs every position of both streams: states see two predictions back, predictions their own as well.
TEST(PrefillFlops, SpsByHand) {
  const Flops f = decoder_prefill_flops(plan_of("sps_w2"), 5);
  EXPECT_EQ(f.qkv, 2 * 5 * (kQ + 2 * kKv + 2 * (kQ + kKv)));
  EXPECT_EQ(f.ffn, 2 * 5 * 3 * kFfn);
  EXPECT_EQ(f.scores, 2 * 16 * ((15 + 7) + 2 * (15 + 12)));
}

TEST(PrefillFlops, SequentialByHand) {
  const Flops f = decoder_prefill_flops(plan_of("sequential"), 5);
  EXPECT_EQ(f.qkv, 2 * (2 * 5 * (kQ + kKv) + 2 * kQ));
  EXPECT_EQ(f.read, 2 * 2 * 5 * kKv);
  EXPECT_EQ(f.ffn, 2 * (2 * 5 + 2) * kFfn);
  EXPECT_EQ(f.scores, 2 * 16 * (2 * 15 + 2 * 5));
}

// Where every row is needed, reading a prompt is the dense pass but for its logits and the rows that are all
// equal.
TEST(PrefillFlops, AgreeWithTheDensePass) {
  for (const char* name : {"standard", "sps_token", "sps_table", "free_pause_pooled_token"}) {
    const Plan plan = plan_of(name);
    const Flops prefill = decoder_prefill_flops(plan, 8), dense = flops_executed(plan, 8);
    EXPECT_DOUBLE_EQ(prefill.total() - prefill.head, 8 * (dense.total() - dense.head)) << name;
    EXPECT_DOUBLE_EQ(prefill.head, dense.head) << name;
    EXPECT_DOUBLE_EQ(prefill.state, 8 * dense.state) << name;
  }
}

// Two-tower spec: half the blocks, and the keys and values of the other half.
TEST(PrefillFlops, ASequentialPrefillIsLittleMoreThanHalf) {
  ModelKeys keys;
  keys.layers = 12;
  const double standard = decoder_prefill_flops(make_plan(resolve(keys)), 1024).total();
  keys.family = "sequential", keys.state_layers = keys.pred_layers = 6;
  const double sequential = decoder_prefill_flops(make_plan(resolve(keys)), 1024).total();
  EXPECT_GT(sequential, 0.5 * standard);
  EXPECT_LT(sequential, 0.6 * standard);
}

}  // namespace
}  // namespace sps
