// For the tests of decoding: a model with lively weights and random texts for it.
#pragma once

#include <memory>
#include <vector>

#include "infer/decoder.h"
#include "model/test_compare.h"
#include "ops/check.h"

namespace sps {

inline std::unique_ptr<Model> dense_model(const ModelConfig& config, const ops::Backend& backend,
                                          uint64_t seed = 4, double spread = 0.25) {
  ModelOptions options;
  options.compute = backend.dtype, options.max_rows = config.context, options.train = false;
  options.device = backend.device;
  auto model = std::make_unique<Model>(config, options);
  lively_weights(*model, seed, spread);
  return model;
}

inline std::unique_ptr<Model> dense_model(const ModelConfig& config, DType dtype, uint64_t seed = 4,
                                          double spread = 0.25) {
  return dense_model(config, ops::Backend{Device::cpu, dtype}, seed, spread);
}

// Random ids; about every fifth is an end of text if `documents`.
inline std::vector<int32_t> random_text(const ModelConfig& c, int64_t length, uint64_t seed,
                                        bool documents = true) {
  return TestInput(c, 1, length, seed, documents).tokens;
}

// Logits that follow every position of a text, from one pass of the model over all of it.
inline std::vector<std::vector<double>> dense_logits(Model& model, const std::vector<int32_t>& text) {
  const ModelConfig& c = model.config();
  TestInput input(c, 1, int64_t(text.size()), 1, false);
  input.tokens = text;
  input.set_documents(c);
  std::vector<int32_t> rows(text.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = int32_t(i);
  std::vector<std::vector<double>> all;
  const auto get = [&](auto zero) {
    using T = decltype(zero);
    std::vector<T> logits(text.size() * size_t(c.vocab));
    model.logits(input.input(), rows, view(logits.data(), int64_t(text.size()), c.vocab));
    for (size_t i = 0; i < text.size(); ++i)
      all.emplace_back(logits.begin() + std::ptrdiff_t(i * size_t(c.vocab)),
                       logits.begin() + std::ptrdiff_t((i + 1) * size_t(c.vocab)));
  };
  model.options().compute == DType::f64 ? get(double{}) : get(float{});
  return all;
}

inline std::vector<double> row_of(Tensor t, int64_t r) {
  std::vector<double> row;
  for (int64_t c = 0; c < t.cols; ++c)
    row.push_back(t.dtype == DType::f64 ? t.row<double>(r)[c] : double(t.row<float>(r)[c]));
  return row;
}

// Largest difference, as a part of the largest number of the second.
inline double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(a[i] - b[i]);
    most = ops::worse(most, d);
    scale = std::max(scale, std::abs(b[i]));
  }
  return most / scale;
}

}  // namespace sps
