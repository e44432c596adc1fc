// fuzz_seeds FOLDER: writes the inputs that fuzzing begins with, a folder for each fuzzer. They are small,
// right files, made by the program's own writers; libFuzzer finds what is wrong with others.
#include <cstdio>
#include <iterator>

#include "convert/test_llama.h"
#include "data/test_packing.h"
#include "data/token_file.h"
#include "fuzz/fuzz.h"
#include "model/checkpoint_files.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/bpe_trainer.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/splitter.h"
#include "tokenizer/test_score_bpe.h"
#include "train/run_config.h"

namespace {

using namespace sps;
namespace fs = std::filesystem;

constexpr std::string_view kText =
    "The list's 12345 items:\n\n  don't   stop, na\xC3\xAFve \xE2\x82\xAC 7 \xF0\x9F\x98\x80 "
    "e\xCC\x81\t<|endoftext|>\r\n"
    "\xE6\x97\xA5\xE6\x9C\xAC \xFF\xE2\x82 HTTPServer's x\xC2\xA0y";

class Seeds {
 public:
  explicit Seeds(fs::path root) : root_(std::move(root)) {}

  // The first byte chooses, where the fuzzer has a choice; parts are joined by borders.
  void add(const std::string& fuzzer, int choice, const std::vector<std::string>& parts) {
    std::string bytes;
    if (choice >= 0) bytes += char(choice);
    for (size_t i = 0; i < parts.size(); ++i) (i > 0 ? bytes += fuzz::kBorder : bytes) += parts[i];
    fs::create_directories(root_ / fuzzer);
    std::ofstream(root_ / fuzzer / fmt::format("seed-{}", count_++), std::ios::binary) << bytes;
  }

 private:
  fs::path root_;
  int count_ = 0;
};

BpeModel small_bpe(const std::string& pattern) {
  BpeTrainer trainer({.vocab_size = 270, .pattern = pattern, .special = {"<|pad|>"}, .min_frequency = 1});
  trainer.add(std::vector<std::string>(3, std::string(kText)));
  return trainer.train();
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    const size_t n = std::min<size_t>(3, bytes.size() - i);
    for (size_t k = 0; k < 3; ++k) bits = bits << 8 | (k < n ? uint8_t(bytes[i + k]) : 0);
    for (size_t k = 0; k < 4; ++k) text += k <= n ? kDigits[bits >> (18 - 6 * k) & 63] : '=';
  }
  return text;
}

void tokenizers(Seeds& seeds) {
  const std::string text(kText);
  for (const std::string pattern : {"gpt2", "llama3", "qwen2", "o200k"}) {
    BpeModel model = small_bpe(pattern);
    seeds.add("tokenizer_json", -1, {BpeTokenizer(model).to_json(), text});
    model.splits.insert(model.splits.begin(), {SplitStep::Kind::digits, ""});
    model.splits.push_back({SplitStep::Kind::pattern, R"([^\s]+|\s+(?!\S)|\s+)"});
    model.nfc = model.whole_words = true;
    model.added.push_back({"don't", int32_t(model.tokens.size()), false});
    seeds.add("tokenizer_json", -1, {BpeTokenizer(model).to_json(), text});
  }
  const BpeModel model = small_bpe("gpt2");
  nlohmann::json vocab;
  std::string merges = "#version: 0.2\n", ranks;
  for (size_t id = 0; id < model.tokens.size(); ++id) {
    if (model.tokens[id].empty()) continue;
    vocab[to_alphabet(model.tokens[id])] = id;
    ranks += fmt::format("{} {}\n", base64(model.tokens[id]), id);
  }
  vocab["<|endoftext|>"] = model.eot;
  for (const Merge& m : model.merges)
    merges += fmt::format("{} {}\n", to_alphabet(model.tokens[size_t(m.left)]),
                          to_alphabet(model.tokens[size_t(m.right)]));
  seeds.add("gpt2_files", -1, {dump_json(vocab), merges, text});
  for (int stem = 0; stem < 5; ++stem) seeds.add("tiktoken", stem, {ranks, text});
  for (int pattern = 0; pattern < 6; ++pattern) seeds.add("splitter", pattern, {text});
}

void documents(Seeds& seeds) {
  const std::string lines = R"({"id": "a", "text": "One \u20ac\n", "meta": {"a": {"b": null}}}

{"a": {"b": "x\ud83d\ude00", "c": 7}, "id": -1, "text": null, "n": [1.5e3, true, {}]}
)";
  const std::string array = R"( [{"text": "a"}, {"text": "b]", "id": 3} ] )";
  for (int fields = 0; fields < 5; ++fields)
    for (const std::string& line : {lines.substr(0, lines.find('\n')), lines.substr(lines.find("{\"a\""))})
      seeds.add("json_documents", fields, {line});
  for (int name = 0; name < 8; ++name)
    for (const std::string& text : {lines, array, std::string("\xEF\xBB\xBF plain\n")})
      for (const std::string& bytes :
           {text, gzip(text), zstd(text), gzip(lines) + gzip(text), zstd("") + zstd(text)})
        seeds.add("documents", name, {bytes});
}

std::string file_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void token_files(Seeds& seeds) {
  const fuzz::Scratch scratch;
  const std::vector<int32_t> ids = {72, 105, 256, 0, 255, 256};
  for (const TokenType type : {TokenType::u16, TokenType::u32})
    for (const bool headed : {false, true}) {
      const fs::path path = scratch.path() / "train.bin";
      TokenMeta meta{.tokenizer = "bytes",
                     .fingerprint = ByteTokenizer().fingerprint(),
                     .vocab_size = 257,
                     .eot = 256,
                     .type = type,
                     .format = headed ? TokenFormat::llmc : TokenFormat::sps};
      const auto write = [&](TokenWriter&& writer) {
        writer.append(ids);
        writer.commit();
        meta.train = meta.val = {writer.tokens(), 2, writer.hash(), 4};
      };
      headed ? write(TokenWriter(path, type, ids.size())) : write(TokenWriter(path, type));
      meta.text_field = "text";
      meta.inputs = {"a.jsonl"};
      meta.files = {{"a.jsonl", 100}};
      const std::string bytes = file_text(path);
      seeds.add("token_file", 0, {bytes});
      seeds.add("token_file", 1, {meta.to_json(), bytes, bytes});
    }
}

void checkpoints(Seeds& seeds) {
  const fuzz::Scratch scratch;
  const std::vector<float> values(6, 0.5F);
  const std::vector<double> wide(2, -1);
  const fs::path path = scratch.path() / "weights.safetensors";
  write_safetensors(
      path,
      std::map<std::string, StoredTensor>{{"a.weight", {StoredType::f32, {2, 3}, values.data(), 24}},
                                          {"b", {StoredType::f64, {2}, wide.data(), 16}},
                                          {"scalar", {StoredType::bf16, {}, values.data(), 2}},
                                          {"empty", {StoredType::i8, {0, 5}, values.data(), 0}}},
      {{"format", "pt"}});
  const std::string weights = file_text(path);
  seeds.add("safetensors", -1, {weights});
  for (const char* recipe_name :
       {"xs_sps_w64_20b", "s_standard_10b_seed1", "1b_free_pause_pooled_phase75_100b"}) {
    RunConfig config = recipe(recipe_name);
    const OptionTable table = bind(config);
    const std::string stored = dump_json(table.to_json());
    seeds.add("checkpoint", 0, {R"({"step": 3, "optimizer_steps": [3]})", stored, weights});
    seeds.add("checkpoint", 1,
              {checkpoint_state_text({CheckpointKind::named, 4096}, {{"step", 3}},
                                     {{kConfigFile, {stored.size(), hash64(stored)}},
                                      {kWeightsFile, {weights.size(), hash64(weights)}}}),
               stored, weights});
    seeds.add("run_config", 0, {table.to_toml(), "train.micro_batch=2\nmodel.d_ffn=1,2,3\nlr=3e-4"});
    seeds.add("run_config", 1, {recipe_name, "train.tokens=2e9\nwindow=full\npred.input=token"});
  }
}

void llama_models(Seeds& seeds) {
  const ScoreBpeModel scored = small_score_bpe();
  const std::string text(kText);
  seeds.add("score_bpe", 0, {llama2c_tokenizer_file(scored), text});
  seeds.add("score_bpe", 1, {ScoreBpeTokenizer(scored).to_json(), text});
  seeds.add("score_bpe", 2, {sentencepiece_file(scored), text});
  for (const bool tied : {true, false}) {
    TestLlama llama{
        .width = 4, .ffn = 3, .layers = 2, .heads = 2, .kv_heads = 1, .vocab = 5, .context = 3, .tied = tied};
    llama.randomise(1);
    seeds.add("llama_files", 0, {llama.llama2c_file()});
    llama.rotary = 0.5;
    seeds.add("llama_files", 1, {dump_json(llama.config())});
    seeds.add("llama_files", 2, {dump_json(llama.params())});
  }
  seeds.add("llama_files", 3,
            {R"({"post_processor": {"type": "Sequence", "processors": [{"type": "TemplateProcessing",
                 "single": [{"SpecialToken": {"id": "<s>"}}], "special_tokens": {"<s>": {"ids": [7]}}}]}})"});
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return std::fputs("usage: fuzz_seeds FOLDER\n", stderr), 2;
  Seeds seeds(arguments[1]);
  tokenizers(seeds);
  documents(seeds);
  token_files(seeds);
  checkpoints(seeds);
  llama_models(seeds);
  return 0;
}
