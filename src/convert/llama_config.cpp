// What config.json (Hugging Face) and params.json (Meta) say of a Llama.
#include <cmath>

#include "base/error.h"
#include "base/json.h"
#include "convert/llama_files.h"

namespace sps {

namespace {

using nlohmann::json;

// Members of a configuration file; null counts as missing.
class Configuration {
 public:
  Configuration(std::string_view text, const std::string& what) : what_(what), file_(parse_json(text, what)) {
    if (!file_.is_object()) fail("{} is a JSON {}, expected an object", what, file_.type_name());
  }

  const json* find(const char* key) const { return find_in(file_, key); }
  std::optional<int64_t> count(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number_unsigned() || value->get<uint64_t>() < 1 || value->get<uint64_t>() > INT32_MAX)
      wrong(key, *value, "a positive number");
    return value->get<int64_t>();
  }
  // An id, or the first of a list of ids.
  std::optional<int64_t> id(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    const json& first = value->is_array() && !value->empty() ? value->front() : *value;
    if (!first.is_number_unsigned() || first.get<uint64_t>() > INT32_MAX) wrong(key, *value, "an id");
    return first.get<int64_t>();
  }
  std::optional<double> positive(const char* key) const { return positive_in(file_, key); }
  std::optional<double> positive_in(const json& object, const char* key) const {
    const json* value = find_in(object, key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !(value->get<double>() > 0) || !std::isfinite(value->get<double>()))
      wrong(key, *value, "a positive number");
    return value->get<double>();
  }
  std::optional<bool> flag(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) wrong(key, *value, "true or false");
    return value->get<bool>();
  }
  // A key that may only be missing or have one value.
  void only(const char* key, const json& value) const {
    const json* found = find(key);
    if (found != nullptr && *found != value)
      wrong(key, *found, dump_json(value) + " (nothing else is supported)");
  }
  [[noreturn]] void wrong(const char* key, const json& value, const std::string& expected) const {
    fail("{}: {} is {}, expected {}", what_, key, dump_json(value).substr(0, 80), expected);
  }

 private:
  static const json* find_in(const json& object, const char* key) {
    const auto found = object.find(key);
    return found == object.end() || found->is_null() ? nullptr : &*found;
  }
  const std::string& what_;
  json file_;
};

// rope_scaling, or rope_parameters in newer files, which has the base too.
void read_rope(const Configuration& config, LlamaFacts& facts) {
  facts.rope_theta = config.positive("rope_theta");
  facts.rope_fraction = config.positive("partial_rotary_factor");
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* rope = config.find(key);
    if (rope == nullptr) continue;
    if (!rope->is_object()) config.wrong(key, *rope, "an object");
    const json type =
        rope->contains("rope_type") ? (*rope)["rope_type"] : rope->value("type", json("default"));
    if (type != "default")
      config.wrong(key, *rope, "the plain rotary angles (scaled ones are not supported)");
    if (const auto theta = config.positive_in(*rope, "rope_theta")) facts.rope_theta = theta;
    if (const auto part = config.positive_in(*rope, "partial_rotary_factor")) facts.rope_fraction = part;
  }
}

}  // namespace

LlamaFacts facts_of_config(std::string_view text, const std::string& what) {
  const Configuration config(text, what);
  const json* type = config.find("model_type");
  if (type == nullptr || (*type != "llama" && *type != "mistral"))
    config.wrong("model_type", type == nullptr ? json() : *type, "\"llama\" or \"mistral\"");
  config.only("hidden_act", "silu");
  config.only("attention_bias", false);
  config.only("mlp_bias", false);
  config.only("quantization_config", json());
  config.only("num_local_experts", 1);
  LlamaFacts facts;
  facts.width = config.count("hidden_size");
  facts.ffn = config.count("intermediate_size");
  facts.layers = config.count("num_hidden_layers");
  facts.heads = config.count("num_attention_heads");
  facts.kv_heads = config.count("num_key_value_heads");
  facts.head_dim = config.count("head_dim");
  facts.vocab = config.count("vocab_size");
  facts.context = config.count("max_position_embeddings");
  facts.sliding_window = config.count("sliding_window");
  facts.norm_eps = config.positive("rms_norm_eps");
  if (!facts.norm_eps) facts.norm_eps = 1e-6;  // Hugging Face's value where a file has none
  facts.tied = config.flag("tie_word_embeddings").value_or(false);
  facts.bos = config.id("bos_token_id");
  facts.eot = config.id("eos_token_id");
  read_rope(config, facts);
  return facts;
}

LlamaFacts facts_of_params(std::string_view text, const std::string& what) {
  const Configuration params(text, what);
  params.only("moe", json());
  params.only("use_scaled_rope", false);
  params.only("quantization_args", json());
  LlamaFacts facts;
  facts.width = params.count("dim");
  facts.layers = params.count("n_layers");
  facts.heads = params.count("n_heads");
  facts.kv_heads = params.count("n_kv_heads");
  facts.head_dim = params.count("head_dim");
  // -1 stands for "as the tokenizer has it".
  if (const json* vocab = params.find("vocab_size"); vocab != nullptr && *vocab != -1)
    facts.vocab = params.count("vocab_size");
  facts.context = params.count("max_seq_len");
  facts.rope_theta = params.positive("rope_theta");
  facts.norm_eps = params.positive("norm_eps");
  return facts;
}

int64_t begin_of_template(std::string_view text, const std::string& what) {
  const Configuration file(text, what);
  const json* processor = file.find("post_processor");
  if (processor == nullptr) return -1;
  // Whatever is not as it should be throws one of nlohmann's errors.
  try {
    const bool several = processor->at("type") == "Sequence";
    const json steps = several ? processor->at("processors") : json::array({*processor});
    for (const json& step : steps) {
      if (step.at("type") != "TemplateProcessing") continue;
      const json& first = step.at("single").at(0);
      if (!first.contains("SpecialToken")) continue;
      const auto& token = first.at("SpecialToken").at("id").get_ref<const std::string&>();
      const json& id = step.at("special_tokens").at(token).at("ids").at(0);
      if (!id.is_number_unsigned() || id > INT32_MAX) file.wrong("post_processor", id, "an id");
      return id.get<int64_t>();
    }
  } catch (const json::exception&) {
    fail("{}: the post_processor is not as tokenizers write it", what);
  }
  return -1;
}

}  // namespace sps
