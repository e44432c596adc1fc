#include "infer/int8_weights.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/test_dir.h"
#include "infer/test_decoder.h"
#include "model/test_models.h"

namespace sps {
namespace {

// Matrices move by half a step of 1/127 of their group's largest number at the most, everything else stays; a
// second time changes nothing.
TEST(Int8Weights, OnlyWhatProductsReadMoves) {
  for (const TestModel& m : test_models()) {
    const auto before = dense_model(resolve(m.keys), DType::bf16),
               after = dense_model(resolve(m.keys), DType::bf16);
    const ModelParameters& p = after->parameters();
    const Int8Weights weights(p, after->store());
    const uint64_t once = after->store().hash();
    for (size_t i = 0; i < p.list.size(); ++i) {
      const Tensor was = before->store().weight(int(i)), is = after->store().weight(int(i)),
                   rounded = after->store().rounded(int(i));
      double moved = 0, largest = 0;
      for (int64_t n = 0; n < was.count(); ++n) {
        const double a = was.as<float>()[n], b = is.as<float>()[n];
        moved = std::max(moved, std::abs(a - b)), largest = std::max(largest, std::abs(a));
        EXPECT_EQ(float(rounded.as<bf16>()[n]), float(bf16(float(b)))) << p.list[i].name;
      }
      const bool table = p.list[i].embedding && int(i) != p.head;
      const bool stays = p.list[i].rows() == 1 || table;
      EXPECT_EQ(moved == 0, stays) << m.name << " " << p.list[i].name;
      EXPECT_LE(moved, largest * (0.5 / 127 + 0x1p-8)) << m.name << " " << p.list[i].name;
    }
    const Int8Weights again(p, after->store());
    EXPECT_EQ(after->store().hash(), once) << m.name;
  }
}

// Width 16, FFN 24, vocabulary 29, two blocks; every list of values and of scales in whole lines of 64 bytes.
TEST(Int8Weights, BytesByHand) {
  const auto model = dense_model(resolve(test_models().front().keys), DType::bf16);
  const Int8Weights weights(model->parameters(), model->store());
  const size_t qkv = 768 + 128, out = 256 + 64, gate_up = 768 + 128, down = 384 + 64, head = 512 + 64;
  EXPECT_EQ(weights.bytes(), 2 * (qkv + out + gate_up + down) + head);
}

TEST(Int8WeightsDeathTest, OfATensorThatNoProductReads) {
  const auto model = dense_model(resolve(test_models().front().keys), DType::bf16);
  const Int8Weights weights(model->parameters(), model->store());
  EXPECT_EQ(weights.of(model->parameters().state[1].down).cols, 24);
  EXPECT_DEATH(weights.of(model->parameters().final_norm), "matrix.values");
}

TEST(Int8Weights, WhereTheyServe) {
  EXPECT_NO_THROW(check_int8_serves("--weights int8", DType::bf16, Device::cpu));
  for (const DType dtype : {DType::f32, DType::f64})
    EXPECT_PRED2(mentions, error_of([&] { check_int8_serves("--weights int8", dtype, Device::cpu); }),
                 fmt::format("in bf16 alone, not in {}: expected --dtype bf16", dtype_name(dtype)));
  EXPECT_PRED2(mentions, error_of([&] { check_int8_serves("--weights int8", DType::bf16, Device::cuda); }),
               "on the CPU alone, expected --device cpu");
}

}  // namespace
}  // namespace sps
