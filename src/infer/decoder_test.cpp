#include "infer/decoder.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <tuple>

#include "infer/test_decoder.h"
#include "ops/rows/rows.h"

namespace sps {
namespace {

// How several texts are decoded together: text t joins at step `join[t]`, its first `prompt[t]` ids come in
// pieces of at most `piece`, the others one at a time.
struct Schedule {
  std::vector<int64_t> join, prompt;
  int64_t piece = 1;
};

// Logits by text and position, where the schedule gives some.
using Logits = std::map<std::pair<size_t, int64_t>, std::vector<double>>;

Logits decode(Decoder& decoder, const std::vector<std::vector<int32_t>>& texts, const Schedule& schedule) {
  Logits all;
  std::vector<int64_t> slots(texts.size(), -1), done(texts.size(), 0);
  for (int64_t now = 0, left = int64_t(texts.size()); left > 0; ++now) {
    std::vector<Decoder::Run> runs;
    std::vector<size_t> who;
    for (size_t t = 0; t < texts.size(); ++t) {
      const auto length = int64_t(texts[t].size());
      if (now < schedule.join[t] || done[t] == length) continue;
      if (done[t] == 0) slots[t] = decoder.open();
      if (slots[t] < 0) continue;
      const int64_t of_prompt = schedule.prompt[t] - done[t];
      const int64_t n = of_prompt > 0 ? std::min(of_prompt, schedule.piece) : 1;
      runs.push_back({slots[t], std::span(texts[t]).subspan(size_t(done[t]), size_t(n)),
                      std::max<int64_t>(0, of_prompt - n)});
      who.push_back(t);
    }
    if (runs.empty()) continue;
    const OnHost host(decoder.step(runs));
    const Tensor logits = host;
    int64_t row = 0;
    for (size_t r = 0; r < runs.size(); ++r) {
      const size_t t = who[r];
      done[t] += int64_t(runs[r].tokens.size());
      if (runs[r].left == 0) all[{t, done[t] - 1}] = row_of(logits, row++);
      if (done[t] == int64_t(texts[t].size())) decoder.close(slots[t]), --left;
    }
    EXPECT_EQ(row, logits.rows);
  }
  return all;
}

class DecoderTest : public ModelTest {
 protected:
  DecoderTest() : config_(resolve(GetParam().keys)) {
    for (const auto& [length, seed] : {std::pair{12, 1}, {12, 2}, {7, 3}, {1, 4}, {10, 5}})
      texts_.push_back(random_text(config_, length, uint64_t(seed), seed != 2));
  }
  static DecoderOptions small() { return {.slots = 3, .page = 4, .step_rows = 20}; }

  ModelConfig config_;
  std::vector<std::vector<int32_t>> texts_;
  // Three at a time; prompts of any length, at once, in pieces, or one by one; a slot is used again.
  const std::vector<Schedule> schedules_{{{0, 0, 0, 0, 0}, {1, 1, 1, 1, 1}, 1},
                                         {{0, 2, 1, 3, 4}, {5, 12, 3, 1, 9}, 12},
                                         {{3, 0, 2, 1, 9}, {11, 6, 7, 1, 8}, 3},
                                         {{0, 0, 5, 5, 6}, {12, 12, 6, 1, 10}, 5}};
};

// The bar of the whole room: what decoding gives is what one pass over the text gives, at every position. In
// bf16 both round to 8 bits a dozen times a block, each in its own way, which these narrow models magnify:
// there decoding must be as near to the reference as the dense pass is (root mean square over the positions
// of all schedules; on a CPU also of each but the last, which leaves six).
TEST_P(DecoderTest, EqualsTheDenseForwardPass) {
  const auto reference = dense_model(config_, DType::f64);
  std::vector<std::vector<std::vector<double>>> truth;
  for (const auto& text : texts_) truth.push_back(dense_logits(*reference, text));
  for (const ops::Backend& backend : ops::all_backends()) {
    const DType dtype = backend.dtype;
    const auto model = dense_model(config_, backend);
    std::vector<std::vector<std::vector<double>>> dense;
    for (const auto& text : texts_) dense.push_back(dense_logits(*model, text));
    Decoder decoder(config_, model->parameters(), model->store(), small());
    double all_squares = 0, all_dense_squares = 0;
    for (size_t s = 0; s < schedules_.size(); ++s) {
      double worst = 0, squares = 0, dense_squares = 0;
      for (const auto& [at, logits] : decode(decoder, texts_, schedules_[s])) {
        const auto& [text, position] = at;
        const auto& want = dense[text][size_t(position)];
        const double d = relative_difference(logits, want);
        worst = ops::worse(worst, d);
        squares += std::pow(relative_difference(logits, truth[text][size_t(position)]), 2);
        dense_squares += std::pow(relative_difference(want, truth[text][size_t(position)]), 2);
      }
      all_squares += squares, all_dense_squares += dense_squares;
      if (dtype != DType::bf16) {
        EXPECT_LE(worst, dtype == DType::f64 ? 1e-10 : 1e-4) << backend.name() << " schedule " << s;
      } else if (backend.device == Device::cpu && s + 1 < schedules_.size()) {
        EXPECT_LE(std::sqrt(squares), 1.5 * std::sqrt(dense_squares)) << backend.name() << " schedule " << s;
      }
    }
    if (dtype == DType::bf16) {
      EXPECT_LE(std::sqrt(all_squares), 1.5 * std::sqrt(all_dense_squares)) << backend.name();
    }
    EXPECT_EQ(decoder.free_pages(), decoder.options().pages);
  }
}

// Where the end of text opens the document behind it, its row belongs to that one.
TEST(Decoder, AnEndOfTextThatBeginsADocumentIsSeenInIt) {
  for (const char* family : {"standard", "sps", "delayed_state", "free_pause", "sequential"}) {
    ModelKeys keys = test_models().front().keys;
    keys.family = family, keys.bos = keys.eot;
    keys.window = std::string(family) == "sps" || std::string(family) == "delayed_state" ? 2 : kWindowAuto;
    const ModelConfig c = resolve(keys);
    ASSERT_TRUE(c.eot_begins());
    const auto model = dense_model(c, DType::f64);
    const std::vector<int32_t> text{int32_t(c.eot), 3, 4, int32_t(c.eot), int32_t(c.eot), 5, 6, 7,
                                    int32_t(c.eot), 8};
    const auto want = dense_logits(*model, text);
    for (const int64_t piece : {1, 3, 10}) {
      Decoder decoder(c, model->parameters(), model->store(), {.slots = 1, .page = 4, .step_rows = 20});
      for (const auto& [at, logits] : decode(decoder, {text}, {{0}, {piece}, piece}))
        EXPECT_LE(relative_difference(logits, want[size_t(at.second)]), 1e-10)
            << family << " position " << at.second;
    }
    // A row that the wrong rule would let see more, or less: the one behind the second end of text.
    ModelKeys other = keys;
    other.bos = -1;
    const auto differs = dense_model(resolve(other), DType::f64);
    EXPECT_GT(relative_difference(dense_logits(*differs, text)[5], want[5]), 1e-3) << family;
  }
}

// The same bits alone and in company, whatever the pieces of the prompt.
TEST_P(DecoderTest, BitsDependOnTheTextAlone) {
  for (const ops::Backend& backend : ops::fast_backends()) {
    const auto model = dense_model(config_, backend);
    Decoder decoder(config_, model->parameters(), model->store(), small());
    std::vector<Logits> alone;
    for (const auto& text : texts_) alone.push_back(decode(decoder, {text}, {{0}, {1}, 1}));
    for (size_t s = 0; s < schedules_.size(); ++s)
      for (const auto& [at, logits] : decode(decoder, texts_, schedules_[s])) {
        const auto truth = alone[at.first].find({0, at.second});
        ASSERT_TRUE(logits == truth->second)
            << backend.name() << " schedule " << s << " text " << at.first << " position " << at.second;
      }
  }
}

// Products that read 8 bits: the bits of a decoder on the weights as they are read, in any company. The
// rounded weights are not looked at.
TEST_P(DecoderTest, WeightsIn8BitsAreTheWeightsAsTheyAreRead) {
  const auto model = dense_model(config_, DType::bf16);
  Decoder exact(config_, model->parameters(), model->store(), small());
  const Logits before = decode(exact, texts_, schedules_[1]);
  const Int8Weights weights(model->parameters(), model->store());
  Decoder as_read(config_, model->parameters(), model->store(), small());
  std::vector<Logits> want;
  for (const Schedule& schedule : schedules_) want.push_back(decode(as_read, texts_, schedule));
  EXPECT_FALSE(want[1] == before);
  EXPECT_EQ(as_read.memory().int8, 0u);

  for (size_t i = 0; i < model->parameters().list.size(); ++i)
    ops::fill({}, model->store().rounded(int(i)), std::numeric_limits<double>::quiet_NaN());
  DecoderOptions options = small();
  options.int8 = &weights;
  Decoder decoder(config_, model->parameters(), model->store(), options);
  EXPECT_EQ(decoder.memory().int8, weights.bytes());
  for (size_t s = 0; s < schedules_.size(); ++s)
    EXPECT_TRUE(decode(decoder, texts_, schedules_[s]) == want[s]) << "schedule " << s;
  for (size_t t = 0; t < texts_.size(); ++t)
    for (const auto& [at, logits] : decode(decoder, {texts_[t]}, {{0}, {1}, 1})) {
      const auto together = want[1].find({t, at.second});
      EXPECT_TRUE(together == want[1].end() || logits == together->second) << "text " << t;
    }
}

INSTANTIATE_TEST_SUITE_P(Models, DecoderTest, testing::ValuesIn(test_models()), test_name);

// Widths and heads as real models have them, texts of several pages. As they are initialised, bf16 stays
// within 2e-2 of the largest logit (of 1, where that is smaller) at every position; lively weights magnify
// rounding, which stays within 2e-2 of it in root mean square.
TEST(Decoder, LongerTextsOfWiderModels) {
  const OneThread one_thread;
  for (const auto& [family, window] :
       std::vector<std::pair<std::string, int64_t>>{{"standard", kWindowAuto},
                                                    {"sps", 16},
                                                    {"sps", 0},
                                                    {"reverse_sps", 20},
                                                    {"delayed_state", 5},
                                                    {"free_pause", kWindowAuto},
                                                    {"free_pause", 30},
                                                    {"two_tower", kWindowAuto},
                                                    {"sequential", kWindowAuto}}) {
    ModelKeys keys = small_keys(family, window);
    keys.context = 200, keys.d_model = 128, keys.heads = 2, keys.d_ffn = {320};
    const ModelConfig c = resolve(keys);
    std::vector<int32_t> text = random_text(c, 200, 3, false);
    text[20] = text[70] = text[71] = int32_t(c.eot);
    for (const ops::Backend& backend : ops::fast_backends())
      for (const bool lively : {false, true}) {
        const bool f32 = backend.dtype == DType::f32;
        const auto model = dense_model(c, backend, 4, 0.09);
        if (!lively) model->store().initialise(4);
        const auto dense = dense_logits(*model, text);
        Decoder decoder(c, model->parameters(), model->store(), {.slots = 1, .page = 16, .step_rows = 70});
        for (const int64_t prompt : {1, 150}) {
          double worst = 0, squares = 0, count = 0;
          for (const auto& [at, logits] : decode(decoder, {text}, {{0}, {prompt}, 70})) {
            const auto& want = dense[size_t(at.second)];
            double largest = 0;
            for (const double l : want) largest = std::max(largest, std::abs(l));
            const double d = relative_difference(logits, want);
            worst = ops::worse(worst, f32 ? d : d * largest / std::max(1.0, largest));
            squares += d * d, ++count;
          }
          EXPECT_EQ(count, 200 - prompt + 1);
          EXPECT_LE(f32 || !lively ? worst : std::sqrt(squares / count), f32 ? 1e-4 : 2e-2)
              << family << " " << window << " " << backend.name() << " prompt " << prompt
              << (lively ? " lively" : "");
        }
      }
  }
}

// Without the master weights that products alone read, one pass over a text and decoding are what they were.
TEST_P(DecoderTest, MastersThatProductsAloneReadAreNotMissed) {
  for (const Device device : ops::test_devices()) {
    size_t bytes[2];
    std::vector<std::vector<double>> dense[2];
    Logits decoded[2];
    for (const Masters masters : {Masters::all, Masters::needed}) {
      const auto n = size_t(masters);
      ModelOptions options;
      options.compute = DType::bf16, options.max_rows = config_.context, options.train = false;
      options.device = device, options.masters = masters;
      Model model(config_, options);
      model.store().initialise(3);
      bytes[n] = model.store().bytes();
      dense[n] = dense_logits(model, texts_[0]);
      Decoder decoder(config_, model.parameters(), model.store(), small());
      decoded[n] = decode(decoder, texts_, schedules_[1]);
    }
    EXPECT_TRUE(dense[0] == dense[1] && decoded[0] == decoded[1]);
    EXPECT_LT(bytes[1], bytes[0]);
  }
}

// Batches that grow and shrink, so that counts of rows come again; scratch that has moved in between.
TEST_P(DecoderTest, GraphsAndProgramsChangeNothing) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto model = dense_model(config_, ops::Backend{Device::cuda, dtype});
    Logits made[3][2];
    for (const int mode : {0, 1, 2}) {
      DecoderOptions options = small();
      options.graphs = mode > 0, options.program = mode > 1;
      Decoder decoder(config_, model->parameters(), model->store(), options);
      for (Logits& logits : made[mode]) {
        logits = decode(decoder, texts_, schedules_[1]);
        // Whatever the operations asked for before lies elsewhere now.
        static size_t bytes = size_t{64} << 20;
        bytes += size_t{1} << 16;
        for (const DeviceSlot slot : {DeviceSlot::workspace, DeviceSlot::partial, DeviceSlot::counters})
          device_scratch(open_gpu(), slot, bytes);
      }
    }
    for (const auto& logits : made)
      EXPECT_TRUE(logits[0] == made[0][0] && logits[1] == made[0][0]) << dtype_name(dtype);
  }
}

// Heads that attention turns itself in steps of one position, and the pieces of prompts that it does not: the
// same bits, by programs, graphs of single operations or without. Steps are short: few rows of both streams
// for a product.
TEST(Decoder, WiderModelsOnAGpuGiveTheSameBitsInAnyPieces) {
  if (gpu_count() == 0) GTEST_SKIP() << "no GPU";
  struct Kind {
    std::string family;
    int64_t window;
    bool qk_norm;
    int64_t head_dim = 64;
  };
  for (const auto& [family, window, qk_norm, head_dim] :
       {Kind{"standard", kWindowAuto, true}, Kind{"standard", kWindowAuto, false, 128},
        Kind{"sps", 16, false}, Kind{"sps", 0, true}, Kind{"sps", 16, true, 96},
        Kind{"free_pause", kWindowAuto, false}, Kind{"free_pause", kWindowAuto, true, 128},
        Kind{"reverse_sps", 20, true}, Kind{"two_tower", kWindowAuto, true}, Kind{"delayed_state", 5, true},
        Kind{"sequential", kWindowAuto, true}}) {
    ModelKeys keys = small_keys(family, window);
    keys.context = 200, keys.d_model = 2 * head_dim, keys.heads = 2, keys.d_ffn = {320},
    keys.qk_norm = qk_norm;
    const ModelConfig c = resolve(keys);
    std::vector<std::vector<int32_t>> texts{random_text(c, 200, 1, false), random_text(c, 170, 2, false)};
    texts[0][140] = int32_t(c.eot);
    const auto model = dense_model(c, ops::Backend{Device::cuda, DType::bf16}, 4, 0.09);
    std::vector<Logits> made;
    const Schedule singly{{0, 20}, {1, 1}, 1}, in_pieces{{0, 3}, {150, 60}, 15};
    for (const auto& [schedule, graphs, program] : std::vector<std::tuple<Schedule, bool, bool>>{
             {singly, true, true}, {singly, true, false}, {singly, false, false}, {in_pieces, true, true}}) {
      Decoder decoder(c, model->parameters(), model->store(),
                      {.slots = 2, .page = 16, .step_rows = 32, .graphs = graphs, .program = program});
      made.push_back(decode(decoder, texts, schedule));
    }
    EXPECT_TRUE(made[0] == made[1] && made[0] == made[2]) << family << " " << window << " " << head_dim;
    for (const auto& [at, logits] : made[3])
      ASSERT_TRUE(logits == made[0].at(at))
          << family << " " << window << " text " << at.first << " position " << at.second;
  }
}

// Programs give the same bits when their stages wait for each other; only their clocks would tell.
TEST(Decoder, ProgramsGoByMail) {
  if (gpu_count() == 0 || !ops::DecodeProgram::usable(open_gpu())) GTEST_SKIP() << "no GPU with programs";
  for (const auto& [family, qk_norm] : {std::pair{"standard", true},
                                        {"sps", false},
                                        {"sps", true},
                                        {"free_pause", false},
                                        {"free_pause", true}}) {
    ModelKeys keys = small_keys(family, kWindowAuto);
    keys.context = 64, keys.d_model = 128, keys.heads = 2, keys.d_ffn = {320}, keys.qk_norm = qk_norm;
    const ModelConfig c = resolve(keys);
    const auto model = dense_model(c, ops::Backend{Device::cuda, DType::bf16}, 4, 0.09);
    Decoder decoder(c, model->parameters(), model->store(), {.slots = 2, .page = 16, .step_rows = 32});
    decode(decoder, {random_text(c, 40, 1, false), random_text(c, 30, 2, false)}, {{0, 20}, {1, 1}, 1});
    const auto launches = decoder.program_launches();
    EXPECT_GT(launches.all, 0) << family;
    EXPECT_EQ(launches.by_mail, launches.all) << family;
  }
}

// A batch whose rows and keys are cut into pieces for the threads.
TEST(Decoder, ThreadsChangeNothing) {
  ModelKeys keys = small_keys("sps", 16);
  keys.context = 200, keys.d_model = 128, keys.heads = 2, keys.d_ffn = {320};
  const ModelConfig c = resolve(keys);
  const std::vector<std::vector<int32_t>> texts{random_text(c, 200, 1, false), random_text(c, 90, 2, false)};
  const int before = thread_count();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto model = dense_model(c, dtype, 4, 0.09);
    Logits made[2];
    for (const int threads : {1, 2}) {
      set_thread_count(threads);
      Decoder decoder(c, model->parameters(), model->store(), {.slots = 2, .page = 16, .step_rows = 120});
      made[threads - 1] = decode(decoder, texts, {{0, 20}, {100, 60}, 60});
    }
    EXPECT_TRUE(made[0] == made[1]) << dtype_name(dtype);
  }
  set_thread_count(before);
}

}  // namespace
}  // namespace sps
