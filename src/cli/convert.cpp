#include "convert/convert.h"

#include "base/error.h"
#include "base/json.h"
#include "cli/cli.h"

namespace sps {

namespace {

struct ConvertArguments {
  ConvertOptions options;
  bool json = false;
};

void convert(const ConvertArguments& args) {
  const auto in_range = [](const std::optional<int64_t>& value, const char* option, int64_t minimum) {
    if (value && (*value < minimum || *value > INT32_MAX))
      usage_error("{} {}: expected a number from {} to {}", option, *value, minimum, INT32_MAX);
  };
  const LlamaFacts& given = args.options.given;
  in_range(given.heads, "--heads", 1);
  in_range(given.kv_heads, "--kv-heads", 1);
  in_range(given.context, "--context", 1);
  in_range(given.eot, "--eot", 0);
  in_range(given.bos, "--bos", -1);
  const Converted converted = convert_model(args.options);
  const ModelConfig& c = converted.config;
  if (args.json) {
    fmt::print("{}\n", dump_json(nlohmann::ordered_json{{"out", args.options.out.string()},
                                                        {"parameters", converted.parameters},
                                                        {"layers", c.state.layers},
                                                        {"d_model", c.state.width},
                                                        {"vocab", c.vocab},
                                                        {"context", c.context},
                                                        {"bos", c.bos},
                                                        {"eot", c.eot},
                                                        {"tokenizer", converted.tokenizer}}));
    return;
  }
  fmt::print("{}: {} parameters in {} layers of width {}, {} ids, context {}, {}\n",
             args.options.out.string(), converted.parameters, c.state.layers, c.state.width, c.vocab,
             c.context,
             converted.tokenizer.empty() ? "without a tokenizer" : "tokenizer " + converted.tokenizer);
}

}  // namespace

void add_convert(CLI::App& app) {
  auto args = std::make_shared<ConvertArguments>();
  ConvertOptions& options = args->options;
  CLI::App* cmd = app.add_subcommand("convert", "Make a checkpoint of a published Llama-family model");
  cmd->footer(
      "Examples:\n"
      "  sps convert stories260K.bin --tokenizer tok512.bin --out stories\n"
      "  sps convert SmolLM-135M/ --out smol\n"
      "  sps convert model.safetensors --heads 8 --context 512 --eot 2 --bos 1 --out model");
  cmd->add_option("model", options.in, "llama2.c's .bin, safetensors or their index, or a folder with those")
      ->required();
  cmd->add_option("-o,--out", options.out, "The checkpoint's folder; must not be there")->required();
  cmd->add_option("--tokenizer", options.tokenizer,
                  "A tokenizer's file or folder, or none; otherwise what stands beside the model");
  cmd->add_option("--heads", options.given.heads, "Query heads, where no file says it");
  cmd->add_option("--kv-heads", options.given.kv_heads,
                  "Key and value heads; otherwise of the tensors' shapes");
  cmd->add_option("--context", options.given.context, "Tokens of a window; may be fewer than the model's");
  cmd->add_option("--rope-theta", options.given.rope_theta, "Rotary base, where no file says it (10000)");
  cmd->add_option("--norm-eps", options.given.norm_eps, "Epsilon of the norms, where no file says it (1e-5)");
  cmd->add_option("--bos", options.given.bos, "Id that begins every text; -1 = none");
  cmd->add_option("--eot", options.given.eot, "Id that ends every text; may be that of --bos");
  cmd->add_flag("--json", args->json, "Print one JSON object");
  cmd->callback([args] { convert(*args); });
}

}  // namespace sps
