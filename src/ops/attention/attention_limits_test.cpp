// Lists that point outside.
#include "ops/attention/attention_case.h"

namespace sps::ops {

namespace {

// A document begins at or before its row, and goes on to the next document's first row: nothing else is read.
TEST(AttentionLimitsDeathTest, DocumentsOutsideTheirSequenceAreRefused) {
  const AttentionCase c =
      standard({.batch = 2, .length = 5, .heads = 1, .kv_heads = 1, .head_dim = 8, .document = 0});
  const auto forward = [&](int64_t row, int32_t start) {
    AttentionCall call(c, DType::f32);
    for (int64_t r = row; r < (row / 5 + 1) * 5; ++r) call.starts_[size_t(r)] = start;
    call.forward();
  };
  const Threads one(1);
  forward(3, 3);
  for (const int32_t start : {-1, 2, 4, 5, 1 << 30}) EXPECT_DEATH(forward(3, start), "start ==") << start;
  EXPECT_DEATH(forward(5, 5), "start ==");  // the first row of the second sequence
}

}  // namespace
}  // namespace sps::ops
