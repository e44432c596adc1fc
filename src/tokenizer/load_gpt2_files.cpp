#include "tokenizer/load_gpt2_files.h"

#include "base/error.h"
#include "base/files.h"
#include "tokenizer/splitter.h"
#include "tokenizer/text_lines.h"
#include "tokenizer/vocabulary.h"

namespace sps {

BpeModel parse_gpt2_files(std::string_view vocab, std::string_view vocab_name, std::string_view merges,
                          std::string_view merges_name, const TokenizerOptions& options,
                          const std::function<EotChoice()>& beside) {
  VocabularyJson vocabulary = read_vocab_json(vocab, vocab_name);
  for_each_line(merges, [&](int64_t number, std::string_view line) {
    if (number == 1 && line.starts_with("#version")) return;
    if (!split_merge(line, vocabulary.merges.emplace_back()))
      fail("{}, line {}: '{}' is not two tokens with a space between them", merges_name, number, line);
  });
  BpeModel model;
  model.splits.push_back(
      {SplitStep::Kind::pattern, options.pattern.empty() ? std::string(patterns::gpt2) : options.pattern});
  set_tokens(model, vocabulary, fmt::format("{} with {}", vocab_name, merges_name));
  set_eot(model, {.options = options, .beside = beside}, vocab_name);
  return model;
}

BpeModel load_gpt2_files(const std::filesystem::path& vocab, const std::filesystem::path& merges,
                         const TokenizerOptions& options) {
  return parse_gpt2_files(read_text(vocab), vocab.string(), read_text(merges), merges.string(), options,
                          [&] { return eot_in_folder(vocab.parent_path()); });
}

}  // namespace sps
