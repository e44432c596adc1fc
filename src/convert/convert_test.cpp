#include "convert/convert.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "base/hash.h"
#include "base/test_dir.h"
#include "base/test_files.h"
#include "convert/tensor_files.h"
#include "convert/test_llama.h"
#include "data/batch.h"
#include "model/load.h"
#include "score/model_input.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/test_score_bpe.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

const std::vector<int32_t>& some_ids() {
  static const std::vector<int32_t> ids{1, 270, 7, 99, 259, 280, 3, 3, 140, 0, 5};
  return ids;
}

std::string as_it_is(const std::string& name) {
  return name;
}

// Hugging Face's folder of a model.
void write_hugging_face(const TestLlama& llama, const fs::path& folder, StoredType type = StoredType::f32) {
  fs::create_directories(folder);
  llama.split().write(folder / "model.safetensors", TestLlama::hugging_face_name, type);
  write_atomically(folder / "config.json", dump_json(llama.config()));
}

void write_meta(const TestLlama& llama, const fs::path& folder) {
  fs::create_directories(folder);
  llama.write(folder / "consolidated.safetensors", as_it_is);
  write_atomically(folder / "params.json", dump_json(llama.params()));
}

ConvertOptions from(const fs::path& in, const fs::path& out, int64_t bos = 1, int64_t eot = 1) {
  ConvertOptions options;
  options.in = in, options.out = out;
  options.given.bos = bos, options.given.eot = eot;
  return options;
}

// What the checkpoint's model gives after the ids, in f32.
std::vector<float> checkpoint_logits(const fs::path& checkpoint, std::vector<int32_t> ids) {
  const LoadedModel loaded = load_model(checkpoint, DType::f32);
  const ModelConfig& c = loaded.model->config();
  const auto last = int32_t(ids.size()) - 1;
  ids.push_back(0);
  Batch batch;
  batch.fill(ids, int64_t(ids.size()) - 1, special_ids(c));
  std::vector<float> logits(static_cast<size_t>(c.vocab));
  loaded.model->logits(model_input(batch), std::span(&last, 1), view(logits.data(), 1, c.vocab));
  return logits;
}

// f32 against f64: some hundred roundings of numbers below 10.
void expect_logits(const fs::path& checkpoint, const TestLlama& llama) {
  const auto got = checkpoint_logits(checkpoint, some_ids());
  const auto want = llama.logits(some_ids());
  ASSERT_EQ(got.size(), want.size());
  double largest = 0, difference = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::abs(want[i]));
    difference = std::max(difference, std::abs(double(got[i]) - want[i]));
  }
  EXPECT_GT(largest, 0.5);
  EXPECT_LT(difference, 2e-5 * largest) << checkpoint;
}

TEST(Convert, OneModelInEveryFormatIsOneCheckpoint) {
  for (const bool tied : {true, false}) {
    const TestDir dir;
    TestLlama llama;
    llama.tied = tied;
    llama.randomise(3);
    dir.write("llama.bin", llama.llama2c_file());
    write_meta(llama, dir / "meta");
    write_hugging_face(llama, dir / "hf");
    dir.write("bare/x", "");
    llama.write(dir / "bare/model.safetensors", as_it_is);
    // In two files: every second tensor.
    const SafeTensors whole(dir / "hf/model.safetensors");
    std::map<std::string, StoredTensor> parts[2];
    nlohmann::json index;
    size_t n = 0;
    for (const auto& [name, tensor] : whole.tensors()) {
      index["weight_map"][name] = fmt::format("model-{}.safetensors", n % 2);
      parts[n++ % 2][name] = tensor;
    }
    dir.write("shards/model.safetensors.index.json", dump_json(index));
    dir.write("shards/config.json", dump_json(llama.config()));
    for (size_t i = 0; i < 2; ++i)
      write_safetensors(dir / fmt::format("shards/model-{}.safetensors", i), parts[i]);

    convert_model(from(dir / "llama.bin", dir / "a"));
    convert_model(from(dir / "meta", dir / "b"));
    convert_model(from(dir / "hf", dir / "c"));
    convert_model(from(dir / "shards", dir / "d"));
    ConvertOptions options = from(dir / "bare/model.safetensors", dir / "e");
    options.given.heads = llama.heads, options.given.context = llama.context;
    convert_model(options);
    expect_logits(dir / "a", llama);
    const auto first = load_checkpoint(dir / "a");
    for (const char* other : {"b", "c", "d", "e"}) {
      EXPECT_EQ(read_text(dir / other / "weights.safetensors"), read_text(dir / "a/weights.safetensors"))
          << other;
      EXPECT_EQ(load_checkpoint(dir / other).config["model"], first.config["model"]) << other;
    }
    const ModelConfig config = checkpoint_model_config(first);
    EXPECT_EQ(config.tie_head, tied);
    EXPECT_EQ(config.state.kv_heads, 2);
    EXPECT_TRUE(config.eot_begins());
  }
}

// Hugging Face's formula and order, computed as they stand there (peer-faults 74).
TEST(Convert, RotaryPartsBasesAndWindowsAreThoseOfTheFile) {
  const TestDir dir;
  int n = 0;
  for (const double part : {1.0, 0.5})
    for (const int64_t window : {0, 4}) {
      if (part < 1 && window > 0) continue;
      TestLlama llama;
      llama.width = 32, llama.theta = 500, llama.eps = 0.01, llama.rotary = part, llama.window = window;
      llama.randomise(5);
      const fs::path folder = dir / fmt::format("in{}", n), out = dir / fmt::format("out{}", n++);
      write_hugging_face(llama, folder);
      convert_model(from(folder, out));
      expect_logits(out, llama.split());
      expect_logits(out, llama);
    }
  EXPECT_EQ(n, 3);
}

TEST(Convert, HalfPrecisionIsReadExactly) {
  const TestDir dir;
  TestLlama llama;
  llama.randomise(7);
  write_hugging_face(llama, dir / "in", StoredType::bf16);
  for (auto& [name, values] : llama.tensors)
    for (float& v : values) v = bf16(v);
  convert_model(from(dir / "in", dir / "narrow"));
  write_hugging_face(llama, dir / "wide-in");
  convert_model(from(dir / "wide-in", dir / "wide"));
  EXPECT_EQ(read_text(dir / "narrow/weights.safetensors"), read_text(dir / "wide/weights.safetensors"));

  // All finite f16 there are.
  std::vector<uint16_t> halves;
  std::vector<double> want;
  for (int sign = 0; sign < 2; ++sign)
    for (int exponent = 0; exponent < 31; ++exponent)
      for (int fraction = 0; fraction < 1024; ++fraction) {
        halves.push_back(uint16_t(sign << 15 | exponent << 10 | fraction));
        const double magnitude = exponent == 0 ? fraction * std::pow(2.0, -24)
                                               : (1 + fraction / 1024.0) * std::pow(2.0, exponent - 15);
        want.push_back(sign == 0 ? magnitude : -magnitude);
      }
  std::vector<float> got(halves.size());
  read_floats({StoredType::f16, {int64_t(halves.size())}, halves.data(), 2 * halves.size()}, got.data());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(double(got[i]), want[i]) << i;
}

TEST(Convert, KeepsTheTokenizerAndWhereItCameFrom) {
  const TestDir dir;
  TestLlama llama;
  llama.randomise(9);
  const fs::path model = dir.write("llama.bin", llama.llama2c_file());
  const fs::path tok = dir.write("tok.bin", llama2c_tokenizer_file(small_score_bpe()));
  ConvertOptions options;
  options.in = model, options.out = dir / "deep/er/out", options.tokenizer = tok;
  const Converted converted = convert_model(options);
  EXPECT_EQ(converted.tokenizer, "score-bpe-281");
  const LoadedCheckpoint loaded = load_checkpoint(options.out);
  EXPECT_TRUE(loaded.has_tokenizer);
  EXPECT_EQ(loaded.tokens, 0);
  EXPECT_EQ(loaded.config["model"]["bos"], 1);
  EXPECT_EQ(loaded.config["model"]["eot"], 1);
  EXPECT_EQ(make_tokenizer((options.out / "tokenizer.json").string())->fingerprint(),
            ScoreBpeTokenizer(small_score_bpe()).fingerprint());
  const nlohmann::json& source = loaded.config["source"];
  EXPECT_EQ(source["format"], "llama2.c");
  const std::string bytes = read_text(model);
  EXPECT_EQ(source["files"]["llama.bin"]["xxh3"], hex(hash64(bytes)));
  EXPECT_EQ(source["files"]["llama.bin"]["bytes"], bytes.size());
  EXPECT_EQ(source["files"]["tok.bin"]["xxh3"], hex(hash64(read_text(tok))));
}

// The ids that stand around texts: the tokenizer's template decides about the first.
TEST(Convert, BeginAndEndOfTextAreFound) {
  const TestDir dir;
  TestLlama llama;
  llama.randomise(9);
  write_hugging_face(llama, dir / "in");
  const auto ids = [&](const ConvertOptions& options) {
    const ModelConfig c = convert_model(options).config;
    fs::remove_all(dir / "out");
    return std::pair(c.bos, c.eot);
  };
  ConvertOptions options;
  options.in = dir / "in", options.out = dir / "out";
  EXPECT_EQ(ids(options), std::pair(int64_t{1}, int64_t{2}));
  nlohmann::json config = llama.config();
  config["bos_token_id"] = 2;
  dir.write("in/config.json", dump_json(config));
  EXPECT_EQ(ids(options), std::pair(int64_t{-1}, int64_t{2}));
  // A byte-level BPE of 257 ids, and templates.
  nlohmann::json tokenizer = {
      {"added_tokens", {{{"id", 256}, {"content", "</s>"}, {"special", true}}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"model", {{"type", "BPE"}, {"vocab", nlohmann::json::object()}, {"merges", nlohmann::json::array()}}}};
  const ByteTokenizer bytes;
  for (int32_t b = 0; b < 256; ++b) tokenizer["model"]["vocab"][to_alphabet(bytes.token_bytes(b))] = b;
  dir.write("in/tokenizer.json", dump_json(tokenizer));
  EXPECT_EQ(ids(options), std::pair(int64_t{-1}, int64_t{256}));
  const nlohmann::json step = {
      {"type", "TemplateProcessing"},
      {"single", {{{"SpecialToken", {{"id", "<s>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
      {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {255}}}}}}};
  tokenizer["post_processor"] = step;
  dir.write("in/tokenizer.json", dump_json(tokenizer));
  EXPECT_EQ(ids(options), std::pair(int64_t{255}, int64_t{256}));
  tokenizer["post_processor"] = {{"type", "Sequence"}, {"processors", {{{"type", "ByteLevel"}}, step}}};
  dir.write("in/tokenizer.json", dump_json(tokenizer));
  EXPECT_EQ(ids(options), std::pair(int64_t{255}, int64_t{256}));
  options.given.bos = -1;
  EXPECT_EQ(ids(options), std::pair(int64_t{-1}, int64_t{256}));
}

}  // namespace
}  // namespace sps
