// A model file of llama2.c, or what stands beside other Llamas: config.json, params.json, a tokenizer's
// template.
#include "convert/llama2c.h"
#include "convert/llama_files.h"
#include "fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  fuzz::Input input(data, size);
  const size_t kind = input.choose(4);
  const std::string_view file = input.rest();
  fuzz::accepts([&] {
    if (kind == 1) facts_of_config(file, "x");
    if (kind == 2) facts_of_params(file, "x");
    if (kind == 3) SPS_CHECK(begin_of_template(file, "x") >= -1);
    if (kind != 0) return;
    const Llama2cFile llama(std::as_bytes(std::span(file)), "x");
    // What is let through can be read as a whole.
    const ModelConfig config = llama_model(llama.facts(), "x");
    const ModelParameters parameters = describe_parameters(config);
    const ParameterStore store(parameters.list, DType::f32, false);
    SPS_CHECK(uint64_t(parameters.count()) * sizeof(float) <= file.size());
    import_llama(config, parameters, store,
                 [&](LlamaTensor t, int64_t layer, float* out) { llama.read(t, layer, out); });
  });
  return 0;
}
