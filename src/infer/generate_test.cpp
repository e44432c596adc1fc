#include "infer/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/test_dir.h"
#include "model/test_models.h"
#include "ops/check.h"
#include "score/model_input.h"

namespace sps {
namespace {

ModelOptions forward_only() {
  ModelOptions o;
  o.max_rows = 12, o.train = false;
  return o;
}

class GenerateTest : public testing::TestWithParam<TestModel> {
 protected:
  GenerateTest() : config_(resolve(GetParam().keys)), model_(config_, forward_only()) {
    lively_weights(model_, 4);
  }
  void expect_greedy_is_the_argmax(Model& model) const;

  ModelConfig config_;
  Model model_;
};

constexpr int32_t kEot = 27;  // of the test models

// Every new id is the largest logit of its position in one pass over the finished text.
TEST_P(GenerateTest, GreedyIsTheArgmaxOfOnePassOverTheWhole) {
  for (const Device device : ops::test_devices()) {
    ModelOptions options = forward_only();
    options.device = device;
    Model model(config_, options);
    lively_weights(model, 4);
    expect_greedy_is_the_argmax(model);
  }
}

void GenerateTest::expect_greedy_is_the_argmax(Model& model) const {
  for (const std::vector<int32_t>& prompt :
       {std::vector<int32_t>{5, 3, 8}, std::vector<int32_t>{4, kEot, 9}, std::vector<int32_t>{1}}) {
    GenerateOptions options;
    options.max_new = int64_t(12 - prompt.size());
    options.ids = kEot + 1, options.stop_at_eot = false;
    std::vector<int32_t> seen;
    const auto ids = generate(model, prompt, options, [&](int32_t id, auto) {
      seen.push_back(id);
      return true;
    });
    EXPECT_EQ(seen, ids);
    ASSERT_EQ(int64_t(ids.size()), options.max_new);

    std::vector<int32_t> text = prompt;
    text.insert(text.end(), ids.begin(), ids.end());
    std::vector<int32_t> window = text, rows;
    window.push_back(0);
    Batch batch;
    batch.fill(window, int64_t(text.size()), special_ids(config_));
    for (size_t i = prompt.size() - 1; i + 1 < text.size(); ++i) rows.push_back(int32_t(i));
    std::vector<float> logits(rows.size() * size_t(config_.vocab));
    model.logits(model_input(batch), rows, view(logits.data(), int64_t(rows.size()), config_.vocab));
    for (size_t r = 0; r < rows.size(); ++r) {
      const float* row = logits.data() + r * size_t(config_.vocab);
      EXPECT_EQ(ids[r], std::max_element(row, row + kEot) - row) << "new id " << r;
    }
  }
}

TEST_P(GenerateTest, IdsThatAreNoTextNeverCome) {
  // A model that wants nothing more than the ids past the tokenizer's, the prediction row and the end of
  // text.
  std::set<int32_t> drawn;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    GenerateOptions options;
    options.max_new = 8, options.ids = 10, options.stop_at_eot = false;
    options.sampling = {.temperature = 1e9, .seed = seed};
    for (const int32_t id : generate(model_, std::vector<int32_t>{2, 6}, options)) drawn.insert(id);
  }
  EXPECT_EQ(drawn, (std::set<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  drawn.clear();
  for (uint64_t seed = 0; seed < 60; ++seed) {
    GenerateOptions options;
    options.max_new = 8, options.stop_at_eot = false;
    options.sampling = {.temperature = 1e9, .seed = seed};
    for (const int32_t id : generate(model_, std::vector<int32_t>{2, 6}, options)) drawn.insert(id);
  }
  EXPECT_FALSE(drawn.contains(kEot));
  // The row that prediction tokens start from is an id of the vocabulary; elsewhere it is an id like others.
  EXPECT_EQ(drawn.contains(28), !(config_.has_pred() && config_.pred_input == PredInput::row));
}

INSTANTIATE_TEST_SUITE_P(Families, GenerateTest, testing::ValuesIn([] {
                           std::vector<TestModel> some;
                           const std::set<std::string> names{"standard",         "sps_w2",
                                                             "delayed_state_w2", "reverse_sps_w2",
                                                             "free_pause_w2",    "free_pause_pooled_token",
                                                             "two_tower_3+2",    "sequential_state_start",
                                                             "backbone_sps"};
                           for (const TestModel& m : test_models())
                             if (names.contains(m.name)) some.push_back(m);
                           SPS_CHECK(some.size() == names.size());
                           return some;
                         }()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), '+', '_');
                           return name;
                         });

class OneModel : public testing::Test {
 protected:
  OneModel() : model_(resolve(test_models()[0].keys), forward_only()) { lively_weights(model_, 4); }
  Model model_;
};

TEST_F(OneModel, ASeedIsAText) {
  GenerateOptions options;
  options.max_new = 11, options.stop_at_eot = false;
  options.sampling = {.temperature = 2, .seed = 1};
  const std::vector<int32_t> prompt{3};
  const auto first = generate(model_, prompt, options);
  EXPECT_EQ(generate(model_, prompt, options), first);
  options.sampling.seed = 2;
  EXPECT_NE(generate(model_, prompt, options), first);
  // A shorter text is the beginning of a longer one.
  options.sampling.seed = 1, options.max_new = 6;
  EXPECT_EQ(generate(model_, prompt, options), std::vector<int32_t>(first.begin(), first.begin() + 6));
}

TEST_F(OneModel, AnEndOfTextEndsTheText) {
  GenerateOptions options;
  options.max_new = 11;
  options.sampling.temperature = 1e9;
  size_t shorter = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    options.sampling.seed = seed;
    const auto ids = generate(model_, std::vector<int32_t>{3}, options);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), kEot), 0);
    shorter += ids.size() < 11;
  }
  EXPECT_GT(shorter, 5u);
}

TEST_F(OneModel, AnEmptyPromptIsANewDocument) {
  GenerateOptions options;
  options.max_new = 6;
  EXPECT_EQ(generate(model_, {}, options), generate(model_, std::vector<int32_t>{kEot}, options));
}

TEST_F(OneModel, TheCallerMayEndTheText) {
  GenerateOptions options;
  options.max_new = 8, options.stop_at_eot = false;
  const auto whole = generate(model_, std::vector<int32_t>{3}, options);
  size_t n = 0;
  const auto cut =
      generate(model_, std::vector<int32_t>{3}, options, [&](int32_t id, std::span<const float> logits) {
        EXPECT_EQ(id, std::max_element(logits.begin(), logits.begin() + kEot) - logits.begin());
        return ++n < 5;
      });
  EXPECT_EQ(cut, std::vector<int32_t>(whole.begin(), whole.begin() + 5));
}

TEST_F(OneModel, WhatDoesNotFitIsRefused) {
  GenerateOptions options;
  options.max_new = 10;
  const std::vector<int32_t> prompt{1, 2, 3};
  EXPECT_PRED2(mentions, error_of([&] { generate(model_, prompt, options); }), "context of 12");
  options.max_new = 9;
  EXPECT_NO_THROW(generate(model_, prompt, options));
  options.max_new = 0;
  EXPECT_TRUE(generate(model_, prompt, options).empty());
  options.max_new = -1;
  EXPECT_PRED2(mentions, error_of([&] { generate(model_, prompt, options); }), "-1");
  options.max_new = 1;
  EXPECT_PRED2(mentions, error_of([&] { generate(model_, std::vector<int32_t>{29}, options); }), "id 29");
  EXPECT_PRED2(mentions, error_of([&] { generate(model_, std::vector<int32_t>{-1}, options); }), "id -1");
}

}  // namespace
}  // namespace sps
