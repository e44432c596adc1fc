#include "cli/bench_subject.h"

#include <filesystem>

#include "train/run_config.h"

namespace sps {

BenchSubject::BenchSubject(const std::string& source, const std::vector<std::string>& overrides, DType dtype,
                           Device device, bool int8)
    : name_(source) {
  const Masters masters = int8 ? Masters::all : Masters::needed;
  if (std::filesystem::is_directory(source)) {
    if (!overrides.empty())
      usage_error("{} is a checkpoint, whose model is settled: '{}' cannot be set", source, overrides[0]);
    model_ = std::move(load_model(source, dtype, 1, device, masters).model);
    config_ = model_->config();
    if (int8) int8_.emplace(model_->parameters(), model_->store());
    return;
  }
  RunConfig run = load_run_config(source, overrides);
  name_ = run.name;
  if (!run.data.dir.empty())
    if (const auto meta = read_token_meta(run.data.dir)) adopt_vocabulary(*meta, run.data.dir, run.model);
  config_ = resolve(run.model);
  parameters_ = describe_parameters(config_);
  store_ = std::make_unique<ParameterStore>(parameters_.list, dtype, false, device, masters);
  store_->initialise(uint64_t(run.train.seed));
  if (int8) int8_.emplace(parameters_, *store_);
}

std::vector<BenchSubject> bench_subjects(const std::vector<std::string>& words, DType dtype, Device device,
                                         bool int8) {
  std::vector<std::string> overrides;
  for (const std::string& word : words)
    if (word.find('=') != std::string::npos) overrides.push_back(word);
  std::vector<BenchSubject> subjects;
  for (const std::string& word : words)
    if (word.find('=') == std::string::npos) subjects.emplace_back(word, overrides, dtype, device, int8);
  if (subjects.empty()) usage_error("no model to measure: expected at least one recipe or checkpoint");
  return subjects;
}

}  // namespace sps
