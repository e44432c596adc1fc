// Lengths as they come up in use, and lists that point outside.
#include "ops/attention/attention_case.h"

namespace sps::ops {

namespace {

class AttentionLimits : public AttentionOn {};
INSTANTIATE_TEST_SUITE_P(, AttentionLimits, AttentionOn::kinds(), AttentionOn::name);

// A context of 4032, which no tile of 128 divides, at a width that has fast code everywhere.
TEST_P(AttentionLimits, AContextThatNoTileDivides) {
  AttentionCase c = standard(
      here({.batch = 1, .length = 4032, .heads = 1, .kv_heads = 1, .head_dim = 64, .document = 1500}));
  for (const Band band : {Band::causal(), Band{0, 64}}) {
    c.bands[0][0] = band;
    AttentionCall call(c, dtype());
    call.o[0].fill(NAN), call.lse[0].fill(NAN);
    AttentionCall want = call.reference();
    call.forward(), want.forward();
    SPS_EXPECT_CLOSE(call.o[0], want.o[0], tolerance(dtype(), 2));
    SPS_EXPECT_CLOSE(call.lse[0], want.lse[0], tolerance(dtype(), 1));
  }
}

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
