#include "tokenizer/load_tiktoken.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "base/error.h"
#include "base/files.h"
#include "tokenizer/splitter.h"
#include "tokenizer/text_lines.h"
#include "tokenizer/token_index.h"
#include "tokenizer/vocabulary.h"

namespace sps {

namespace {

constexpr size_t kMaxToken = 1024;  // bytes; all splits of a token are looked up

std::optional<std::string> from_base64(std::string_view text) {
  static constexpr auto kValues = [] {
    std::array<int8_t, 256> values{};
    for (auto& value : values) value = -1;
    constexpr std::string_view letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < letters.size(); ++i) values[static_cast<unsigned char>(letters[i])] = int8_t(i);
    return values;
  }();
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  size_t padding = 0;
  while (padding < 2 && text[text.size() - 1 - padding] == '=') ++padding;
  std::string bytes;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_padding = i >= text.size() - padding;
    const int value = is_padding ? 0 : kValues[static_cast<unsigned char>(text[i])];
    if (value < 0) return std::nullopt;
    bits = bits << 6 | uint32_t(value);
    if (i % 4 != 3) continue;
    for (const int shift : {16, 8, 0}) bytes += char(bits >> shift);
    bits = 0;
  }
  bytes.resize(bytes.size() - padding);
  return bytes;
}

// Special tokens and pattern of the files that are known.
bool add_known(std::string_view stem, BpeModel& model) {
  const auto end_of_text = [&](int32_t id) { model.added.push_back({"<|endoftext|>", id, true}); };
  std::string_view pattern;
  if (stem == "gpt2" || stem == "r50k_base" || stem == "p50k_base") {
    pattern = patterns::gpt2_tiktoken;
    end_of_text(50256);
  } else if (stem == "cl100k_base") {
    pattern = patterns::cl100k_tiktoken;
    end_of_text(100257);
    model.added.push_back({"<|fim_prefix|>", 100258, true});
    model.added.push_back({"<|fim_middle|>", 100259, true});
    model.added.push_back({"<|fim_suffix|>", 100260, true});
    model.added.push_back({"<|endofprompt|>", 100276, true});
  } else if (stem == "o200k_base") {
    pattern = patterns::o200k;
    end_of_text(199999);
    model.added.push_back({"<|endofprompt|>", 200018, true});
  } else if (stem == "tokenizer") {
    // Llama 3.1's names; Llama 3 has the same ones for all that it uses.
    pattern = patterns::cl100k;
    constexpr int32_t first = 128000, count = 256;
    constexpr std::array<std::string_view, 11> names = {
        "begin_of_text", "end_of_text", "",       "",          "finetune_right_pad_id", "", "start_header_id",
        "end_header_id", "eom_id",      "eot_id", "python_tag"};
    int reserved = 0;
    for (int32_t i = 0; i < count; ++i) {
      const bool named = size_t(i) < names.size() && !names[size_t(i)].empty();
      model.added.push_back({named ? fmt::format("<|{}|>", names[size_t(i)])
                                   : fmt::format("<|reserved_special_token_{}|>", reserved++),
                             first + i, true});
    }
  } else {
    return false;
  }
  model.splits.push_back({SplitStep::Kind::pattern, std::string(pattern)});
  return true;
}

void read_ranks(std::string_view text, std::string_view what, BpeModel& model) {
  const auto lines = size_t(std::count(text.begin(), text.end(), '\n')) + 1;
  for_each_line(text, [&](int64_t number, std::string_view line) {
    const size_t space = line.find(' ');
    int64_t rank = -1;
    std::optional<std::string> bytes;
    if (space != std::string_view::npos) {
      const std::string_view digits = line.substr(space + 1);
      const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
      if (parsed.ec == std::errc() && parsed.ptr == digits.data() + digits.size())
        bytes = from_base64(line.substr(0, space));
    }
    if (!bytes || rank < 0)
      fail("{}, line {} is not a token in base64, a space and a rank; expected a rank file of tiktoken", what,
           number);
    if (bytes->size() > kMaxToken)
      fail("{}, line {} has a token of {} bytes; at most {} are possible", what, number, bytes->size(),
           kMaxToken);
    check_id(rank, lines, line.substr(0, space), what);
    if (size_t(rank) >= model.tokens.size()) model.tokens.resize(size_t(rank) + 1);
    std::string& token = model.tokens[size_t(rank)];
    if (!token.empty()) fail("{}, line {} has rank {}, which an earlier line has too", what, number, rank);
    token = std::move(*bytes);
  });
}

std::vector<Merge> all_merges(const std::vector<std::string>& tokens) {
  const TokenIndex index(tokens);
  std::vector<Merge> merges;
  for (size_t id = 0; id < tokens.size(); ++id) {
    const std::string_view token = tokens[id];
    for (size_t cut = 1; cut < token.size(); ++cut) {
      const int32_t left = index.find(token.substr(0, cut));
      if (left == TokenIndex::kNone) continue;
      const int32_t right = index.find(token.substr(cut));
      if (right != TokenIndex::kNone) merges.push_back({left, right, int32_t(id)});
    }
  }
  return merges;
}

}  // namespace

BpeModel parse_tiktoken(std::string_view text, std::string_view what, std::string_view stem,
                        const TokenizerOptions& options) {
  BpeModel model;
  model.whole_words = true;
  read_ranks(text, what, model);
  if (!options.pattern.empty()) {
    model.splits.push_back({SplitStep::Kind::pattern, options.pattern});
    if (options.eot.empty())
      fail("{}: a rank file does not say what ends a text; with the option pattern there must be an eot",
           what);
    model.added.push_back({options.eot, int32_t(model.tokens.size()), true});
  } else if (!add_known(stem, model)) {
    fail(
        "{}: no rank file of the name '{}' is known (gpt2, r50k_base, p50k_base, cl100k_base, o200k_base, "
        "tokenizer.model), so the tokenizer options pattern and eot must be given",
        what, stem);
  }
  model.merges = all_merges(model.tokens);
  set_eot(model, {.options = options}, what);
  return model;
}

BpeModel load_tiktoken(const std::filesystem::path& file, const TokenizerOptions& options) {
  return parse_tiktoken(read_text(file), file.string(), file.stem().string(), options);
}

}  // namespace sps
