// Sequences of several tiles at the head sizes that models have, where GPU kernels keep tiles in flight,
// share sums between blocks and treat a band's edge apart from its inside.
#include "base/error.h"
#include "ops/attention/attention_case.h"

namespace sps::ops {

namespace {

class AttentionTiles : public AttentionOn {};
INSTANTIATE_TEST_SUITE_P(, AttentionTiles, AttentionOn::kinds(), AttentionOn::name);

void expect_results(const AttentionCall& got, const AttentionCall& want, DType dtype) {
  const std::vector<Result> x = results(got, true), y = results(want, true);
  for (size_t i = 0; i < x.size(); ++i) {
    // Roundings to bf16 besides the result's own: p for o; p or ds, and o in delta, for gradients.
    const double roundings = x[i].name[0] == 'l' ? 1 : x[i].name[0] == 'o' ? 2 : 3;
    EXPECT_LE(relative_error(*x[i].matrix, *y[i].matrix), tolerance(dtype, roundings)) << x[i].name;
  }
}

std::vector<AttentionCase> cases(int64_t head_dim, int64_t length) {
  const AttentionCase c{.batch = 2, .length = length, .heads = 2, .kv_heads = 1, .head_dim = head_dim};
  AttentionCase documents = c, three = c;
  documents.document = length / 5;
  // One set that both streams see alike, one that a single stream sees.
  AttentionCase mixed = documents;
  mixed.sets = {true, true, false};
  mixed.streams = {true, true};
  mixed.bands[0] = {Band{0, Band::kInf}, Band::none(), Band::none()};
  mixed.bands[1] = {Band{1, Band::kInf}, Band{0, 64}, Band::none()};
  three.sets = {true, true, true};
  three.streams = {true, true};
  three.bands[0] = {Band{0, 70}, Band{130, Band::kInf}, Band::none()};
  three.bands[1] = {Band{1, Band::kInf}, Band::none(), Band{0, 200}};
  std::vector<AttentionCase> all{standard(c),           sps(c, 64), reverse_sps(documents, 64),
                                 free_pause(documents), three,      mixed};
  const char* names[] = {"standard", "sps(64)", "reverse_sps(64)", "free_pause", "three sets", "mixed"};
  for (size_t i = 0; i < all.size(); ++i) all[i].name = names[i];
  return all;
}

TEST_P(AttentionTiles, MatchReference) {
  for (const auto& [head_dim, length] : {std::pair{64, 450}, {64, 385}, {96, 200}, {128, 321}})
    for (const AttentionCase& c : cases(head_dim, length)) {
      SCOPED_TRACE(fmt::format("{}, T {}, head_dim {}", c.name, length, head_dim));
      AttentionCall call(here(c), dtype(), 1, dtype());
      AttentionCall want = call.reference();
      call.forward(), call.backward();
      want.forward(), want.backward();
      expect_results(call, want, dtype());
    }
}

TEST_P(AttentionTiles, SkippingOrRunningAgainChangesNoBit) {
  for (const int64_t head_dim : {64, 128})
    for (const AttentionCase& c : cases(head_dim, 520)) {
      SCOPED_TRACE(fmt::format("{}, head_dim {}", c.name, head_dim));
      AttentionCall once(here(c), dtype()), again(here(c), dtype()), visit(here(c), dtype());
      visit.skip_tiles = false;
      for (AttentionCall* call : {&once, &again, &visit}) call->forward(), call->backward();
      const std::vector<Result> x = results(once, true), y = results(again, true), z = results(visit, true);
      for (size_t i = 0; i < x.size(); ++i) {
        EXPECT_TRUE(bits(*x[i].matrix) == bits(*y[i].matrix)) << x[i].name;
        EXPECT_TRUE(bits(*x[i].matrix) == bits(*z[i].matrix)) << x[i].name << " of all tiles";
      }
    }
}

TEST_P(AttentionTiles, KeyGradientsAreAddedOrLeftOut) {
  const AttentionCase c =
      here(sps({.batch = 1, .length = 300, .heads = 4, .kv_heads = 2, .head_dim = 64}, 64));
  AttentionCall plain(c, dtype()), added(c, dtype());
  for (size_t s = 0; s < 2; ++s) added.dk[s].fill(2), added.dv[s].fill(-1);
  added.accumulate = true, added.wanted[1] = false;
  plain.forward(), added.forward();
  plain.backward(), added.backward();
  EXPECT_TRUE(bits(added.dq[0]) == bits(plain.dq[0]));
  for (int64_t r = 0; r < plain.dk[0]->rows; ++r)
    for (int64_t d = 0; d < plain.dk[0]->cols; ++d) {
      ASSERT_EQ(float(added.dk[0].get(r, d)), float(plain.dk[0].get(r, d)) + 2.0F);
      ASSERT_EQ(float(added.dv[0].get(r, d)), float(plain.dv[0].get(r, d)) - 1.0F);
      ASSERT_EQ(added.dk[1].get(r, d), 2);
      ASSERT_EQ(added.dv[1].get(r, d), -1);
    }
}

}  // namespace

}  // namespace sps::ops
