// Llama-family models as safetensors, under either of the two sets of names in use.
//   Hugging Face  model.layers.0.self_attn.q_proj.weight, ...; rotary pairs are (m, m + width/2) of a head
//   Meta          layers.0.attention.wq.weight, ...; rotary pairs are neighbours
// The weights are read into Meta's order, which is exact: rows of wq and wk change places.
#pragma once

#include <string>

#include "convert/llama.h"
#include "convert/tensor_files.h"

namespace sps {

// What Hugging Face's config.json says. Error for an architecture other than llama and mistral, and for
// biases, scaled rotary angles, other activations and whatever else our model cannot be.
LlamaFacts facts_of_config(std::string_view text, const std::string& what);
// What Meta's params.json says.
LlamaFacts facts_of_params(std::string_view text, const std::string& what);
// The id that a tokenizer.json's post-processor puts before a text; -1: none.
int64_t begin_of_template(std::string_view text, const std::string& what);

class LlamaFiles {
 public:
  // Error if the tensors have neither set of names. The files must outlive it.
  explicit LlamaFiles(const TensorFiles& files);

  // Fills in what shapes and names say and nobody else does.
  void add_facts(LlamaFacts& facts) const;
  // Error unless the tensors are exactly those of the model, in the right shapes.
  void check(const ModelConfig& config) const;
  // After check(), with the same config.
  void read(const ModelConfig& config, LlamaTensor tensor, int64_t layer, float* out) const;

 private:
  std::string name_of(LlamaTensor tensor, int64_t layer) const;
  const StoredTensor& at(LlamaTensor tensor) const { return files_.at(name_of(tensor, 0)); }

  const TensorFiles& files_;
  bool half_split_;  // Hugging Face's names and order
};

}  // namespace sps
