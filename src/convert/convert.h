// Published models become checkpoints of ours (docs/convert.md).
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "convert/llama.h"

namespace sps {

struct ConvertOptions {
  // A model file of llama2.c (.bin), a .safetensors file, the index of several, or a folder with one of
  // these.
  std::filesystem::path in;
  std::filesystem::path out;  // the checkpoint's folder; must not be there
  // As make_tokenizer() takes it; empty: what stands beside the model, if anything does; "none": none.
  std::string tokenizer;
  // For what no file says: heads, kv_heads, context, rope_theta, norm_eps, bos, eot. `context` may also be
  // shorter than what a file says.
  LlamaFacts given;
};

struct Converted {
  ModelConfig config;
  std::string tokenizer;  // its name; empty if the checkpoint has none
  int64_t parameters = 0;
};

// The folder is complete or not there. Usage error for wrong options, Error for wrong files.
Converted convert_model(const ConvertOptions& options);

}  // namespace sps
