// Wrong models: one sentence that names the fault, and nothing is written.
#include <gtest/gtest.h>

#include <functional>

#include "base/files.h"
#include "base/test_dir.h"
#include "base/test_files.h"
#include "base/test_memory.h"
#include "convert/convert.h"
#include "convert/llama2c.h"
#include "convert/test_llama.h"
#include "tokenizer/test_score_bpe.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A folder with sound models, of which a test damages one.
class ConvertFaults : public testing::Test {
 protected:
  ConvertFaults() {
    llama_.randomise(1);
    dir_.write("llama.bin", llama_.llama2c_file());
    dir_.write("tok.bin", llama2c_tokenizer_file(small_score_bpe()));
    fs::create_directories(dir_ / "hf");
    llama_.split().write(dir_ / "hf/model.safetensors", TestLlama::hugging_face_name);
    write_config([](json&) {});
    fs::create_directories(dir_ / "meta");
    llama_.write(dir_ / "meta/model.safetensors", [](const std::string& name) { return name; });
    write_params([](json&) {});
  }
  void write_config(const std::function<void(json&)>& change) {
    json config = llama_.config();
    change(config);
    dir_.write("hf/config.json", dump_json(config));
  }
  void write_params(const std::function<void(json&)>& change) {
    json params = llama_.params();
    change(params);
    dir_.write("meta/params.json", dump_json(params));
  }
  // The tensors of hf, changed, in one file.
  void write_tensors(const std::function<void(std::map<std::string, StoredTensor>&)>& change) {
    const fs::path path = dir_ / "hf/model.safetensors";
    fs::remove(path);
    const fs::path whole = dir_ / "whole.safetensors";
    llama_.split().write(whole, TestLlama::hugging_face_name);
    const SafeTensors file(whole);
    auto tensors = file.tensors();
    change(tensors);
    write_safetensors(path, tensors);
    fs::remove(whole);
  }
  // The sentence; also checks that nothing else has changed on the disk.
  std::string error(const std::string& in, const std::function<void(ConvertOptions&)>& change = {}) {
    ConvertOptions options;
    options.in = dir_ / in, options.out = dir_ / "out";
    options.given.eot = 1;
    if (change) change(options);
    const auto before = folder_content(dir_.path());
    const std::string sentence = error_of([&] { convert_model(options); });
    EXPECT_EQ(folder_content(dir_.path()), before) << sentence;
    EXPECT_EQ(sentence.find('\n'), std::string::npos) << sentence;
    return sentence;
  }

  TestDir dir_;
  TestLlama llama_;
};

TEST_F(ConvertFaults, SoundOnesAreTaken) {
  int n = 0;
  for (const char* in : {"llama.bin", "hf", "meta"}) {
    ConvertOptions options;
    options.in = dir_ / in, options.out = dir_ / fmt::format("out{}", n++);
    options.given.eot = 1;
    EXPECT_NO_THROW(convert_model(options)) << in;
  }
}

TEST_F(ConvertFaults, FilesOfLlama2cOfAnotherSize) {
  const std::string good = llama_.llama2c_file();
  for (const size_t size : {size_t{0}, size_t{27}, size_t{28}, good.size() - 4, good.size() - 1}) {
    dir_.write("llama.bin", good.substr(0, size));
    EXPECT_PRED2(mentions, error("llama.bin"), fmt::format("has {} bytes", size));
  }
  dir_.write("llama.bin", good + "x");
  EXPECT_PRED2(mentions, error("llama.bin"), fmt::format("has {} bytes", good.size() + 1));
}

TEST_F(ConvertFaults, AbsurdHeadersOfLlama2c) {
  const std::string good = llama_.llama2c_file();
  const auto with = [&](size_t field, int32_t value) {
    std::string bad = good;
    std::memcpy(bad.data() + 4 * field, &value, sizeof value);
    return bad;
  };
  const uint64_t memory = memory_growth([&] {
    for (size_t field = 0; field < 7; ++field)
      for (const int32_t value : {0, -1, 1, INT32_MAX, INT32_MIN, 1 << 20, 3}) {
        const std::string bad = with(field, value);
        const std::string sentence = error_of([&] { Llama2cFile(std::as_bytes(std::span(bad)), "bad.bin"); });
        EXPECT_PRED2(mentions, sentence, "bad.bin") << field << " " << value;
      }
  });
  EXPECT_LT(memory, uint64_t{64} << 20);
  dir_.write("llama.bin", with(0, 0x616b3432));
  EXPECT_PRED2(mentions, error("llama.bin"), "expected version 0");
}

TEST_F(ConvertFaults, TensorsThatAreMissingOrWrong) {
  const std::string k = "model.layers.1.self_attn.k_proj.weight";
  write_tensors([&](auto& t) { t.erase(k); });
  EXPECT_PRED2(mentions, error("hf"), "no tensor '" + k + "'");
  write_tensors([&](auto& t) { std::swap(t[k].shape[0], t[k].shape[1]); });
  EXPECT_PRED2(mentions, error("hf"), "shape [16, 8], expected [8, 16]");
  write_tensors([&](auto& t) { t[k].dtype = StoredType::i32; });
  EXPECT_PRED2(mentions, error("hf"), "dtype I32, expected F32, F16 or BF16");
  write_tensors([&](auto& t) { t["model.layers.0.self_attn.q_proj.bias"] = t["model.norm.weight"]; });
  EXPECT_PRED2(mentions, error("hf"), "q_proj.bias");
  write_tensors(
      [&](auto& t) { t["model.layers.2.mlp.up_proj.weight"] = t["model.layers.1.mlp.up_proj.weight"]; });
  EXPECT_PRED2(mentions, error("hf"), "model.layers.2");
  write_tensors([&](auto& t) { t["tok_embeddings.weight"] = t["model.embed_tokens.weight"]; });
  EXPECT_PRED2(mentions, error("hf"), "both");
  write_tensors([&](auto& t) { t.erase("model.embed_tokens.weight"); });
  EXPECT_PRED2(mentions, error("hf"), "none");
  // A copy of the tied head may be there, another matrix may not.
  write_tensors([&](auto& t) { t["lm_head.weight"] = t["model.embed_tokens.weight"]; });
  ConvertOptions sound;
  sound.in = dir_ / "hf", sound.out = dir_ / "sound";
  EXPECT_NO_THROW(convert_model(sound));
  const std::vector<float> other(size_t(llama_.vocab * llama_.width), 1);
  write_tensors([&](auto& t) {
    t["lm_head.weight"] = t["model.embed_tokens.weight"];
    t["lm_head.weight"].data = other.data();
  });
  EXPECT_PRED2(mentions, error("hf"), "'lm_head.weight' differs");
  std::vector<float> broken(size_t(llama_.width), 1);
  broken[3] = NAN;
  write_tensors([&](auto& t) { t["model.layers.1.input_layernorm.weight"].data = broken.data(); });
  EXPECT_PRED2(mentions, error("hf"), "attention_norm in layer 1 is not finite");
  dir_.write("hf/model.safetensors", "x");
  EXPECT_PRED2(mentions, error("hf"), "not a valid safetensors file");
}

TEST_F(ConvertFaults, IndicesThatDoNotFit) {
  const fs::path index = dir_ / "hf/model.safetensors.index.json";
  const SafeTensors file(dir_ / "hf/model.safetensors");
  const auto write = [&](const std::function<void(json&)>& change) {
    json map;
    for (const auto& [name, unused] : file.tensors()) map[name] = "model.safetensors";
    change(map);
    write_atomically(index, dump_json(json{{"weight_map", map}}));
  };
  write([](json& map) { map["model.norm.weight"] = "model-2.safetensors"; });
  EXPECT_PRED2(mentions, error("hf"), "model-2.safetensors");
  write([](json& map) { map["model.norm.weight"] = "../hf/model.safetensors"; });
  EXPECT_PRED2(mentions, error("hf"), "beside the index");
  write([](json& map) { map["model.norm.weight"] = 3; });
  EXPECT_PRED2(mentions, error("hf"), "beside the index");
  write([](json& map) { map.erase("model.norm.weight"); });
  EXPECT_PRED2(mentions, error("hf"), "'model.norm.weight'");
  write([](json& map) { map["more"] = "model.safetensors"; });
  EXPECT_PRED2(mentions, error("hf"), "'more'");
  write_atomically(index, "{}");
  EXPECT_PRED2(mentions, error("hf"), "weight_map");
  write_atomically(index, "{\"weight_map\": {}}");
  EXPECT_PRED2(mentions, error("hf"), "names no tensors");
}

TEST_F(ConvertFaults, ModelsOfAnotherKind) {
  const std::vector<std::pair<const char*, json>> wrong{
      {"model_type", "gpt2"},
      {"model_type", nullptr},
      {"hidden_act", "gelu"},
      {"attention_bias", true},
      {"mlp_bias", true},
      {"rope_scaling", {{"type", "linear"}, {"factor", 2}}},
      {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8}}},
      {"rope_parameters", {{"rope_type", "yarn"}, {"rope_theta", 1e4}}},
      {"rope_parameters", 3},
      {"num_local_experts", 8},
      {"quantization_config", {{"bits", 4}}},
      {"partial_rotary_factor", 0.75},
      {"partial_rotary_factor", 2},
      {"hidden_size", -1},
      {"hidden_size", "64"},
      {"num_attention_heads", 3},
      {"num_key_value_heads", 3},
      {"head_dim", 6},
      {"num_hidden_layers", 3},
      {"num_hidden_layers", 1},
      {"vocab_size", 280},
      {"intermediate_size", 24},
      {"rms_norm_eps", 0},
      {"rope_theta", -1},
      {"tie_word_embeddings", false},
      {"tie_word_embeddings", "no"},
      {"max_position_embeddings", 1e99},
      {"eos_token_id", 281},
      {"eos_token_id", "x"}};
  for (const auto& [key, value] : wrong) {
    write_config([&](json& config) { config[key] = value; });
    const bool ids = std::string(key) == "eos_token_id";
    const std::string sentence = error("hf", [&](ConvertOptions& o) {
      if (ids) o.given.eot.reset();
    });
    EXPECT_TRUE(mentions(sentence, "config.json") || mentions(sentence, "model.safetensors"))
        << key << ": " << sentence;
  }
  dir_.write("hf/config.json", "{");
  EXPECT_PRED2(mentions, error("hf"), "not valid JSON");
  dir_.write("hf/config.json", "[]");
  EXPECT_PRED2(mentions, error("hf"), "expected an object");
  for (const auto& [key, value] : std::vector<std::pair<const char*, json>>{
           {"moe", {{"num_experts", 8}}}, {"use_scaled_rope", true}, {"n_layers", 9}, {"vocab_size", 7}}) {
    write_params([&](json& params) { params[key] = value; });
    error("meta");
  }
}

TEST_F(ConvertFaults, OptionsThatContradict) {
  const auto with = [&](const std::string& in, const std::function<void(ConvertOptions&)>& change) {
    return error(in, change);
  };
  EXPECT_PRED2(mentions, with("llama.bin", [](auto& o) { o.given.heads = 2; }), "--heads 2");
  EXPECT_PRED2(mentions, with("hf", [](auto& o) { o.given.rope_theta = 5; }), "--rope-theta 5");
  EXPECT_PRED2(mentions, with("hf", [](auto& o) { o.given.context = 13; }), "--context 13");
  EXPECT_PRED2(mentions, with("llama.bin", [](auto& o) { o.given.eot = 281; }), "281");
  EXPECT_PRED2(mentions, with("nothing.bin", {}), "does not exist");
  EXPECT_PRED2(mentions, with("llama.bin", [&](auto& o) { o.out = dir_ / "hf"; }), "there already");
  dir_.write("x.gguf", "GGUF");
  EXPECT_PRED2(mentions, with("x.gguf", {}), "expected a model file");
  fs::create_directories(dir_ / "empty");
  EXPECT_PRED2(mentions, with("empty", {}), "has 0 models");
  fs::remove(dir_ / "meta/params.json");
  EXPECT_PRED2(mentions, with("meta", {}), "--heads");
  EXPECT_PRED2(mentions, with("meta", [](auto& o) { o.given.heads = 4; }), "--context");
  EXPECT_PRED2(mentions,
               with("meta", [](auto& o) { o.given.heads = 4, o.given.context = 9, o.given.eot.reset(); }),
               "--eot");
  EXPECT_PRED2(mentions, with("meta", [](auto& o) { o.given.heads = 3, o.given.context = 9; }),
               "model.heads = 3");
}

TEST_F(ConvertFaults, TokenizersThatDoNotFit) {
  const auto with = [&](const std::string& tokenizer) {
    return error("llama.bin", [&](ConvertOptions& o) { o.tokenizer = (dir_ / tokenizer).string(); });
  };
  for (const size_t pieces : {21, 23}) {
    ScoreBpeModel model = small_score_bpe();
    model.pieces.resize(259 + pieces, {"more", -99, ScoredPiece::Kind::text});
    dir_.write("other.bin", llama2c_tokenizer_file(model));
    EXPECT_PRED2(mentions, with("other.bin"), fmt::format("has {} ids", 259 + pieces));
  }
  EXPECT_PRED2(mentions, with("llama.bin"), "no tokenizer of llama2.c");
  EXPECT_PRED2(mentions, with("nothing.json"), "nothing.json");
  dir_.write("hf/tokenizer.json", "{\"model\": {\"type\": \"Unigram\"}}");
  EXPECT_PRED2(mentions, error("hf"), "--tokenizer none");
  EXPECT_PRED2(mentions,
               error("hf",
                     [&](ConvertOptions& o) {
                       o.tokenizer = (dir_ / "tok.bin").string();
                       o.given.eot = 3;
                     }),
               "--eot 3");
}

}  // namespace
}  // namespace sps
