// llama2.c's model file, version 0: seven little-endian i32 (width, FFN width, layers, heads, key heads,
// vocabulary, context), then f32 tensors without names, those of all layers together:
//   tok_embeddings, attention_norm, wq, wk, wv, wo, ffn_norm, w1, w2, w3, norm, cosines and sines of the
//   rotary angles [context, head_dim / 2] (not used), output if the vocabulary is written as a negative
//   number.
// Rotary pairs are neighbours, base 10000; epsilon of the norms 1e-5. Source: export.py and run.c of
// llama2.c.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "convert/llama.h"

namespace sps {

class Llama2cFile {
 public:
  // The bytes must outlive it. Error, naming `what`, unless they are exactly such a file.
  Llama2cFile(std::span<const std::byte> bytes, std::string what);

  const LlamaFacts& facts() const { return facts_; }
  void read(LlamaTensor tensor, int64_t layer, float* out) const;

 private:
  std::span<const std::byte> bytes_;
  std::string what_;
  LlamaFacts facts_;
  ModelConfig config_;  // for the shapes alone
};

}  // namespace sps
