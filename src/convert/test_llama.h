// For tests and seeds: a small random Llama, the files that others would publish it in, and what it computes,
// in double precision and straight from the formulas.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/bf16.h"
#include "base/json.h"
#include "base/rng.h"
#include "tensor/safetensors.h"

namespace sps {

struct TestLlama {
  int64_t width = 16, ffn = 20, layers = 2, heads = 4, kv_heads = 2, vocab = 281, context = 12;
  bool tied = true;
  double theta = 10000, eps = 1e-5, rotary = 1;  // rotary: the part of a head that is turned
  int64_t window = 0;                            // keys that a row sees, its own included; 0: all
  bool half_split = false;                       // rotary pairs (m, m + width/2), as Hugging Face has them

  // By Meta's names. Rows of wq and wk are in the order that half_split says.
  std::map<std::string, std::vector<float>> tensors;

  int64_t head_dim() const { return width / heads; }
  int64_t rotary_width() const { return int64_t(double(head_dim()) * rotary); }
  std::vector<int64_t> shape(const std::string& name) const {
    const auto is = [&](std::string_view part) { return name.find(part) != std::string::npos; };
    if (is("norm")) return {width};
    if (is("tok_embeddings") || is("output")) return {vocab, width};
    if (is("wk") || is("wv")) return {kv_heads * head_dim(), width};
    if (is("w1") || is("w3")) return {ffn, width};
    if (is("w2")) return {width, ffn};
    return {width, width};  // wq, wo
  }
  static std::vector<std::string> layer_names() {
    return {"attention_norm", "attention.wq",    "attention.wk",    "attention.wv",   "attention.wo",
            "ffn_norm",       "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"};
  }

  void randomise(uint64_t seed) {
    const auto add = [&](const std::string& name) {
      int64_t count = 1;
      for (const int64_t d : shape(name)) count *= d;
      const Rng rng(seed, name);
      std::vector<float> values(static_cast<size_t>(count));
      const bool gain = name.find("norm") != std::string::npos;
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = float(gain ? 1 + 0.2 * rng.normal(i) : 0.3 * rng.normal(i));
      tensors[name] = std::move(values);
    };
    add("tok_embeddings.weight");
    for (int64_t j = 0; j < layers; ++j)
      for (const std::string& name : layer_names()) add(fmt::format("layers.{}.{}.weight", j, name));
    add("norm.weight");
    if (!tied) add("output.weight");
  }

  // The same model with rotary pairs in Hugging Face's order.
  TestLlama split() const {
    TestLlama other = *this;
    other.half_split = true;
    const int64_t half = rotary_width() / 2;
    for (auto& [name, values] : other.tensors) {
      if (name.find("wq") == std::string::npos && name.find("wk") == std::string::npos) continue;
      const std::vector<float>& from = tensors.at(name);
      for (int64_t row = 0; row < int64_t(values.size()) / width; ++row) {
        const int64_t head = row / head_dim() * head_dim(), i = row % head_dim();
        const int64_t source = i >= 2 * half ? i : i < half ? 2 * i : 2 * (i - half) + 1;
        std::copy_n(from.begin() + (head + source) * width, width, values.begin() + row * width);
      }
    }
    return other;
  }

  // Logits of the last of `ids`.
  std::vector<double> logits(std::span<const int32_t> ids) const {
    const auto n = ids.size();
    std::vector<std::vector<double>> x(n);
    for (size_t i = 0; i < n; ++i) x[i] = row("tok_embeddings.weight", ids[i]);
    for (int64_t j = 0; j < layers; ++j) {
      const auto at = [&](const char* name) { return fmt::format("layers.{}.{}.weight", j, name); };
      std::vector<std::vector<double>> q(n), k(n), v(n);
      for (size_t i = 0; i < n; ++i) {
        const auto h = normed(x[i], at("attention_norm"));
        q[i] = turned(times(at("attention.wq"), h), i), k[i] = turned(times(at("attention.wk"), h), i);
        v[i] = times(at("attention.wv"), h);
      }
      for (size_t i = 0; i < n; ++i) {
        add(x[i], times(at("attention.wo"), attended(q[i], k, v, i)));
        const auto h = normed(x[i], at("ffn_norm"));
        auto gate = times(at("feed_forward.w1"), h);
        const auto up = times(at("feed_forward.w3"), h);
        for (size_t f = 0; f < gate.size(); ++f) gate[f] *= up[f] / (1 + std::exp(-gate[f]));
        add(x[i], times(at("feed_forward.w2"), gate));
      }
    }
    return times(tied ? "tok_embeddings.weight" : "output.weight", normed(x.back(), "norm.weight"));
  }

  // llama2.c's file.
  std::string llama2c_file() const {
    const int32_t header[7] = {int32_t(width),    int32_t(ffn),   int32_t(layers), int32_t(heads),
                               int32_t(kv_heads), int32_t(vocab), int32_t(context)};
    std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
    if (!tied) {
      const int32_t own = -header[5];
      std::memcpy(bytes.data() + 5 * sizeof own, &own, sizeof own);
    }
    const auto put = [&](const std::vector<float>& v) {
      bytes.append(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float));
    };
    put(tensors.at("tok_embeddings.weight"));
    for (const std::string& name : layer_names())
      for (int64_t j = 0; j < layers; ++j) put(tensors.at(fmt::format("layers.{}.{}.weight", j, name)));
    put(tensors.at("norm.weight"));
    put(std::vector<float>(size_t(context * head_dim()), 7));  // tables that nobody reads
    if (!tied) put(tensors.at("output.weight"));
    return bytes;
  }

  // Meta's params.json.
  nlohmann::json params() const {
    return {{"dim", width},           {"n_layers", layers},  {"n_heads", heads},
            {"n_kv_heads", kv_heads}, {"vocab_size", vocab}, {"max_seq_len", context},
            {"norm_eps", eps},        {"rope_theta", theta}, {"multiple_of", 4}};
  }
  // Hugging Face's config.json.
  nlohmann::json config() const {
    nlohmann::json j = {{"architectures", {"LlamaForCausalLM"}},
                        {"model_type", window > 0 ? "mistral" : "llama"},
                        {"hidden_act", "silu"},
                        {"hidden_size", width},
                        {"intermediate_size", ffn},
                        {"num_hidden_layers", layers},
                        {"num_attention_heads", heads},
                        {"num_key_value_heads", kv_heads},
                        {"vocab_size", vocab},
                        {"max_position_embeddings", context},
                        {"rms_norm_eps", eps},
                        {"rope_theta", theta},
                        {"rope_scaling", nullptr},
                        {"attention_bias", false},
                        {"tie_word_embeddings", tied},
                        {"bos_token_id", 1},
                        {"eos_token_id", 2}};
    if (rotary < 1) j["partial_rotary_factor"] = rotary;
    if (window > 0) j["sliding_window"] = window;
    return j;
  }

  static std::string hugging_face_name(std::string name) {
    static const std::pair<std::string_view, std::string_view> kParts[] = {
        {"tok_embeddings", "model.embed_tokens"},
        {"attention.wq", "self_attn.q_proj"},
        {"attention.wk", "self_attn.k_proj"},
        {"attention.wv", "self_attn.v_proj"},
        {"attention.wo", "self_attn.o_proj"},
        {"attention_norm", "input_layernorm"},
        {"ffn_norm", "post_attention_layernorm"},
        {"feed_forward.w1", "mlp.gate_proj"},
        {"feed_forward.w2", "mlp.down_proj"},
        {"feed_forward.w3", "mlp.up_proj"},
        {"output", "lm_head"}};
    if (name.starts_with("norm")) return "model." + name;
    const bool layer = name.starts_with("layers.");
    for (const auto& [ours, theirs] : kParts)
      if (const size_t at = name.find(ours); at != std::string::npos) name.replace(at, ours.size(), theirs);
    return layer ? "model." + name : name;
  }

  // Every tensor under the name that `named` makes of Meta's, in the element type f32 or bf16.
  template <class Named>
  void write(const std::filesystem::path& path, Named&& named, StoredType type = StoredType::f32) const {
    std::map<std::string, std::vector<bf16>> rounded;
    std::map<std::string, StoredTensor> stored;
    for (const auto& [name, values] : tensors) {
      const void* data = values.data();
      if (type == StoredType::bf16) {
        auto& narrow = rounded[name];
        for (const float v : values) narrow.emplace_back(v);
        data = narrow.data();
      }
      stored[named(name)] = {type, shape(name), data, values.size() * stored_size(type)};
    }
    write_safetensors(path, stored, {{"format", "pt"}});
  }

 private:
  std::vector<double> row(const std::string& name, int64_t i) const {
    const auto at = tensors.at(name).begin() + i * width;
    return {at, at + width};
  }
  static void add(std::vector<double>& x, const std::vector<double>& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  std::vector<double> times(const std::string& name, const std::vector<double>& x) const {
    const std::vector<float>& w = tensors.at(name);
    std::vector<double> y(w.size() / x.size());
    for (size_t i = 0; i < w.size(); ++i) y[i / x.size()] += double(w[i]) * x[i % x.size()];
    return y;
  }
  std::vector<double> normed(const std::vector<double>& x, const std::string& gain) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    std::vector<double> y(x);
    const double scale = 1 / std::sqrt(squares / double(x.size()) + eps);
    for (size_t i = 0; i < y.size(); ++i) y[i] *= scale * double(tensors.at(gain)[i]);
    return y;
  }
  std::vector<double> turned(std::vector<double> x, size_t position) const {
    const auto rotated = size_t(rotary_width());
    for (size_t head = 0; head < x.size(); head += size_t(head_dim()))
      for (size_t m = 0; m < rotated / 2; ++m) {
        const double angle = double(position) * std::pow(theta, -2.0 * double(m) / double(rotated));
        double& a = x[head + (half_split ? m : 2 * m)];
        double& b = x[head + (half_split ? m + rotated / 2 : 2 * m + 1)];
        const double old = a;
        a = old * std::cos(angle) - b * std::sin(angle);
        b = old * std::sin(angle) + b * std::cos(angle);
      }
    return x;
  }
  std::vector<double> attended(const std::vector<double>& q, const std::vector<std::vector<double>>& k,
                               const std::vector<std::vector<double>>& v, size_t i) const {
    const auto size = size_t(head_dim());
    std::vector<double> out(q.size());
    for (size_t head = 0; head < size_t(heads); ++head) {
      const size_t from = head / size_t(heads / kv_heads) * size;
      const size_t first = window > 0 && i + 1 > size_t(window) ? i + 1 - size_t(window) : 0;
      std::vector<double> weights;
      double total = 0;
      for (size_t j = first; j <= i; ++j) {
        double score = 0;
        for (size_t e = 0; e < size; ++e) score += q[head * size + e] * k[j][from + e];
        weights.push_back(std::exp(score / std::sqrt(double(size))));
        total += weights.back();
      }
      for (size_t j = first; j <= i; ++j)
        for (size_t e = 0; e < size; ++e) out[head * size + e] += weights[j - first] / total * v[j][from + e];
    }
    return out;
  }
};

}  // namespace sps
