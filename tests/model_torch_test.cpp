// Loss and every gradient of the tests' models against tests/oracles/model_torch.py, which builds each model
// again in PyTorch's float64 from the formulas. SPS_TORCH_PYTHON is a Python with PyTorch (scripts/oracles.sh
// names the one of `make bench`). With SPS_ORACLE_OUT the files that the two sides exchange are left in that
// folder, also without any Python.
#include <gtest/gtest.h>

#include <cstdlib>
#include <list>

#include "base/json.h"
#include "base/threads.h"
#include "model/keys.h"
#include "model/test_models.h"
#include "ops/check.h"
#include "program.h"
#include "tensor/safetensors.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBatch = 2, kLength = 12, kStride = 199;

// Tensors for a file, copied as doubles: a pass writes over the gradients of the one before.
class Export {
 public:
  void add(const std::string& name, const std::vector<int64_t>& shape, Tensor tensor) {
    const OnHost host(tensor);
    std::vector<double>& copy = copies_.emplace_back();
    for (int64_t k = 0; k < tensor.count(); ++k)
      copy.push_back(host->dtype == DType::f64 ? host->as<double>()[k] : double(host->as<float>()[k]));
    tensors_.push_back({name, shape, view(copy.data(), tensor.rows, tensor.cols)});
  }
  void add(const std::string& name, const std::vector<int32_t>& ids) {
    tensors_.push_back({name, {kBatch, kLength}, view(ids.data(), kBatch, kLength)});
  }
  void add(const std::string& name, double number) {
    tensors_.push_back({name, {1}, view(&copies_.emplace_back(1, number)[0], 1, 1)});
  }
  void write(const fs::path& file, const Metadata& metadata) const {
    write_safetensors(file, tensors_, metadata);
  }

 private:
  std::list<std::vector<double>> copies_;  // a list: they stay where they are
  std::vector<NamedTensor> tensors_;
};

// Five inputs, since bf16 is judged by the middle one (model_gradient_test.cpp). The last one's positions are
// far apart, where a wrong frequency or pairing of the rotation shows.
std::vector<TestInput> inputs_of(const ModelConfig& c) {
  std::vector<TestInput> all;
  for (const uint64_t seed : {5, 6, 7, 8, 9}) all.emplace_back(c, kBatch, kLength, seed);
  for (int32_t& position : all.back().positions) position *= kStride;
  return all;
}

// weight.NAME; N.tokens, .targets, .document_start, .positions; BACKEND/N.loss and BACKEND/N.gradient.NAME.
// The loss is the sum over the scored positions: a mean's factor would be rounded to float on its way to the
// head.
void export_model(const TestModel& test, const fs::path& folder) {
  ModelKeys keys = test.keys;
  keys.context = kLength * kStride;
  const ModelConfig c = resolve(keys);
  const std::vector<TestInput> inputs = inputs_of(c);
  Export file;
  for (size_t n = 0; n < inputs.size(); ++n) {
    const std::string at = std::to_string(n) + ".";
    file.add(at + "tokens", inputs[n].tokens);
    file.add(at + "targets", inputs[n].targets);
    file.add(at + "document_start", inputs[n].document_start);
    file.add(at + "positions", inputs[n].positions);
  }
  for (const ops::Backend& backend : ops::all_backends()) {
    Model model(c, {.compute = backend.dtype, .max_rows = kBatch * kLength, .device = backend.device});
    lively_weights(model, 3);
    const ParameterStore& store = model.store();
    if (backend.dtype == DType::f64)
      for (size_t i = 0; i < store.list().size(); ++i)
        file.add("weight." + store.list()[i].name, store.list()[i].shape, store.weight(int(i)));
    for (size_t n = 0; n < inputs.size(); ++n) {
      const std::string at = backend.name() + "/" + std::to_string(n) + ".";
      model.store().zero_gradients(exec_on(backend.device));
      file.add(at + "loss", model.train(inputs[n].input(), 1).nll);
      for (size_t i = 0; i < store.list().size(); ++i)
        file.add(at + "gradient." + store.list()[i].name, store.list()[i].shape, store.gradient(int(i)));
    }
  }
  ModelKeys resolved = keys_of(c);
  OptionTable table;
  bind_model(table, resolved);
  file.write(folder / (test.name + ".safetensors"), {{"keys", dump_json(table.to_json())}});
}

TEST(ModelTorch, LossAndGradientsOfEveryModel) {
  const char* named = std::getenv("SPS_TORCH_PYTHON");
  const char* out = std::getenv("SPS_ORACLE_OUT");
  const TestDir temporary;
  const fs::path folder = out != nullptr ? fs::absolute(out) : temporary.path();
  fs::create_directories(folder);
  const std::string python = named != nullptr ? fs::absolute(named).string() : "";
  const bool torch = named != nullptr && Program(folder, {"-c", "import torch"}, python).wait().status == 0;
  if (torch || out != nullptr) {
    const int threads = thread_count();
    set_thread_count(1);  // tiny passes gain nothing from threads
    for (const TestModel& test : test_models()) export_model(test, folder);
    set_thread_count(threads);
  }
  if (!torch)
    GTEST_SKIP() << "SPS_TORCH_PYTHON names no Python with PyTorch; make bench sets one up for make oracles";
  const fs::path script = fs::path(SPS_SOURCE_DIR) / "tests/oracles/model_torch.py";
  const Outcome o = Program(folder, {script, folder}, python).wait();
  ASSERT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_EQ(lines_of(o.out).size(), test_models().size()) << o.out << o.err;
  std::printf("%s", o.out.c_str());
  std::fflush(stdout);  // or the next child writes it once more
}

}  // namespace
}  // namespace sps
