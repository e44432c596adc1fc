#include "infer/engine.h"

#include <gtest/gtest.h>

#include <map>

#include "base/test_dir.h"
#include "infer/generate.h"
#include "infer/test_decoder.h"

namespace sps {
namespace {

constexpr int32_t kEot = 27;  // of the test models

struct Text {
  std::vector<int32_t> ids;  // without a closing end-of-text or stop id
  std::vector<double> log_probabilities;
  Finish finish = Finish::no;
  std::string error;
};

// Takes what a step gave; a text that has finished gets nothing more.
void take(const std::vector<Drawn>& drawn, std::map<int64_t, Text>& texts) {
  for (const Drawn& d : drawn) {
    Text& text = texts[d.handle];
    ASSERT_EQ(text.finish, Finish::no);
    text.finish = d.finish, text.error = d.error;
    if (d.id < 0 || d.finish == Finish::end_of_text || d.finish == Finish::stop_id) continue;
    text.ids.push_back(d.id), text.log_probabilities.push_back(d.log_probability);
  }
}

std::map<int64_t, Text> run(Engine& engine) {
  std::map<int64_t, Text> texts;
  while (!engine.idle()) take(engine.step(), texts);
  return texts;
}

Engine engine_of(const Model& model, const EngineOptions& options = {}) {
  return Engine(model.config(), model.parameters(), model.store(), options);
}

std::vector<Request> requests() {
  std::vector<Request> all;
  const std::vector<std::vector<int32_t>> prompts{
      {5, 3, 8}, {}, {4, kEot, 9}, {1}, {7, 7, 7, 2, 9, 11, 0, 4}, {kEot}, {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5}};
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request r;
    r.prompt = prompts[i];
    r.options.max_new = int64_t(12 - std::max<size_t>(1, prompts[i].size()));
    r.options.ids = kEot + 1;
    r.options.stop_at_eot = i % 2 == 0;
    // Each one draws in a way of its own.
    if (i % 3 == 1) r.options.sampling = {.temperature = 1.5, .top_k = 12, .seed = i};
    if (i % 3 == 2)
      r.options.sampling = {.temperature = 3, .top_p = 0.95, .repetition_penalty = 1.3, .seed = i};
    all.push_back(r);
  }
  return all;
}

class EngineTest : public ModelTest {};

// Everything at once, with too few slots for all, in small steps: each text is what recomputing the whole
// text for every id gives.
TEST_P(EngineTest, TextsAreThoseOfRecomputing) {
  for (const Device device : ops::test_devices()) {
    const auto model = dense_model(resolve(GetParam().keys), ops::Backend{device, DType::f32});
    Engine engine = engine_of(*model, {.max_sequences = 3, .page = 4, .step_rows = 6});
    const std::vector<Request> all = requests();
    for (const Request& r : all) engine.add(r);
    auto texts = run(engine);
    ASSERT_EQ(texts.size(), all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      const auto want = generate(*model, all[i].prompt, all[i].options);
      EXPECT_EQ(texts[int64_t(i)].ids, want) << "request " << i;
      EXPECT_EQ(texts[int64_t(i)].finish,
                int64_t(want.size()) == all[i].options.max_new ? Finish::length : Finish::end_of_text);
    }
    EXPECT_EQ(engine.memory().used_pages, 0);
    EXPECT_EQ(engine.memory().reserved_pages, 0);
  }
}

// The same bits (log-probabilities) alone and in company, joining at any time, beside texts that are
// cancelled.
TEST_P(EngineTest, CompanyChangesNothing) {
  for (const ops::Backend& backend : ops::fast_backends()) {
    const auto model = dense_model(resolve(GetParam().keys), backend);
    std::vector<Request> all = requests();
    std::vector<Text> alone;
    for (Request& r : all) {
      r.log_probabilities = true;
      Engine engine = engine_of(*model);
      engine.add(r);
      alone.push_back(run(engine).begin()->second);
    }
    Engine engine = engine_of(*model, {.max_sequences = 4, .page = 4, .step_rows = 5});
    std::map<int64_t, Text> texts;
    for (size_t i = 0; i < all.size(); ++i) {
      engine.add(all[i]);
      Request other;
      other.options.sampling = {.temperature = 1, .seed = 100 + i};
      other.options.max_new = 11;
      const int64_t handle = engine.add(other);
      take(engine.step(), texts);
      take(engine.step(), texts);
      engine.cancel(handle);
      texts[handle].finish = Finish::length;  // nothing may come any more
    }
    while (!engine.idle()) take(engine.step(), texts);
    for (size_t i = 0; i < all.size(); ++i) {
      const Text& text = texts[int64_t(2 * i)];
      EXPECT_EQ(text.ids, alone[i].ids) << backend.name() << " request " << i;
      EXPECT_EQ(text.log_probabilities, alone[i].log_probabilities) << backend.name() << " request " << i;
    }
  }
}

// A prompt that begins like one before finds its pages, also when their text has ended, unless rings are
// kept; what it becomes is the same to the bit. Few pages, so that what was remembered is forgotten again.
TEST_P(EngineTest, SharedPrefixesChangeNothing) {
  for (const Device device : ops::test_devices()) {
    const auto model = dense_model(resolve(GetParam().keys), ops::Backend{device, DType::bf16});
    const std::vector<int32_t> start{4, 8, kEot, 1, 3, 2, 6, 5};
    std::vector<Request> all;
    for (int32_t i = 0; i < 12; ++i) {
      Request r;
      r.prompt.assign(start.begin(), start.begin() + std::ptrdiff_t(i % 5 == 4 ? 1 : i % 3 == 2 ? 5 : 8));
      if (i % 2 == 1) r.prompt.push_back(i);
      r.options.max_new = 3, r.options.stop_at_eot = false, r.log_probabilities = true;
      r.options.sampling = {.temperature = 1, .seed = uint64_t(i)};
      all.push_back(r);
    }
    std::map<int64_t, Text> texts[2];
    for (const bool share : {false, true}) {
      Engine engine =
          engine_of(*model, {.max_sequences = 2, .cache_tokens = 26, .page = 2, .share_prefixes = share});
      for (const Request& r : all) engine.add(r);
      texts[share] = run(engine);
      const KeyCaches caches(model->plan(), DType::bf16, Device::cpu, {});
      if (share)
        EXPECT_EQ(engine.memory().shared_positions > 20, !caches.has_rings());
      else
        EXPECT_EQ(engine.memory().shared_positions, 0);
      EXPECT_EQ(engine.memory().used_pages, 0);
    }
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(texts[1][int64_t(i)].ids, texts[0][int64_t(i)].ids) << "request " << i;
      EXPECT_EQ(texts[1][int64_t(i)].log_probabilities, texts[0][int64_t(i)].log_probabilities)
          << "request " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EngineTest, testing::ValuesIn(test_models()), test_name);

class OneEngine : public testing::Test {
 protected:
  OneEngine() : model_(dense_model(resolve(small_keys("sps", 2)), DType::f32)) {}
  std::unique_ptr<Model> model_;
};

TEST_F(OneEngine, LogProbabilitiesAreTheDenseModels) {
  Engine engine = engine_of(*model_);
  Request r;
  r.prompt = {5, 3, 8}, r.log_probabilities = true;
  r.options.max_new = 9, r.options.stop_at_eot = false, r.options.sampling = {.temperature = 2, .seed = 3};
  engine.add(r);
  const Text text = run(engine)[0];
  std::vector<int32_t> whole = r.prompt;
  whole.insert(whole.end(), text.ids.begin(), text.ids.end());
  const auto dense = dense_logits(*model_, whole);
  for (size_t i = 0; i < text.ids.size(); ++i) {
    const std::vector<float> logits(dense[i + 2].begin(), dense[i + 2].end());
    EXPECT_NEAR(text.log_probabilities[i], log_probability(logits, text.ids[i]), 1e-4);
  }
}

TEST_F(OneEngine, WhatEndsAText) {
  // An id that the greedy text holds for the first time at place 2 or later.
  Request r;
  r.prompt = {5, 3, 8}, r.options.max_new = 9, r.options.stop_at_eot = false;
  r.options.sampling = {.temperature = 2, .seed = 3};
  Engine engine = engine_of(*model_);
  engine.add(r);
  const std::vector<int32_t> whole = run(engine)[0].ids;
  ASSERT_EQ(whole.size(), 9u);
  size_t at = 2;
  while (std::count(whole.begin(), whole.begin() + std::ptrdiff_t(at), whole[at]) > 0) ++at;
  Request stopped = r;
  stopped.stop_ids = {whole[at]};
  const int64_t first = engine.add(stopped);
  Request nothing = r;
  nothing.options.max_new = 0;
  const int64_t second = engine.add(nothing);
  Request without = r;
  for (int32_t id = 0; id < 29; ++id)
    if (id != 11) without.forbidden.push_back(id);
  const int64_t third = engine.add(without);
  Request impossible = r;
  for (int32_t id = 0; id < 29; ++id) impossible.forbidden.push_back(id);
  const int64_t fourth = engine.add(impossible);
  auto texts = run(engine);
  EXPECT_EQ(texts[first].ids, std::vector<int32_t>(whole.begin(), whole.begin() + std::ptrdiff_t(at)));
  EXPECT_EQ(texts[first].finish, Finish::stop_id);
  EXPECT_TRUE(texts[second].ids.empty());
  EXPECT_EQ(texts[second].finish, Finish::length);
  EXPECT_EQ(texts[third].ids, std::vector<int32_t>(9, 11));
  EXPECT_EQ(texts[fourth].finish, Finish::failed);
  EXPECT_PRED2(mentions, texts[fourth].error, "no id is left");
  EXPECT_EQ(engine.memory().used_pages, 0);
}

TEST_F(OneEngine, LogitsThatAreNoNumbersEndTheText) {
  ParameterStore& store = model_->store();
  store.weight(model_->parameters().final_norm).as<float>()[0] = NAN;
  Engine engine = engine_of(*model_);
  Request r;
  r.prompt = {5};
  r.options.max_new = 4;
  engine.add(r);
  const Text text = run(engine)[0];
  EXPECT_EQ(text.finish, Finish::failed);
  EXPECT_PRED2(mentions, text.error, "not a number");
}

TEST_F(OneEngine, TextsWaitForMemory) {
  // Pages of 4 for 12 positions: one text of 12, or two of up to 8 and 4.
  Engine engine = engine_of(*model_, {.max_sequences = 4, .cache_tokens = 12, .page = 4});
  Request small, large;
  small.prompt = {1}, small.options.max_new = 3, small.options.stop_at_eot = false;
  large.prompt = {2, 3}, large.options.max_new = 10, large.options.stop_at_eot = false;
  for (int i = 0; i < 4; ++i) engine.add(small);
  engine.add(large);
  engine.add(small);
  std::map<int64_t, Text> texts;
  take(engine.step(), texts);
  EXPECT_EQ(engine.memory().live, 3);
  EXPECT_EQ(engine.memory().waiting, 3);
  EXPECT_EQ(engine.memory().reserved_pages, 3);
  while (!engine.idle()) {
    take(engine.step(), texts);
    const EngineMemory m = engine.memory();
    EXPECT_LE(m.used_pages, m.reserved_pages);
    EXPECT_LE(m.reserved_pages, m.pages);
  }
  EXPECT_EQ(texts.size(), 6u);
  EXPECT_EQ(texts[4].ids.size(), 10u);
  EXPECT_EQ(texts[5].ids, texts[0].ids);
}

TEST_F(OneEngine, Cancelling) {
  Engine engine = engine_of(*model_, {.max_sequences = 1});
  Request r;
  r.prompt = {1}, r.options.max_new = 8, r.options.stop_at_eot = false;
  const int64_t live = engine.add(r), waiting = engine.add(r), last = engine.add(r);
  engine.step();
  EXPECT_TRUE(engine.cancel(waiting));
  EXPECT_FALSE(engine.cancel(waiting));
  EXPECT_TRUE(engine.cancel(live));
  EXPECT_FALSE(engine.cancel(live));
  EXPECT_FALSE(engine.cancel(99));
  auto texts = run(engine);
  EXPECT_EQ(texts.size(), 1u);
  EXPECT_EQ(texts[last].ids.size(), 8u);
  EXPECT_EQ(engine.memory().used_pages, 0);
  EXPECT_TRUE(engine.step().empty());  // nothing to do
}

TEST_F(OneEngine, WhatIsRefused) {
  Engine engine = engine_of(*model_, {.max_sequences = 2, .cache_tokens = 8, .page = 4});
  const auto refused = [&](const Request& r, const char* what) {
    EXPECT_PRED2(mentions, error_of([&] { engine.add(r); }), what);
  };
  Request r;
  r.prompt = std::vector<int32_t>(12, 1);
  r.options.max_new = 1;
  refused(r, "context of 12");
  r.options.max_new = INT64_MAX;
  refused(r, "context of 12");
  r.prompt.resize(5), r.options.max_new = 4;
  refused(r, "cache of 8");
  r.options.max_new = -1;
  refused(r, "-1");
  r.options.max_new = 1, r.prompt = {29};
  refused(r, "id 29");
  r.prompt = {1}, r.stop_ids = {-4};
  refused(r, "-4");
  r.stop_ids = {}, r.forbidden = {29};
  refused(r, "29");
  r.forbidden = {}, r.options.sampling.min_p = 2;
  refused(r, "min_p");
  EXPECT_TRUE(engine.idle());
  for (const EngineOptions& o :
       std::vector<EngineOptions>{{.max_sequences = 0}, {.cache_tokens = -1}, {.page = 0}, {.step_rows = -1}})
    EXPECT_PRED2(mentions, error_of([&] { engine_of(*model_, o); }), "expected");
  // A prompt as long as the context is read where nothing is asked for, a longer one never.
  Engine whole = engine_of(*model_);
  r = {}, r.prompt = std::vector<int32_t>(12, 1), r.options.max_new = 0;
  whole.add(r);
  EXPECT_EQ(run(whole)[0].finish, Finish::length);
  r.prompt.resize(11), r.options.max_new = 1, r.options.stop_at_eot = false;
  const int64_t last = whole.add(r);
  EXPECT_EQ(run(whole)[last].ids.size(), 1u);
  r.prompt.resize(13, 1), r.options.max_new = 0;
  EXPECT_PRED2(mentions, error_of([&] { whole.add(r); }),
               "a prompt of 13 tokens and 0 new ones do not fit the model's context of 12");
}

}  // namespace
}  // namespace sps
