#include "infer/int8_weights.h"

#include <gtest/gtest.h>

#include <cmath>

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
    round_to_int8(p, after->store());
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
    round_to_int8(p, after->store());
    EXPECT_EQ(after->store().hash(), once) << m.name;
  }
}

}  // namespace
}  // namespace sps
