#include "convert/convert.h"

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"
#include "convert/llama2c.h"
#include "convert/llama_files.h"
#include "model/keys.h"
#include "model/load.h"
#include "tokenizer/score_bpe.h"
#include "train/checkpoint.h"

namespace sps {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kUnderstood =
    "a model file of llama2.c (.bin), .safetensors, .safetensors.index.json, or a folder with one of the "
    "last two";

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The model's file in a folder as Hugging Face or Meta publish one.
fs::path model_in_folder(const fs::path& folder) {
  std::vector<fs::path> indices, files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(kIndexSuffix)) indices.push_back(entry.path());
    if (name.ends_with(".safetensors")) files.push_back(entry.path());
  }
  const auto& found = indices.empty() ? files : indices;
  if (found.size() != 1)
    usage_error("the folder {} has {} models; expected {}", folder.string(), found.size(),
                found.empty() ? kUnderstood : "one, or the name of one");
  return found[0];
}

// Where no file says something an option may; where one does it may say the same.
template <class Value>
void take_option(std::optional<Value>& fact, const std::optional<Value>& given, const char* option,
                 const std::string& what) {
  if (!given) return;
  if (fact && *fact != *given) usage_error("{} {}: {} says {}", option, *given, what, *fact);
  fact = given;
}

void take_options(LlamaFacts& facts, const LlamaFacts& given, const std::string& what) {
  take_option(facts.heads, given.heads, "--heads", what);
  take_option(facts.kv_heads, given.kv_heads, "--kv-heads", what);
  take_option(facts.rope_theta, given.rope_theta, "--rope-theta", what);
  take_option(facts.norm_eps, given.norm_eps, "--norm-eps", what);
  if (given.context && facts.context && *given.context > *facts.context)
    usage_error("--context {}: {} says {}, and it can only be shortened", *given.context, what,
                *facts.context);
  if (given.context) facts.context = given.context;
}

// A source that is open: what it says and how its tensors are read.
struct Source {
  std::string format;
  std::vector<fs::path> paths;
  LlamaFacts facts;
  std::function<void(LlamaFacts&)> complete;  // with what the tensors alone say
  std::function<void(const ModelConfig&)> check;
  std::function<LlamaReader(const ModelConfig&)> reader;
};

Source open_llama2c(const fs::path& path) {
  auto mapped = std::make_shared<MappedFile>(path);
  auto file = std::make_shared<Llama2cFile>(mapped->bytes(), path.string());
  Source source{"llama2.c", {path}, file->facts(), [](LlamaFacts&) {}, [](const ModelConfig&) {}, {}};
  source.reader = [mapped, file](const ModelConfig&) {
    return [mapped, file](LlamaTensor t, int64_t layer, float* out) { file->read(t, layer, out); };
  };
  return source;
}

Source open_safetensors(const fs::path& path) {
  auto files = std::make_shared<TensorFiles>(path);
  auto llama = std::make_shared<LlamaFiles>(*files);
  Source source{"safetensors", files->paths(), {}, {}, {}, {}};
  const fs::path folder = path.parent_path(), config = folder / "config.json",
                 params = folder / "params.json";
  if (is_there(config)) {
    source.facts = facts_of_config(read_text(config), config.string());
    source.paths.push_back(config);
  } else if (is_there(params)) {
    source.facts = facts_of_params(read_text(params), params.string());
    source.paths.push_back(params);
  }
  source.complete = [files, llama](LlamaFacts& facts) { llama->add_facts(facts); };
  source.check = [files, llama](const ModelConfig& c) { llama->check(c); };
  source.reader = [files, llama](const ModelConfig& c) {
    return [files, llama, c](LlamaTensor t, int64_t layer, float* out) { llama->read(c, t, layer, out); };
  };
  return source;
}

// With the name of the tokenizer's files in `source`; null if there is none.
std::unique_ptr<Tokenizer> open_tokenizer(const ConvertOptions& options, const fs::path& folder,
                                          Source& source) {
  if (options.tokenizer == "none") return nullptr;
  TokenizerOptions how;
  if (options.given.eot) how.eot_id = int32_t(*options.given.eot);
  if (!options.tokenizer.empty()) {
    std::error_code ignored;
    if (fs::is_regular_file(options.tokenizer, ignored)) source.paths.emplace_back(options.tokenizer);
    return make_tokenizer(options.tokenizer, how);
  }
  if (source.format == "llama2.c") return nullptr;
  std::string reason;  // why the first one is not taken
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    const fs::path beside = folder / name;
    if (!is_there(beside)) continue;
    try {
      auto tokenizer = make_tokenizer(beside.string(), how);
      source.paths.push_back(beside);
      return tokenizer;
    } catch (const Error& e) {
      if (reason.empty()) reason = e.what();
    }
  }
  if (!reason.empty()) fail("{} (--tokenizer none leaves it out, --tokenizer FILE takes another)", reason);
  return nullptr;
}

// Ids that begin and end texts: what the options say, then the tokenizer, then the model's files. Many
// configurations name a begin of text that nothing puts there, so of those that come with a tokenizer that
// one decides; and one id for both in a configuration is an end of text.
void choose_ids(LlamaFacts& facts, const LlamaFacts& given, const Tokenizer* tokenizer,
                const Source& source) {
  if (tokenizer != nullptr) {
    facts.eot = tokenizer->eot();
    facts.bos = tokenizer->bos();
    for (const fs::path& path : source.paths)
      if (path.filename() == "tokenizer.json" && facts.bos == -1)
        facts.bos = begin_of_template(read_text(path), path.string());
  } else if (source.format != "llama2.c" && facts.bos == facts.eot) {
    facts.bos = std::nullopt;
  }
  if (given.eot) facts.eot = given.eot;
  if (given.bos) facts.bos = given.bos;
}

void check_tokenizer(const Tokenizer& tokenizer, const ConvertOptions& options, const ModelConfig& config) {
  const bool whole = dynamic_cast<const ScoreBpeTokenizer*>(&tokenizer) != nullptr;
  if (tokenizer.vocab_size() > config.vocab || (whole && tokenizer.vocab_size() != config.vocab))
    fail("the tokenizer has {} ids, but the model {} has {}", tokenizer.vocab_size(), options.in.string(),
         config.vocab);
  if (tokenizer.eot() != config.eot)
    usage_error("--eot {}: the tokenizer ends a text with id {}", config.eot, tokenizer.eot());
}

nlohmann::json provenance(const Source& source) {
  nlohmann::json files = nlohmann::json::object();
  for (const fs::path& path : source.paths) {
    const MappedFile file(path);
    files[path.filename().string()] = {{"bytes", file.bytes().size()},
                                       {"xxh3", hex(hash64(file.bytes().data(), file.bytes().size()))}};
  }
  return {{"format", source.format}, {"files", files}};
}

}  // namespace

Converted convert_model(const ConvertOptions& options) {
  if (!is_there(options.in)) usage_error("the model {} does not exist", options.in.string());
  if (is_there(options.out)) usage_error("--out {}: it is there already", options.out.string());
  std::error_code ignored;
  const bool folder = fs::is_directory(options.in, ignored);
  const fs::path path = folder ? model_in_folder(options.in) : options.in;
  const std::string name = path.filename().string(), what = path.string();
  const bool tensors = name.ends_with(".safetensors") || name.ends_with(kIndexSuffix);
  if (!tensors && !name.ends_with(".bin")) usage_error("{}: expected {}", what, kUnderstood);

  Source source = tensors ? open_safetensors(path) : open_llama2c(path);
  take_options(source.facts, options.given, what);
  const auto tokenizer = open_tokenizer(options, path.parent_path(), source);
  choose_ids(source.facts, options.given, tokenizer.get(), source);
  source.complete(source.facts);
  const ModelConfig config = llama_model(source.facts, what);
  if (tokenizer) check_tokenizer(*tokenizer, options, config);
  source.check(config);

  const ModelParameters parameters = describe_parameters(config);
  const ParameterStore store(parameters.list, DType::f32, false);
  import_llama(config, parameters, store, source.reader(config));

  ModelKeys keys = keys_of(config);
  OptionTable table;
  bind_model(table, keys);
  nlohmann::json stored = table.to_json();
  stored["source"] = provenance(source);
  if (const fs::path parent = fs::absolute(options.out).parent_path(); !is_there(parent))
    make_writable_directory(parent);
  write_checkpoint(options.out, {.kind = CheckpointKind::named,
                                 .tokens = 0,
                                 .config = stored,
                                 .state = nlohmann::json::object(),
                                 .weights = named_weights(parameters, store),
                                 .optimizer = {},
                                 .tokenizer = tokenizer ? tokenizer->to_json() : ""});
  return {config, tokenizer ? tokenizer->name() : "", parameters.count()};
}

}  // namespace sps
