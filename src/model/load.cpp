#include "model/load.h"

#include "base/error.h"
#include "model/keys.h"
#include "ops/linear/linear.h"
#include "tensor/device.h"

namespace sps {

ModelConfig checkpoint_model_config(const LoadedCheckpoint& checkpoint) {
  const std::string source = (checkpoint.path / kConfigFile).string();
  if (!checkpoint.config.is_object() || !checkpoint.config.contains("model"))
    fail("{} has no section 'model'", source);
  ModelKeys keys;
  OptionTable table;
  bind_model(table, keys);
  nlohmann::json model;
  model["model"] = checkpoint.config.at("model");
  table.set_from_json(model, source);
  return resolve(keys);
}

Device compute_device(std::string_view name) {
  if (name == "cpu") return Device::cpu;
  if (name != "auto" && name != "cuda") usage_error("device '{}': expected auto, cpu or cuda", name);
  if (name == "auto" && gpu_count() == 0) return Device::cpu;
  return open_gpu().device;
}

DType compute_dtype(std::string_view name, Device device) {
  if (name == "auto") return device == Device::cuda || ops::bf16_is_fast() ? DType::bf16 : DType::f32;
  if (name == "f64" && device == Device::cuda)
    usage_error("dtype f64: the reference runs on the CPU alone, expected bf16 or f32");
  for (const DType d : {DType::f32, DType::bf16, DType::f64})
    if (name == dtype_name(d)) return d;
  usage_error("dtype '{}': expected auto, bf16, f32 or f64", name);
}

std::vector<NamedTensor> named_weights(const ModelParameters& parameters, const ParameterStore& store) {
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < parameters.list.size(); ++i) {
    const Tensor master = store.weight(int(i));
    tensors.push_back(
        {parameters.list[i].name, parameters.list[i].shape, master ? master : store.rounded(int(i))});
  }
  return tensors;
}

LoadedModel load_model(const std::filesystem::path& path, DType compute, int64_t max_rows, Device device,
                       Masters masters) {
  LoadedModel loaded{load_checkpoint(find_checkpoint(path), CheckpointParts::weights), nullptr};
  const ModelConfig config = checkpoint_model_config(loaded.checkpoint);
  ModelOptions options;
  options.compute = compute;
  options.max_rows = max_rows > 0 ? max_rows : config.context;
  options.train = false;
  options.device = device;
  options.masters = masters;
  loaded.model = std::make_unique<Model>(config, options);
  read_into(loaded.checkpoint.weights, named_weights(loaded.model->parameters(), loaded.model->store()));
  loaded.model->store().round();
  return loaded;
}

}  // namespace sps
