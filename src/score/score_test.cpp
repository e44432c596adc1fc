#include "score/score.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/test_dir.h"
#include "data/test_corpus.h"
#include "model/config.h"
#include "score/model_input.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

class ScoreTest : public testing::Test {
 protected:
  static ModelConfig config(const std::string& family) {
    ModelKeys k;
    k.family = family, k.layers = 2, k.d_model = 16, k.heads = 2, k.d_ffn = {24}, k.vocab = 320,
    k.context = 16;
    k.eot = 256;
    if (family != "standard") k.window = 3;
    return resolve(k);
  }
  static ModelOptions forward_only(const ModelConfig& c, DType dtype, int64_t batch) {
    ModelOptions o;
    o.compute = dtype, o.max_rows = batch * c.context, o.train = false;
    return o;
  }

  TestDir dir_;
  fs::path data_ = make_test_data(dir_);
  TokenFile file_ = TokenFile::open(data_, "val");
  ByteTokenizer bytes_;
};

TEST_F(ScoreTest, TheBatchDoesNotChangeABit) {
  for (const char* family : {"standard", "sps"})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const ModelConfig c = config(family);
      const ValidationWindows windows(file_, c.context);
      ASSERT_GT(windows.count(), 16);
      ASSERT_NE(windows.count() % 7, 0) << "the last batch is to be smaller";
      Score want;
      for (const int64_t batch : {1, 2, 7, 16}) {
        Model model(c, forward_only(c, dtype, batch));
        model.store().initialise(3);
        model.store().round();
        std::vector<int64_t> reported;
        const Score s = score_windows(model, file_, windows, batch, &bytes_,
                                      [&](int64_t done) { reported.push_back(done); });
        EXPECT_EQ(reported.back(), windows.count());
        EXPECT_EQ(int64_t(reported.size()), (windows.count() + batch - 1) / batch);
        if (batch == 1) want = s;
        EXPECT_EQ(s.nll, want.nll) << family << ", " << dtype_name(dtype) << ", batch " << batch;
        EXPECT_EQ(s.scored, want.scored);
        EXPECT_EQ(s.bytes, want.bytes);
      }
      EXPECT_NEAR(want.nats_per_token(), std::log(320.0), 0.1);
    }
}

// Every likelihood written out: log softmax of the logits at each position that reads a byte.
TEST_F(ScoreTest, IsTheSumOfTheLogSoftmax) {
  const ModelConfig c = config("sps");
  Model model(c, forward_only(c, DType::f64, 1));
  model.store().initialise(3);
  const ValidationWindows windows(file_, c.context, 5 * c.context);
  ASSERT_EQ(windows.count(), 5);
  double nll = 0;
  int64_t scored = 0, bytes = 0;
  for (int64_t w = 0; w < 5; ++w) {
    std::vector<int32_t> window(size_t(c.context) + 1), rows;
    file_.read(windows.start(w), c.context + 1, window.data());
    Batch batch;
    batch.fill(window, c.context, special_ids(c));
    for (int32_t i = 0; i < c.context; ++i) rows.push_back(i);
    std::vector<double> logits(rows.size() * size_t(c.vocab));
    model.logits(model_input(batch), rows, view(logits.data(), c.context, c.vocab));
    for (size_t i = 0; i < rows.size(); ++i) {
      if (window[i] == 256) continue;
      const double* row = logits.data() + i * size_t(c.vocab);
      double sum = 0;
      for (int64_t id = 0; id < c.vocab; ++id) sum += std::exp(row[id]);
      nll += std::log(sum) - row[window[i + 1]];
      ++scored;
      bytes += window[i + 1] != 256;  // an end of text stands for no byte
    }
  }
  const Score s = score_windows(model, file_, windows, 1, &bytes_);
  EXPECT_EQ(s.scored, scored);
  EXPECT_LT(s.scored, 5 * c.context);
  EXPECT_EQ(s.bytes, bytes);
  EXPECT_LT(s.bytes, s.scored);
  EXPECT_NEAR(s.nll, nll, 1e-9 * nll);
  EXPECT_NEAR(s.nats_per_token(), nll / double(scored), 1e-9);
  EXPECT_NEAR(s.bits_per_byte(), nll / double(bytes) / 0.69314718055994531, 1e-8);
}

TEST_F(ScoreTest, WithoutATokenizerThereAreNoBytes) {
  const ModelConfig c = config("standard");
  Model model(c, forward_only(c, DType::f32, 1));
  model.store().initialise(3);
  const Score s = score_windows(model, file_, ValidationWindows(file_, c.context, 16), 1, nullptr);
  EXPECT_GT(s.scored, 0);
  EXPECT_EQ(s.bytes, 0);
  EXPECT_EQ(s.bits_per_byte(), 0);
  EXPECT_EQ(Score{}.nats_per_token(), 0);
}

}  // namespace
}  // namespace sps
