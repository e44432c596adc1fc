// Whole forward passes against the oracle: every loss and every residual, over documents that begin and end
// at awkward places, all windows around the length of the sequence, and positions far from the start.
#include "model/test_compare.h"
#include "model/test_oracle.h"

namespace sps {
namespace {

// Random documents; then ends of text in a row, first, last, everywhere, nowhere, and a sequence of one
// token.
std::vector<TestInput> inputs_with_documents(const ModelConfig& c) {
  std::vector<TestInput> all{{c, 2, 12, 5}, {c, 3, 7, 6}, {c, 1, 1, 7, false}};
  const std::vector<std::vector<size_t>> ends{
      {}, {0}, {11}, {0, 1, 2}, {4, 5, 6, 10}, {0, 5, 11}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}};
  for (const auto& places : ends) {
    TestInput input(c, 1, 12, 8 + places.size(), false);
    for (const size_t i : places) input.tokens[i] = int32_t(c.eot);
    input.set_documents(c);
    all.push_back(std::move(input));
  }
  return all;
}

void expect_rows(Tensor got, const OracleRows& want, double tolerance, const std::string& what) {
  double largest = 0, distance = 0;
  for (size_t r = 0; r < want.size(); ++r)
    for (size_t c = 0; c < want[r].size(); ++c) {
      const double g = value(got, got.rows == 1 ? 0 : int64_t(r), int64_t(c));  // a constant start is one row
      largest = std::max(largest, std::abs(want[r][c]));
      distance = std::max(distance, std::isfinite(g) ? std::abs(g - want[r][c]) : INFINITY);
    }
  EXPECT_LE(distance, tolerance * largest) << what;
}

void expect_like_oracle(const ModelKeys& keys, DType dtype, bool eliminate_dead,
                        const std::vector<TestInput>& inputs) {
  LivelyModel model(keys, {.compute = dtype, .train = false, .eliminate_dead = eliminate_dead});
  const Oracle oracle(keys, model.store());
  // Double: a few thousand roundings of 1e-16. Float: products and sums of 6e-8 through up to five blocks.
  const double tolerance = dtype == DType::f64 ? 1e-9 : 1e-4;
  for (size_t n = 0; n < inputs.size(); ++n) {
    SCOPED_TRACE(testing::Message() << dtype_name(dtype) << ", input " << n);
    const TestInput& input = inputs[n];
    std::vector<double> nll(input.tokens.size());
    model.evaluate(input.input(), nll);
    const OracleResult want = oracle.run(input.input());
    for (size_t r = 0; r < nll.size(); ++r)
      EXPECT_NEAR(nll[r], want.nll[r], tolerance * want.nll[r]) << "row " << r;
    if (input.scored() == 0) continue;  // nothing to compute
    const Activations& a = model.activations();
    for (size_t j = 0; j < a.state.size(); ++j)
      if (a.state[j].s1)
        expect_rows(a.state[j].s1, want.state[j], tolerance, "state level " + std::to_string(j));
    if (a.top)
      expect_rows(a.top, want.state[size_t(model.plan().state_blocks_alive())], tolerance, "top level");
    for (size_t i = 0; i < a.pred.size(); ++i)
      if (a.pred[i].s1)
        expect_rows(a.pred[i].s1, want.pred[i], tolerance, "prediction level " + std::to_string(i));
  }
}

class OracleTest : public ModelTest {};

TEST_P(OracleTest, LossesAndResidualsMatch) {
  const auto inputs = inputs_with_documents(resolve(GetParam().keys));
  for (const DType dtype : {DType::f64, DType::f32})
    for (const bool eliminate_dead : {true, false})
      expect_like_oracle(GetParam().keys, dtype, eliminate_dead, inputs);
}

// Rotary tables of a longer context, where a wrong frequency or pairing has had room to drift.
TEST_P(OracleTest, MatchesAtDistantPositions) {
  ModelKeys keys = GetParam().keys;
  keys.context = 2400;
  TestInput input(resolve(keys), 1, 6, 9, false);
  input.positions = {0, 1, 700, 701, 1500, 2355};
  for (const DType dtype : {DType::f64, DType::f32}) expect_like_oracle(keys, dtype, true, {input});
}

INSTANTIATE_TEST_SUITE_P(Families, OracleTest, testing::ValuesIn(test_models()), test_name);

// Windows from nothing to past the whole sequence of 12 tokens.
TEST(OracleWindows, EveryWindowOfEveryFamily) {
  const OneThread one_thread;
  for (const std::string family : {"sps", "delayed_state", "reverse_sps", "free_pause"})
    for (const int64_t w : {0, 1, 3, 10, 11, 12, 4096}) {
      SCOPED_TRACE(family + " w=" + std::to_string(w));
      const ModelKeys keys = small_keys(family, w);
      expect_like_oracle(keys, DType::f64, true, inputs_with_documents(resolve(keys)));
    }
}

}  // namespace
}  // namespace sps
