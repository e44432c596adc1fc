#include "convert/llama_files.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <set>

#include "base/error.h"

namespace sps {

namespace {

using T = LlamaTensor;

// {} stands for the layer.
struct NameRow {
  T tensor;
  std::string_view meta, hugging_face;
};
constexpr std::array kNames{
    NameRow{T::tok_embeddings, "tok_embeddings.weight", "model.embed_tokens.weight"},
    NameRow{T::attention_norm, "layers.{}.attention_norm.weight", "model.layers.{}.input_layernorm.weight"},
    NameRow{T::wq, "layers.{}.attention.wq.weight", "model.layers.{}.self_attn.q_proj.weight"},
    NameRow{T::wk, "layers.{}.attention.wk.weight", "model.layers.{}.self_attn.k_proj.weight"},
    NameRow{T::wv, "layers.{}.attention.wv.weight", "model.layers.{}.self_attn.v_proj.weight"},
    NameRow{T::wo, "layers.{}.attention.wo.weight", "model.layers.{}.self_attn.o_proj.weight"},
    NameRow{T::ffn_norm, "layers.{}.ffn_norm.weight", "model.layers.{}.post_attention_layernorm.weight"},
    NameRow{T::w1, "layers.{}.feed_forward.w1.weight", "model.layers.{}.mlp.gate_proj.weight"},
    NameRow{T::w2, "layers.{}.feed_forward.w2.weight", "model.layers.{}.mlp.down_proj.weight"},
    NameRow{T::w3, "layers.{}.feed_forward.w3.weight", "model.layers.{}.mlp.up_proj.weight"},
    NameRow{T::norm, "norm.weight", "model.norm.weight"},
    NameRow{T::output, "output.weight", "lm_head.weight"},
};

std::string with_layer(std::string_view pattern, int64_t layer) {
  const size_t at = pattern.find("{}");
  if (at == std::string_view::npos) return std::string(pattern);
  return fmt::format("{}{}{}", pattern.substr(0, at), layer, pattern.substr(at + 2));
}

// Rotary frequencies that some files store; they follow from the configuration.
bool is_rotary_table(std::string_view name) {
  return name == "rope.freqs" || name.ends_with(".rotary_emb.inv_freq");
}

// The number behind `prefix` in a tensor's name; -1 if there is none.
int64_t layer_in(std::string_view name, std::string_view prefix) {
  int64_t layer = -1;
  if (!name.starts_with(prefix)) return -1;
  name.remove_prefix(prefix.size());
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  return error == std::errc() && end != name.data() + name.size() && *end == '.' ? layer : -1;
}

bool same_values(const StoredTensor& a, const StoredTensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape && std::memcmp(a.data, b.data, a.bytes) == 0;
}

}  // namespace

LlamaFiles::LlamaFiles(const TensorFiles& files) : files_(files), half_split_(false) {
  const NameRow& first = kNames[0];
  half_split_ = files.has(std::string(first.hugging_face));
  if (half_split_ == files.has(std::string(first.meta)))
    fail("{} has {} of the tensors '{}' and '{}'; expected one, as every Llama has", files.name(),
         half_split_ ? "both" : "none", first.hugging_face, first.meta);
}

std::string LlamaFiles::name_of(LlamaTensor tensor, int64_t layer) const {
  const auto row =
      std::find_if(kNames.begin(), kNames.end(), [&](const NameRow& r) { return r.tensor == tensor; });
  SPS_CHECK(row != kNames.end());
  return with_layer(half_split_ ? row->hugging_face : row->meta, layer);
}

void LlamaFiles::add_facts(LlamaFacts& facts) const {
  const auto dimension = [&](T tensor, size_t i) {
    const StoredTensor& stored = at(tensor);
    if (stored.shape.size() != 2 || stored.shape[0] < 1 || stored.shape[1] < 1)
      fail("{}: tensor '{}' has shape {}, expected a matrix", files_.name(), name_of(tensor, 0),
           shape_text(stored.shape));
    return stored.shape[i];
  };
  if (!facts.vocab) facts.vocab = dimension(T::tok_embeddings, 0);
  if (!facts.width) facts.width = dimension(T::tok_embeddings, 1);
  if (!facts.ffn) facts.ffn = dimension(T::w1, 0);
  if (!facts.layers) {
    int64_t last = -1;
    const std::string_view prefix = half_split_ ? "model.layers." : "layers.";
    for (const auto& [name, unused] : files_.tensors()) last = std::max(last, layer_in(name, prefix));
    if (last == INT64_MAX) fail("{} has a layer numbered {}", files_.name(), last);
    facts.layers = last + 1;
  }
  if (!facts.kv_heads && facts.heads && *facts.heads >= 1 && *facts.width % *facts.heads == 0) {
    const int64_t head_dim = facts.head_dim.value_or(*facts.width / *facts.heads);
    const int64_t rows = dimension(T::wk, 0);
    if (head_dim >= 1 && rows % head_dim == 0) facts.kv_heads = rows / head_dim;
  }
  if (!facts.tied) facts.tied = !files_.has(name_of(T::output, 0));
}

void LlamaFiles::check(const ModelConfig& config) const {
  std::set<std::string> expected;
  for (const NameRow& row : kNames)
    for (int64_t j = 0; j < (per_layer(row.tensor) ? config.state.layers : 1); ++j) {
      const std::string name = name_of(row.tensor, j);
      const bool copy = row.tensor == T::output && config.tie_head;
      if (copy && !files_.has(name)) continue;
      const StoredTensor& stored = files_.at(name);
      const auto shape = llama_shape(config, row.tensor);
      if (stored.shape != shape)
        fail("{}: tensor '{}' has shape {}, expected {}", files_.name(), name, shape_text(stored.shape),
             shape_text(shape));
      if (copy && !same_values(stored, at(T::tok_embeddings)))
        fail("{}: '{}' differs from '{}', but the configuration says they are one matrix", files_.name(),
             name, name_of(T::tok_embeddings, 0));
      if (!readable(stored.dtype))
        fail("{}: tensor '{}' has dtype {}, expected F32, F16 or BF16", files_.name(), name,
             stored_name(stored.dtype));
      expected.insert(name);
    }
  for (const auto& [name, unused] : files_.tensors())
    if (!expected.contains(name) && !is_rotary_table(name))
      fail("{} has the tensor '{}', which a Llama of {} layers without biases does not have", files_.name(),
           name, config.state.layers);
}

void LlamaFiles::read(const ModelConfig& config, LlamaTensor tensor, int64_t layer, float* out) const {
  const StoredTensor& stored = files_.at(name_of(tensor, layer));
  read_floats(stored, out);
  if (!half_split_ || (tensor != T::wq && tensor != T::wk)) return;
  const int64_t d = config.state.width, head = config.head_dim * d, half = config.rotary_width(layer) / 2;
  std::vector<float> turned(size_t(2 * half * d));
  for (float* at = out; at != out + stored.count(); at += head) {
    for (int64_t m = 0; m < half; ++m) {
      std::copy_n(at + m * d, d, turned.begin() + 2 * m * d);
      std::copy_n(at + (m + half) * d, d, turned.begin() + (2 * m + 1) * d);
    }
    std::copy(turned.begin(), turned.end(), at);
  }
}

}  // namespace sps
