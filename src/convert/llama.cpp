#include "convert/llama.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "base/error.h"

namespace sps {

namespace {

constexpr const char* kNames[] = {
    "tok_embeddings", "attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3",
    "norm",           "output"};

int64_t needed(const std::optional<int64_t>& fact, const std::string& what, const char* name,
               const char* option) {
  if (!fact) usage_error("{}: no file says the {}; give {}", what, name, option);
  return *fact;
}

}  // namespace

ModelConfig llama_model(const LlamaFacts& facts, const std::string& what) {
  SPS_CHECK(facts.width && facts.ffn && facts.layers && facts.vocab);
  ModelKeys keys;
  keys.family = "standard";
  keys.d_model = *facts.width;
  keys.layers = *facts.layers;
  keys.d_ffn = {*facts.ffn};
  keys.vocab = *facts.vocab;
  keys.heads = needed(facts.heads, what, "number of heads", "--heads");
  keys.context = needed(facts.context, what, "context", "--context");
  keys.eot = needed(facts.eot, what, "id that ends a text", "--eot, or --tokenizer");
  keys.bos = facts.bos.value_or(-1);
  keys.kv_heads = facts.kv_heads.value_or(-1);
  keys.head_dim = facts.head_dim.value_or(-1);
  keys.rope_theta = facts.rope_theta.value_or(10000);
  keys.rope_fraction = facts.rope_fraction.value_or(1);
  keys.norm_eps = facts.norm_eps.value_or(1e-5);
  keys.sliding_window = facts.sliding_window.value_or(0);
  keys.tie_head = facts.tied.value_or(true) ? "true" : "false";
  try {
    const ModelConfig config = resolve(keys);
    // Which dimensions turn must be the same to one: "int(head_dim * fraction)" elsewhere.
    if (config.full_attention(0) &&
        config.rotary_width(0) != int64_t(double(config.head_dim) * keys.rope_fraction))
      fail("a rotated part of {} of heads of {} is no even number of dimensions", keys.rope_fraction,
           config.head_dim);
    if (!config.full_attention(0) && keys.rope_fraction != 1)
      fail("a sliding window together with a rotated part of {} of each head is not supported",
           keys.rope_fraction);
    return config;
  } catch (const Error& e) {
    fail("{}: {}", what, e.what());
  }
}

bool per_layer(LlamaTensor tensor) {
  return tensor != LlamaTensor::tok_embeddings && tensor != LlamaTensor::norm &&
         tensor != LlamaTensor::output;
}

std::vector<int64_t> llama_shape(const ModelConfig& c, LlamaTensor tensor) {
  const int64_t d = c.state.width, q = c.state.heads * c.head_dim, kv = c.state.kv_heads * c.head_dim;
  switch (tensor) {
    case LlamaTensor::tok_embeddings:
    case LlamaTensor::output:
      return {c.vocab, d};
    case LlamaTensor::attention_norm:
    case LlamaTensor::ffn_norm:
    case LlamaTensor::norm:
      return {d};
    case LlamaTensor::wq:
      return {q, d};
    case LlamaTensor::wk:
    case LlamaTensor::wv:
      return {kv, d};
    case LlamaTensor::wo:
      return {d, q};
    case LlamaTensor::w1:
    case LlamaTensor::w3:
      return {c.state.ffn[0], d};
    case LlamaTensor::w2:
      return {d, c.state.ffn[0]};
  }
  SPS_CHECK(!"a tensor is missing in the table");
  return {};
}

void import_llama(const ModelConfig& c, const ModelParameters& parameters, const ParameterStore& store,
                  const LlamaReader& read) {
  using T = LlamaTensor;
  // Several tensors of theirs, one after the other, are one of ours.
  const auto fill = [&](int parameter, int64_t layer, std::initializer_list<T> parts) {
    const Tensor weight = store.weight(parameter);
    SPS_CHECK(weight.dtype == DType::f32 && weight.dense());
    int64_t done = 0;
    for (const T part : parts) {
      float* values = weight.as<float>() + done;
      read(part, layer, values);
      int64_t count = 1;
      for (const int64_t d : llama_shape(c, part)) count *= d;
      if (!std::all_of(values, values + count, [](float v) { return std::isfinite(v); }))
        fail("a value of {} in layer {} is not finite", kNames[size_t(part)], layer);
      done += count;
    }
    SPS_CHECK(done == weight.count());
  };
  fill(parameters.embed, 0, {T::tok_embeddings});
  for (int64_t j = 0; j < c.state.layers; ++j) {
    const BlockParameters& b = parameters.state[size_t(j)];
    fill(b.norm1, j, {T::attention_norm});
    fill(b.qkv, j, {T::wq, T::wk, T::wv});
    fill(b.out, j, {T::wo});
    fill(b.norm2, j, {T::ffn_norm});
    fill(b.gate_up, j, {T::w1, T::w3});
    fill(b.down, j, {T::w2});
  }
  fill(parameters.final_norm, 0, {T::norm});
  if (!c.tie_head) fill(parameters.head, 0, {T::output});
}

}  // namespace sps
