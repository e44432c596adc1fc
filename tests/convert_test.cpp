// Imported models as people use them: sps convert, then info, eval, generate and train.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "base/json.h"
#include "convert/test_llama.h"
#include "data/batch.h"
#include "data/test_corpus.h"
#include "data/token_file.h"
#include "infer/decoder.h"
#include "infer/sampling.h"
#include "model/load.h"
#include "program.h"
#include "score/model_input.h"
#include "tensor/device.h"
#include "tokenizer/test_score_bpe.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

fs::path write_ids(const TestDir& dir, const std::string& name, const std::vector<int32_t>& ids) {
  TokenWriter writer(dir / name, TokenType::u16);
  writer.append(ids);
  writer.commit();
  return dir / name;
}

// A small model of llama2.c with its tokenizer, converted into "model".
class ConvertProgram : public testing::Test {
 protected:
  ConvertProgram() {
    llama_.randomise(4);
    dir_.write("llama.bin", llama_.llama2c_file());
    dir_.write("tok.bin", llama2c_tokenizer_file(small_score_bpe()));
    converted_ = json_of(dir_, {"convert", "llama.bin", "--tokenizer", "tok.bin", "--out", "model"});
  }
  TestDir dir_;
  TestLlama llama_;
  nlohmann::json converted_;
};

TEST_F(ConvertProgram, InfoEvalAndGenerateTakeIt) {
  EXPECT_EQ(converted_.at("vocab"), 281);
  EXPECT_EQ(converted_.at("bos"), 1);
  EXPECT_EQ(json_of(dir_, {"info", "model"}).at("config").at("d_model"), 16);
  EXPECT_PRED2(mentions, run_program(dir_.path(), {"info", "model"}).out, "begin of text 1");

  // The mean over a file is that of the formulas; every position counts, the begin of text too.
  const std::vector<int32_t> ids{1, 270, 7, 99, 259, 280, 1, 3, 140, 0, 5, 260, 261};
  const fs::path file = write_ids(dir_, "ids.bin", ids);
  const auto scored = json_of(dir_, {"eval", "model", "--data", file.string(), "--dtype", "f32"});
  double nll = 0;
  for (size_t i = 0; i + 1 < ids.size(); ++i) {
    const size_t begin = i < 6 ? 0 : 6;  // the second text
    const auto logits = llama_.logits(std::span(ids).subspan(begin, i + 1 - begin));
    double total = 0;
    for (const double l : logits) total += std::exp(l);
    nll += std::log(total) - logits[size_t(ids[i + 1])];
  }
  EXPECT_EQ(scored.at("scored"), 12);
  EXPECT_NEAR(scored.at("nats_per_token").get<double>(), nll / 12, 1e-5);

  // The most likely ids one by one, from a begin of text and from a prompt behind one.
  const ScoreBpeTokenizer tokenizer(small_score_bpe());
  for (const std::string prompt : {"", "the"}) {
    std::vector<int32_t> text{1};
    tokenizer.encode(prompt, text);
    for (int i = 0; i < 6; ++i) {
      const auto logits = llama_.logits(text);
      text.push_back(int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      if (text.back() == 1) break;
    }
    const Outcome o = run_program(dir_.path(), {"generate", "model", "--prompt", prompt, "--tokens", "6",
                                                "--temperature", "0", "--dtype", "f32"});
    std::string want;  // the bytes as they are: a pipe gets no U+FFFD
    int32_t previous = -1;
    for (const int32_t id : text) want += tokenizer.text_of(id, std::exchange(previous, id));
    EXPECT_EQ(o.out, want + "\n");
    EXPECT_EQ(o.status, 0) << o.err;
  }
}

// Weights that are finite and whose logits are not.
TEST_F(ConvertProgram, LogitsThatAreNoNumbersAreAnError) {
  for (float& gain : llama_.tensors.at("norm.weight")) gain = 3e38F;
  dir_.write("large.bin", llama_.llama2c_file());
  json_of(dir_, {"convert", "large.bin", "--tokenizer", "tok.bin", "--out", "large"});
  dir_.write("prompts.jsonl", "{\"prompt\": \"the\"}\n");
  for (const Arguments& more :
       {Arguments{}, {"--temperature", "1"}, {"--json"}, {"--file", "prompts.jsonl"}}) {
    const Outcome o =
        run_program(dir_.path(), Arguments{"generate", "large", "--tokens", "4", "--dtype", "f32"} + more);
    EXPECT_EQ(o.status, 1);
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(lines_of(o.err).size(), 1u) << o.err;
    EXPECT_PRED2(mentions, o.err, "is not a number");
  }
}

TEST_F(ConvertProgram, ItsTokenizerPreparesDataAndATowerIsTrainedOnIt) {
  dir_.write("text.jsonl", test_documents(40, 1));
  const Outcome prepared = run_program(dir_.path(), {"prepare", "text.jsonl", "--tokenizer", "tok.bin",
                                                     "--val-fraction", "0.2", "--out", "data"});
  ASSERT_EQ(prepared.status, 0) << prepared.err;
  EXPECT_EQ(run_program(dir_.path(), {"data", "check", "data"}).status, 0);
  const auto scored = json_of(dir_, {"eval", "model", "--data", "data", "--tokens", "48"});
  EXPECT_GT(scored.at("bits_per_byte").get<double>(), 0);
  const Arguments train{"train",
                        "demo_sequential_2+2_15k",
                        "data.dir=data",
                        "run.dir=run",
                        "freeze.from=model",
                        "model.d_model=16",
                        "model.heads=4",
                        "model.kv_heads=2",
                        "model.d_ffn=20",
                        "model.vocab=281",
                        "model.bos=1",
                        "model.context=12",
                        "model.norm_eps=1e-5",
                        "model.rope_theta=10000",
                        "model.tie_head=false",
                        "model.pred_input=vector",
                        "train.global_batch=4",
                        "train.micro_batch=4",
                        "train.tokens=480",
                        "run.dtype=f32",
                        "schedule.warmup_tokens=0",
                        "schedule.decay_tokens=48"};
  const Outcome trained = run_program(dir_.path(), train);
  EXPECT_EQ(trained.status, 0) << trained.err;
  // Without the begin of text the state would be another.
  Arguments other = train;
  other[11] = "model.bos=-1", other[3] = "run.dir=other";
  const Outcome refused = run_program(dir_.path(), other);
  EXPECT_EQ(refused.status, 2);
  EXPECT_PRED2(mentions, refused.err, "model.bos = 1");
}

// Where begin and end of text differ, prepared documents have both; a large one, which is encoded in parts,
// too.
TEST_F(ConvertProgram, DocumentsBeginWithABeginOfTextThatIsNotTheirEnd) {
  const std::string large(size_t{3} << 20, 't');
  dir_.write("text.jsonl", dump_json(nlohmann::json{{"text", "the thing"}}) + "\n" +
                               dump_json(nlohmann::json{{"text", large}}) + "\n");
  const Outcome o = run_program(dir_.path(), {"prepare", "text.jsonl", "--tokenizer", "tok.bin", "--eot",
                                              "\n</s>\n", "--val-fraction", "0", "--out", "data"});
  ASSERT_EQ(o.status, 0) << o.err;
  const TokenFile file = TokenFile::open(dir_ / "data");
  std::vector<int32_t> ids(static_cast<size_t>(file.size()));
  file.read(0, file.size(), ids.data());
  const ScoreBpeTokenizer tokenizer(small_score_bpe());
  std::vector<std::string> texts;
  for (size_t begin = 0; begin < ids.size();) {
    ASSERT_EQ(ids[begin], 1);
    const auto end = size_t(std::find(ids.begin() + std::ptrdiff_t(begin), ids.end(), 2) - ids.begin());
    ASSERT_LT(end, ids.size());
    texts.push_back(tokenizer.decode(std::span(ids).subspan(begin, end - begin)));
    begin = end + 1;
  }
  std::sort(texts.begin(), texts.end());
  EXPECT_EQ(texts, (std::vector<std::string>{"the thing", large}));
}

TEST_F(ConvertProgram, MistakesLeaveNothing) {
  const auto fails = [&](const Arguments& arguments, int status, const std::string& mention) {
    const size_t before = dir_.count_entries();
    const Outcome o = run_program(dir_.path(), Arguments{"convert"} + arguments);
    EXPECT_EQ(o.status, status) << o.err;
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(lines_of(o.err).size(), 1u) << o.err;
    EXPECT_PRED2(mentions, o.err, mention);
    EXPECT_EQ(dir_.count_entries(), before);
  };
  dir_.write("cut.bin", llama_.llama2c_file().substr(0, 1000));
  fails({"cut.bin", "--out", "new"}, 1, "has 1000 bytes");
  fails({"llama.bin", "--out", "model"}, 2, "there already");
  fails({"llama.bin"}, 2, "--out");
  fails({"nothing.bin", "--out", "new"}, 2, "nothing.bin");
  fails({"llama.bin", "--out", "new", "--heads", "0"}, 2, "--heads 0");
  fails({"llama.bin", "--out", "new", "--context", "100"}, 2, "--context 100");
  fails({"llama.bin", "--out", "new", "--tokenizer", "llama.bin"}, 1, "llama.bin");
}

// The pretrained model, where it is at hand.
class Stories : public testing::TestWithParam<std::string> {
 protected:
  static fs::path folder() { return fs::path(SPS_SOURCE_DIR) / "../shared/data/models/stories260K"; }
  void SetUp() override {
    if (!fs::exists(folder() / GetParam())) GTEST_SKIP() << "stories260K is not here";
    convert("model", {});
  }
  void convert(const std::string& out, const Arguments& more) {
    Arguments arguments{"convert",     (folder() / GetParam()).string(),
                        "--tokenizer", (folder() / "tok512.bin").string(),
                        "--out",       out};
    if (GetParam().ends_with(".safetensors") && more.empty())
      arguments = arguments + Arguments{"--context", "512"};
    if (GetParam().ends_with(".safetensors")) arguments = arguments + Arguments{"--heads", "8"};
    const Outcome o = run_program(dir_.path(), arguments + more);
    ASSERT_EQ(o.status, 0) << o.err;
  }
  TestDir dir_;
};

// Names of --device: a GPU too where there is one.
std::vector<std::string> device_names() {
  return gpu_count() > 0 ? std::vector<std::string>{"cpu", "cuda"} : std::vector<std::string>{"cpu"};
}

TEST_P(Stories, TellsItsStoryWordForWord) {
  for (const std::string& device : device_names()) {
    const Outcome o = run_program(dir_.path(), {"generate", "model", "--tokens", "256", "--temperature", "0",
                                                "--dtype", "f32", "--device", device});
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_EQ(o.out, read_text(folder() / "expected_greedy_run_c.txt")) << device;
  }
}

// Of every token of the story the probability that the reference gives it, as the program draws them.
TEST_P(Stories, DrawsTheStoryWithTheLossesOfTheReference) {
  const auto reference = parse_json(read_text(folder() / "reference.json"), "reference.json");
  const auto& story = reference.at("cases")[0];
  for (const std::string& device : device_names()) {
    const auto told = json_of(dir_, {"generate", "model", "--tokens", "256", "--temperature", "0", "--dtype",
                                     "f32", "--device", device, "--log-probabilities"});
    EXPECT_EQ(told.at("text"), story.at("text"));
    ASSERT_EQ(told.at("log_probabilities").size(), 256u);
    for (size_t i = 0; i < 256; ++i)
      EXPECT_NEAR(-told["log_probabilities"][i].get<double>(), story.at("nll")[i].get<double>(), 1e-4)
          << device << " token " << i;
  }
}

// What comes out of the caches at every position, the prompt in pieces and one by one.
TEST_P(Stories, DecodesToTheLossesAndLogitsOfTheReference) {
  const auto reference = parse_json(read_text(folder() / "reference.json"), "reference.json");
  for (const std::string& device : device_names()) {
    const LoadedModel loaded =
        load_model(dir_ / "model", DType::f32, 1, device == "cuda" ? Device::cuda : Device::cpu);
    const Model& model = *loaded.model;
    Decoder decoder(model.config(), model.parameters(), model.store(), {.slots = 1, .step_rows = 100});
    for (const auto& one : reference.at("cases"))
      for (const size_t prompt : {size_t{1}, one.at("tokens").size()}) {
        const auto ids = one.at("tokens").get<std::vector<int32_t>>();
        const int64_t slot = decoder.open();
        for (size_t at = 0; at < ids.size();) {
          const size_t left = std::max(at + 1, prompt) - at, n = std::min<size_t>(left, 100);
          const Decoder::Run run{slot, std::span(ids).subspan(at, n), int64_t(left - n)};
          const OnHost host(decoder.step({&run, 1}));
          at += n;
          if (run.left > 0) continue;
          const std::span<const float> logits((*host).row<float>(0), size_t(model.config().vocab));
          if (at < ids.size()) {
            EXPECT_NEAR(-log_probability(logits, ids[at]), one.at("nll")[at - 1].get<double>(), 1e-4);
            continue;
          }
          for (size_t id = 0; id < logits.size(); ++id)
            EXPECT_NEAR(logits[id], one.at("last_logits")[id].get<double>(), 1e-4) << device;
        }
        decoder.close(slot);
      }
  }
}

// What 8 bits cost is measured as a loss: it moves, by less than a hundredth of what it is.
TEST_P(Stories, WeightsIn8BitsCostLittle) {
  const auto reference = parse_json(read_text(folder() / "reference.json"), "reference.json");
  for (size_t n = 0; n < reference.at("cases").size(); ++n) {
    const auto& one = reference["cases"][n];
    const auto ids = one.at("tokens").get<std::vector<int32_t>>();
    const fs::path file = write_ids(dir_, fmt::format("{}.bin", n), ids);
    const std::string name = fmt::format("case-{}", n);
    convert(name, {"--context", std::to_string(ids.size() - 1)});
    const auto loss = [&](const Arguments& more) {
      return json_of(dir_, Arguments{"eval", name, "--data", file.string(), "--device", "cpu"} + more)
          .at("nats_per_token")
          .get<double>();
    };
    const double exact = one.at("mean_nll"), bf16 = loss({"--dtype", "bf16"}),
                 int8 = loss({"--dtype", "bf16", "--weights", "int8"});
    EXPECT_NE(int8, bf16);
    EXPECT_NEAR(bf16, exact, 0.01 * exact) << name;
    EXPECT_NEAR(int8, exact, 0.01 * exact) << name;
  }
}

TEST_P(Stories, HasTheLossesAndLogitsOfTheReference) {
  const auto reference = parse_json(read_text(folder() / "reference.json"), "reference.json");
  const auto tokenizer = make_tokenizer((dir_ / "model/tokenizer.json").string());
  std::vector<LoadedModel> loaded;
  for (const std::string& device : device_names())
    loaded.push_back(
        load_model(dir_ / "model", DType::f32, 0, device == "cuda" ? Device::cuda : Device::cpu));
  const ModelConfig& c = loaded[0].model->config();
  EXPECT_EQ(c.state.kv_heads, 4);
  size_t cases = 0;
  for (const auto& one : reference.at("cases")) {
    auto ids = one.at("tokens").get<std::vector<int32_t>>();
    std::vector<int32_t> encoded{1};
    tokenizer->encode(one.at("text").get<std::string>(), encoded);
    // The first text is a story that the model tells: ids of another cut of the same text.
    if (cases > 0) {
      EXPECT_EQ(encoded, ids);
    }
    EXPECT_EQ(tokenizer->decode(ids), one.at("text").get<std::string>());

    auto with_next = ids;
    with_next.push_back(0);
    const auto last = int32_t(ids.size()) - 1;
    for (const LoadedModel& there : loaded) {
      Batch batch;
      batch.fill(ids, last, special_ids(c));
      std::vector<double> nll(static_cast<size_t>(last));
      there.model->evaluate(model_input(batch), nll);
      for (size_t i = 0; i < nll.size(); ++i) EXPECT_NEAR(nll[i], one.at("nll")[i].get<double>(), 1e-4);
      std::vector<float> logits(static_cast<size_t>(c.vocab));
      batch.fill(with_next, last + 1, special_ids(c));
      there.model->logits(model_input(batch), std::span(&last, 1), view(logits.data(), 1, c.vocab));
      for (size_t i = 0; i < logits.size(); ++i)
        EXPECT_NEAR(logits[i], one.at("last_logits")[i].get<double>(), 1e-4);
    }

    // The same through the program: one window of this text.
    const std::string name = fmt::format("case-{}", cases++);
    const fs::path file = write_ids(dir_, name + ".bin", ids);
    convert(name, {"--context", std::to_string(ids.size() - 1)});
    for (const std::string& device : device_names()) {
      const auto scored =
          json_of(dir_, {"eval", name, "--data", file.string(), "--dtype", "f32", "--device", device});
      EXPECT_EQ(scored.at("scored"), ids.size() - 1);
      EXPECT_NEAR(scored.at("nats_per_token").get<double>(), one.at("mean_nll").get<double>(), 1e-4);
    }
  }
  EXPECT_EQ(cases, 4u);
}

INSTANTIATE_TEST_SUITE_P(Files, Stories, testing::Values("stories260K.bin", "stories260K.safetensors"),
                         [](const auto& info) { return info.param.substr(info.param.find('.') + 1); });

}  // namespace
}  // namespace sps
