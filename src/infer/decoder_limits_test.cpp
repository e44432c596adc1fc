// What decoding must not be led astray by: edges of windows, memory that held another text, other engines,
// the order of requests, and steps that do not fit.
#include <gtest/gtest.h>

#include <map>

#include "infer/engine.h"
#include "infer/test_decoder.h"
#include "model/test_models.h"
#include "ops/check.h"

namespace sps {
namespace {

// Logits at every position from `first` on: the ids before it in pieces of `piece`, the others one at a time.
std::vector<std::vector<double>> decoded(Decoder& decoder, const std::vector<int32_t>& text, int64_t first,
                                         int64_t piece) {
  std::vector<std::vector<double>> logits;
  const int64_t slot = decoder.open();
  const auto length = int64_t(text.size());
  for (int64_t at = 0; at < length;) {
    const int64_t left = std::max<int64_t>(first + 1 - at, 1), n = std::min(left, piece);
    const Decoder::Run run{slot, std::span(text).subspan(size_t(at), size_t(n)), left - n};
    const OnHost step(decoder.step({&run, 1}));
    if (run.left == 0) logits.push_back(row_of(*step, 0));
    at += n;
  }
  decoder.close(slot);
  return logits;
}

// A window of w keeps the w positions before, for w around nothing and around the whole text; a longer one is
// still causal.
TEST(DecoderLimits, WindowsOfNothingOfAllAndAroundThem) {
  constexpr int64_t kLength = 12;
  const auto is_dense = [](const ModelKeys& keys, const std::string& name) {
    const ModelConfig c = resolve(keys);
    const auto model = dense_model(c, DType::f64);
    const std::vector<int32_t> text = random_text(c, kLength, 3, false);
    const auto dense = dense_logits(*model, text);
    for (const int64_t piece : {int64_t{1}, int64_t{5}, kLength})
      for (const int64_t first : {int64_t{0}, int64_t{6}, kLength - 1}) {
        Decoder decoder(c, model->parameters(), model->store(),
                        {.slots = 1, .page = 5, .step_rows = kLength});
        const auto logits = decoded(decoder, text, first, piece);
        ASSERT_EQ(int64_t(logits.size()), kLength - first);
        for (int64_t i = first; i < kLength; ++i)
          EXPECT_LE(relative_difference(logits[size_t(i - first)], dense[size_t(i)]), 1e-10)
              << name << ", position " << i << ", pieces of " << piece << " up to " << first;
      }
  };
  for (const int64_t w : {int64_t{0}, int64_t{1}, int64_t{2}, kLength - 1, kLength, kLength + 1}) {
    for (const char* family : {"sps", "delayed_state", "reverse_sps", "free_pause"})
      is_dense(small_keys(family, w), fmt::format("{} w {}", family, w));
    if (w == 0) continue;  // of a sliding window 0 says that there is none
    ModelKeys sliding = small_keys("standard", kWindowAuto);
    sliding.sliding_window = w;
    is_dense(sliding, fmt::format("sliding window of {}", w));
  }
}

// An id whose embedding is not a number spoils its own text alone: not those beside it, and not the next one
// in its slot, whose pages and rings still hold it.
TEST(DecoderLimits, WhatIsNoNumberStaysInItsText) {
  constexpr int32_t kPoison = 7;
  for (const TestModel& m : test_models()) {
    const ModelConfig c = resolve(m.keys);
    const auto clean = [&](uint64_t seed) {
      std::vector<int32_t> text = random_text(c, 10, seed, false);
      for (int32_t& id : text)
        if (id == kPoison) id = 8;
      return text;
    };
    const std::vector<int32_t> other = clean(1), next = clean(2);
    std::vector<int32_t> spoilt = clean(3);
    spoilt[0] = spoilt[4] = kPoison;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto model = dense_model(c, dtype);
      const Tensor embed = model->store().weight(model->parameters().embed);
      for (int64_t i = 0; i < embed.cols; ++i) embed.row<float>(kPoison)[i] = NAN;
      if (model->parameters().pred_embed != kNoParameter) {
        const Tensor table = model->store().weight(model->parameters().pred_embed);
        for (int64_t i = 0; i < table.cols; ++i) table.row<float>(kPoison)[i] = NAN;
      }
      const auto alone = [&](const std::vector<int32_t>& text) {
        Decoder decoder(c, model->parameters(), model->store(), {.slots = 1, .page = 4, .step_rows = 12});
        return decoded(decoder, text, 0, 1);
      };
      // A tied head makes the id's own logit what its embedding is.
      const auto without = [](std::vector<double> row) {
        row[kPoison] = 0;
        return row;
      };
      const auto want = alone(other), want_next = alone(next);
      Decoder decoder(c, model->parameters(), model->store(), {.slots = 2, .page = 4, .step_rows = 12});
      const int64_t slots[2] = {decoder.open(), decoder.open()};
      bool seen = false;
      for (size_t i = 0; i < other.size(); ++i) {
        const Decoder::Run runs[2] = {{slots[0], std::span(spoilt).subspan(i, 1), 0},
                                      {slots[1], std::span(other).subspan(i, 1), 0}};
        const OnHost logits(decoder.step(runs));
        seen |= std::isnan(row_of(*logits, 0)[1]);
        ASSERT_EQ(without(row_of(*logits, 1)), without(want[i])) << m.name << " position " << i;
      }
      EXPECT_TRUE(seen) << m.name;
      decoder.close(slots[0]);
      const auto after = decoded(decoder, next, 0, 1);
      for (size_t i = 0; i < next.size(); ++i)
        ASSERT_EQ(without(after[i]), without(want_next[i])) << m.name << " after it, position " << i;
    }
  }
}

// Of a prompt the prediction rows run that something depends on, whatever its pieces: none, the last, those
// that kept predictions are made of, or all; then one a step. There is no room for more either.
TEST(DecoderLimits, PredictionRowsRunWhereTheyAreNeededAlone) {
  constexpr int64_t kLength = 11, kPrompt = 9;
  const std::map<std::string, int64_t> by_hand{{"standard", 0},
                                               {"free_pause", 1},
                                               {"free_pause_w2", 5},
                                               {"sps_w0", 1},
                                               {"sps_w2", kPrompt},
                                               {"two_tower", 1},
                                               {"sequential", 1},
                                               {"own_with_prediction_keys", 5},
                                               {"delayed_state_w0", 9},
                                               {"sps_full", 9},
                                               {"free_pause_pooled", 9},
                                               {"sequential_1+3", 1},
                                               {"sequential_state_start", 1}};
  size_t found = 0;
  for (const TestModel& m : test_models()) {
    const ModelConfig c = resolve(m.keys);
    const auto model = dense_model(c, DType::f32);
    const std::vector<int32_t> text = random_text(c, kLength, 2, false);
    for (const int64_t piece : {int64_t{1}, int64_t{4}, kPrompt}) {
      Decoder decoder(c, model->parameters(), model->store(), {.slots = 1, .page = 4, .step_rows = kPrompt});
      const int64_t slot = decoder.open(), needed = std::min(needed_pred_rows(decoder.plan()), kPrompt);
      int64_t state = 0, pred = 0;
      for (int64_t at = 0; at < kLength;) {
        const int64_t n = std::min(piece, std::max<int64_t>(kPrompt - at, 1));
        const Decoder::Run run{slot, std::span(text).subspan(size_t(at), size_t(n)),
                               std::max<int64_t>(kPrompt - at - n, 0)};
        decoder.step({&run, 1});
        const Decoder::StepRows rows = decoder.rows_of_step();
        if (at < kPrompt)
          state += rows.state, pred += rows.pred;
        else
          EXPECT_EQ(rows.pred, c.has_pred() ? 1 : 0) << m.name;
        at += n;
      }
      EXPECT_EQ(state, kPrompt) << m.name;
      EXPECT_EQ(pred, needed) << m.name << " in pieces of " << piece;
      const auto hand = by_hand.find(m.name);
      if (hand == by_hand.end()) continue;
      ++found;
      EXPECT_EQ(pred, hand->second) << m.name;
    }
  }
  EXPECT_EQ(found, 3 * by_hand.size());
}

// Texts with log-probabilities, by the number of their request.
using Texts = std::map<size_t, std::pair<std::vector<int32_t>, std::vector<double>>>;

// Requests begin alike, so that they share pages where those are shared.
Request request(size_t number) {
  Request r;
  r.prompt = {4, 8, 1, 3, 2, 6};
  if (number % 3 > 0) r.prompt.push_back(int32_t(number));
  r.options.max_new = 5, r.options.stop_at_eot = false, r.log_probabilities = true;
  r.options.sampling = {.temperature = 1, .seed = number};
  return r;
}

std::unique_ptr<Model> model_on(Device device, const ModelConfig& c, DType dtype) {
  ModelOptions options;
  options.compute = dtype, options.max_rows = c.context, options.train = false, options.device = device;
  auto model = std::make_unique<Model>(c, options);
  lively_weights(*model, 4);
  return model;
}

void take(const std::vector<Drawn>& drawn, const std::map<int64_t, size_t>& numbers, Texts& texts) {
  for (const Drawn& d : drawn) {
    ASSERT_NE(d.finish, Finish::failed) << d.error;
    auto& [ids, log_probabilities] = texts[numbers.at(d.handle)];
    ids.push_back(d.id), log_probabilities.push_back(d.log_probability);
  }
}

// Shared beginnings carry no number of the requests before: any order gives the same texts to the bit.
TEST(EngineLimits, TheOrderOfRequestsDoesNotMatter) {
  for (const char* family : {"standard", "free_pause", "sps", "sequential"}) {
    const ModelConfig c = resolve(small_keys(family, std::string(family) == "sps" ? 2 : kWindowAuto));
    for (const Device device : ops::test_devices()) {
      const auto model = model_on(device, c, DType::bf16);
      std::vector<Texts> all;
      for (const size_t step : {1, 5, 7}) {  // of eight: in order and mixed
        Engine engine(c, model->parameters(), model->store(),
                      {.max_sequences = 2, .cache_tokens = 32, .page = 2});
        std::map<int64_t, size_t> numbers;
        for (size_t i = 0; i < 8; ++i) {
          const size_t number = i * step % 8;
          numbers[engine.add(request(number))] = number;
        }
        Texts texts;
        while (!engine.idle()) take(engine.step(), numbers, texts);
        EXPECT_EQ(texts.size(), 8u);
        all.push_back(std::move(texts));
      }
      EXPECT_TRUE(all[1] == all[0] && all[2] == all[0]) << family;
    }
  }
}

// A second engine, whose memory is made and cleared while the first one works, changes none of its texts.
TEST(EngineLimits, AnEngineThatIsMadeBesideAnotherLeavesItAlone) {
  const ModelConfig c = resolve(small_keys("sps", 2));
  for (const Device device : ops::test_devices())
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const auto model = model_on(device, c, dtype);
      const EngineOptions options{.max_sequences = 3, .page = 2};
      Texts texts[2];
      for (const bool beside : {false, true}) {
        Engine engine(c, model->parameters(), model->store(), options);
        std::map<int64_t, size_t> numbers;
        for (size_t i = 0; i < 3; ++i) numbers[engine.add(request(i))] = i;
        std::vector<std::unique_ptr<Engine>> others;
        while (!engine.idle()) {
          take(engine.step(), numbers, texts[beside]);
          if (!beside) continue;
          others.push_back(std::make_unique<Engine>(c, model->parameters(), model->store(), options));
          others.back()->add(request(9));
          others.back()->step();
        }
      }
      EXPECT_TRUE(texts[1] == texts[0]) << dtype_name(dtype);
    }
}

// What a caller may not ask of a decoder stops the program before anything is read or written there.
TEST(DecoderLimitsDeathTest, StepsThatDoNotFitAreRefused) {
  const ModelConfig c = resolve(small_keys("sps", 2));
  const auto model = dense_model(c, DType::f32);
  const auto step = [&](int64_t count, int32_t id, int64_t slot) {
    Decoder decoder(c, model->parameters(), model->store(), {.slots = 1, .page = 4, .step_rows = 64});
    decoder.open();
    const std::vector<int32_t> text(size_t(count), id);
    const Decoder::Run run{slot, text, 0};
    decoder.step({&run, 1});
  };
  step(c.context, 1, 0);
  EXPECT_DEATH(step(c.context + 1, 1, 0), "c.context");
  EXPECT_DEATH(step(65, 1, 0), "step_rows");
  EXPECT_DEATH(step(0, 1, 0), "tokens.empty");
  EXPECT_DEATH(step(1, int32_t(c.vocab), 0), "c.vocab");
  EXPECT_DEATH(step(1, -1, 0), "token >= 0");
  EXPECT_DEATH(step(1, 1, 1), "run.slot");
  EXPECT_DEATH(step(1, 1, -1), "run.slot");
}

}  // namespace
}  // namespace sps
