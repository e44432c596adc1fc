// What the importers of Llama-family models share: the facts of a model, its tensors, and where they go in a
// model of ours.
//
// The family: pre-norm blocks with RMS norms, attention with fewer key than query heads, rotary positions and
// SwiGLU, no biases. That is our `standard` model with its default keys. Source: Touvron et al., "LLaMA: Open
// and efficient foundation language models" (2023), section 2.2; "Llama 2" (2023), section 2.2.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/parameters.h"

namespace sps {

// What files and options say of a model; nothing where nobody says it.
struct LlamaFacts {
  std::optional<int64_t> width, ffn, layers, heads, kv_heads, head_dim, vocab, context, sliding_window;
  std::optional<int64_t> bos, eot;
  std::optional<double> rope_theta, rope_fraction, norm_eps;
  std::optional<bool> tied;  // output head and embedding are one matrix
};

// The model that the facts describe; `what` names their source. Usage error for what is missing and can be
// given as an option; Error for a model that ours cannot be.
ModelConfig llama_model(const LlamaFacts& facts, const std::string& what);

// The tensors of a Llama by Meta's names. w1 is the gate of SwiGLU, w3 the other half, w2 its output.
enum class LlamaTensor : uint8_t {
  tok_embeddings,
  attention_norm,
  wq,
  wk,
  wv,
  wo,
  ffn_norm,
  w1,
  w2,
  w3,
  norm,
  output
};
bool per_layer(LlamaTensor tensor);

// Shape of a tensor, rows first as it is applied to a row vector x as x W^T; [d] for norms.
std::vector<int64_t> llama_shape(const ModelConfig& config, LlamaTensor tensor);

// Gives the values of a tensor, row by row, with rotary pairs as neighbours (2m, 2m + 1).
using LlamaReader = std::function<void(LlamaTensor tensor, int64_t layer, float* out)>;

// Fills every weight of the model.
void import_llama(const ModelConfig& config, const ModelParameters& parameters, const ParameterStore& store,
                  const LlamaReader& read);

}  // namespace sps
