// A trained model from a checkpoint, for everything that does not train: evaluation, generation, information.
#pragma once

#include <memory>

#include "base/error.h"
#include "model/checkpoint_files.h"
#include "model/model.h"

namespace sps {

// The model that a checkpoint's config.json describes. Error if its keys are unknown or contradict each
// other.
ModelConfig checkpoint_model_config(const LoadedCheckpoint& checkpoint);

// "auto": a GPU where this build and this machine have one, else the CPU. Otherwise cpu or cuda; usage error
// for the rest, Error (failure) if there is no GPU.
Device compute_device(std::string_view name);

// "auto": bf16 where the device has instructions for it, else f32. Otherwise f32, bf16 or, on the CPU, f64;
// usage error for the rest.
DType compute_dtype(std::string_view name, Device device = Device::cpu);

// The model's weights under their stored names, for reading and writing checkpoints.
std::vector<NamedTensor> named_weights(const ModelParameters& parameters, const ParameterStore& store);

struct LoadedModel {
  LoadedCheckpoint checkpoint;
  std::unique_ptr<Model> model;
};

// `path`: a checkpoint, or a run directory (its latest checkpoint). Forward only, up to max_rows rows a pass;
// 0 takes one window of the model's context. Masters::needed takes a third of the memory in bf16.
LoadedModel load_model(const std::filesystem::path& path, DType compute, int64_t max_rows = 0,
                       Device device = Device::cpu, Masters masters = Masters::all);

}  // namespace sps
