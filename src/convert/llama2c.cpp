#include "convert/llama2c.h"

#include <cmath>
#include <cstring>

#include "base/error.h"

namespace sps {

namespace {

using T = LlamaTensor;

constexpr size_t kHeader = 7 * sizeof(int32_t);
constexpr int32_t kLaterVersions = 0x616b3432;  // "ak42": the first number of versions 1 and 2
constexpr int64_t kBos = 1;                     // texts begin with it, and nothing ends them
constexpr T kOrder[] = {T::tok_embeddings,
                        T::attention_norm,
                        T::wq,
                        T::wk,
                        T::wv,
                        T::wo,
                        T::ffn_norm,
                        T::w1,
                        T::w2,
                        T::w3,
                        T::norm};

int64_t count_of(const ModelConfig& c, T tensor) {
  int64_t count = 1;
  for (const int64_t d : llama_shape(c, tensor)) count *= d;
  return count;
}

int64_t layers_of(const ModelConfig& c, T tensor) {
  return per_layer(tensor) ? c.state.layers : 1;
}

int64_t rotary_tables(const ModelConfig& c) {
  return c.context * c.head_dim;  // cosines and sines
}

}  // namespace

Llama2cFile::Llama2cFile(std::span<const std::byte> bytes, std::string what)
    : bytes_(bytes), what_(std::move(what)) {
  const auto bad = [&](const std::string& why) { fail("{} is no model file of llama2.c: {}", what_, why); };
  int32_t header[7];
  if (bytes.size() < kHeader)
    bad(fmt::format("it has {} bytes and the header takes {}", bytes.size(), kHeader));
  std::memcpy(header, bytes.data(), kHeader);
  if (header[0] == kLaterVersions)
    fail("{} is a llama2.c file of version {}; expected version 0, which has no version number", what_,
         header[1]);
  constexpr const char* kNames[] = {"width",     "FFN width",  "layers", "heads",
                                    "key heads", "vocabulary", "context"};
  for (size_t i = 0; i < 7; ++i)
    if (header[i] == 0 || header[i] == INT32_MIN || (header[i] < 0 && i != 5))
      bad(fmt::format("the header gives {} = {}", kNames[i], header[i]));
  facts_ = {.width = header[0],
            .ffn = header[1],
            .layers = header[2],
            .heads = header[3],
            .kv_heads = header[4],
            .head_dim = std::nullopt,
            .vocab = std::abs(int64_t{header[5]}),
            .context = header[6],
            .sliding_window = std::nullopt,
            .bos = kBos,
            .eot = kBos,
            .rope_theta = 10000,
            .rope_fraction = 1,
            .norm_eps = 1e-5,
            .tied = header[5] > 0};
  config_ = llama_model(facts_, what_);  // checks the sizes: the products below are far from 2^63
  int64_t values = rotary_tables(config_) + (config_.tie_head ? 0 : count_of(config_, T::output));
  for (const T tensor : kOrder) values += count_of(config_, tensor) * layers_of(config_, tensor);
  const uint64_t expected = kHeader + uint64_t(values) * sizeof(float);
  if (bytes.size() != expected)
    bad(fmt::format("it has {} bytes, but its header asks for {}", bytes.size(), expected));
}

void Llama2cFile::read(LlamaTensor tensor, int64_t layer, float* out) const {
  int64_t at = 0;
  for (const T before : kOrder) {
    if (before == tensor) break;
    at += count_of(config_, before) * layers_of(config_, before);
  }
  if (tensor == T::output) at += rotary_tables(config_);
  const int64_t count = count_of(config_, tensor);
  std::memcpy(out, bytes_.data() + kHeader + size_t(at + layer * count) * sizeof(float),
              size_t(count) * sizeof(float));
}

}  // namespace sps
