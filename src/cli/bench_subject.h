// The models that a benchmark of generation runs: recipes with random weights, or checkpoints.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "infer/int8_weights.h"
#include "model/load.h"

namespace sps {

// Weights in memory, ready for an Engine.
class BenchSubject {
 public:
  // `source`: a recipe or TOML file (weights as a training run would begin with), a checkpoint, or a run
  // directory. With `int8`, products read the weights in 8 bits.
  BenchSubject(const std::string& source, const std::vector<std::string>& overrides, DType dtype,
               Device device, bool int8);

  const std::string& name() const { return name_; }
  const ModelConfig& config() const { return config_; }
  const ModelParameters& parameters() const { return model_ ? model_->parameters() : parameters_; }
  const ParameterStore& store() const { return model_ ? model_->store() : *store_; }
  const Int8Weights* int8() const { return int8_ ? &*int8_ : nullptr; }

 private:
  std::string name_;
  ModelConfig config_;
  std::unique_ptr<Model> model_;  // of a checkpoint; else the two below
  ModelParameters parameters_;
  std::unique_ptr<ParameterStore> store_;
  std::optional<Int8Weights> int8_;
};

// Words that hold a '=' are settings for the recipes, the others name models. Usage error if none does.
std::vector<BenchSubject> bench_subjects(const std::vector<std::string>& words, DType dtype, Device device,
                                         bool int8);

}  // namespace sps
