#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "base/hash.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/load_gpt2_files.h"
#include "tokenizer/load_score_bpe.h"
#include "tokenizer/load_sentencepiece.h"
#include "tokenizer/load_tiktoken.h"
#include "tokenizer/load_tokenizer_json.h"

namespace sps {

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  bytes.reserve(4 * ids.size());
  int32_t previous = -1;
  for (const int32_t id : ids) bytes += text_of(id, std::exchange(previous, id));
  return bytes;
}

void ByteTokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  const size_t before = ids.size();
  ids.resize(before + text.size());
  for (size_t i = 0; i < text.size(); ++i) ids[before + i] = static_cast<unsigned char>(text[i]);
}

void ByteTokenizer::encode_in_parts(std::string_view text,
                                    const std::function<void(std::span<const int32_t>)>& take) const {
  constexpr size_t kPart = size_t{1} << 16;
  std::vector<int32_t> ids;
  for (; !text.empty(); text.remove_prefix(std::min(kPart, text.size()))) {
    ids.clear();
    encode(text.substr(0, kPart), ids);
    take(ids);
  }
}

std::string_view ByteTokenizer::token_bytes(int32_t id) const {
  static const std::string all = [] {
    std::string bytes;
    for (int b = 0; b < 256; ++b) bytes += char(b);
    return bytes;
  }();
  return id >= 0 && id < 256 ? std::string_view(all).substr(size_t(id), 1) : std::string_view();
}

std::string ByteTokenizer::fingerprint() const {
  return hex(hash64("bytes 0-255, end of text 256"));
}

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kUnderstood =
    "bytes, a tokenizer.json, encoder.json with vocab.bpe, vocab.json with merges.txt, a rank file of "
    "tiktoken, sentencepiece's .model, a tokenizer's .bin of llama2.c, or a folder with one of these";

constexpr std::pair<std::string_view, std::string_view> kGpt2Pairs[] = {{"encoder.json", "vocab.bpe"},
                                                                        {"vocab.json", "merges.txt"}};

// What contradicts itself in the model is reported of its file.
template <class T, class Model>
std::unique_ptr<Tokenizer> run(Model model, const fs::path& file) {
  try {
    return std::make_unique<T>(std::move(model));
  } catch (const Error& e) {
    fail("{}: {}", file.string(), e.what());
  }
}

std::unique_ptr<Tokenizer> load_json(const fs::path& file, const TokenizerOptions& options) {
  const MappedFile mapped(file);
  const std::string_view text(reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size());
  if (is_score_bpe_json(text))
    return run<ScoreBpeTokenizer>(parse_score_bpe_json(text, file.string(), options), file);
  return run<BpeTokenizer>(load_tokenizer_json(file, options), file);
}

std::unique_ptr<Tokenizer> load_file(const fs::path& file, const TokenizerOptions& options) {
  const std::string name = file.filename().string();
  for (const auto& [vocab, merges] : kGpt2Pairs) {
    if (name != vocab && name != merges) continue;
    const fs::path other = file.parent_path() / (name == vocab ? merges : vocab);
    if (!fs::exists(other))
      usage_error("'{}' needs '{}' beside it", file.string(), other.filename().string());
    return run<BpeTokenizer>(
        load_gpt2_files(file.parent_path() / vocab, file.parent_path() / merges, options), file);
  }
  if (name.ends_with(".bin"))
    return run<ScoreBpeTokenizer>(parse_llama2c_tokenizer(read_text(file), file.string(), options), file);
  if (name.ends_with(".json")) return load_json(file, options);
  if (name.ends_with(".model"))
    if (const std::string bytes = read_text(file); is_sentencepiece(bytes))
      return run<ScoreBpeTokenizer>(parse_sentencepiece(bytes, file.string(), options), file);
  return run<BpeTokenizer>(load_tiktoken(file, options), file);
}

std::unique_ptr<Tokenizer> load_folder(const fs::path& folder, const TokenizerOptions& options) {
  if (const fs::path file = folder / "tokenizer.json"; fs::exists(file)) return load_file(file, options);
  for (const auto& [vocab, merges] : kGpt2Pairs)
    if (fs::exists(folder / vocab) && fs::exists(folder / merges)) return load_file(folder / vocab, options);
  std::vector<fs::path> ranks;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".tiktoken" || entry.path().filename() == "tokenizer.model")
      ranks.push_back(entry.path());
  if (ranks.size() > 1)
    usage_error("the folder '{}' has {} rank files; name one of them", folder.string(), ranks.size());
  if (const fs::path file = folder / "tokenizer.bin"; ranks.empty() && fs::exists(file))
    return load_file(file, options);
  if (ranks.empty())
    usage_error("no tokenizer is in the folder '{}'; understood are {}", folder.string(), kUnderstood);
  return load_file(ranks[0], options);
}

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(std::string_view name_or_path, const TokenizerOptions& options) {
  if (name_or_path == "bytes") return std::make_unique<ByteTokenizer>();
  const fs::path path(name_or_path);
  std::error_code ignored;
  const bool folder = fs::is_directory(path, ignored);
  if (!folder && !fs::exists(path, ignored))
    usage_error("no tokenizer is called '{}' and no such file is there; understood are {}", name_or_path,
                kUnderstood);
  return folder ? load_folder(path, options) : load_file(path, options);
}

}  // namespace sps
