#include "tokenizer/save_tokenizer_json.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/splitter.h"
#include "tokenizer/vocabulary.h"

namespace sps {

namespace {

using Json = nlohmann::ordered_json;

// Whether readers give the added tokens their ids without finding them in the vocabulary: they count on from
// it.
bool follow_the_vocabulary(const BpeModel& model) {
  const auto ordinary = std::count_if(model.tokens.begin(), model.tokens.end(),
                                      [](const std::string& token) { return !token.empty(); });
  for (size_t i = 0; i < model.added.size(); ++i)
    if (model.added[i].id != ordinary + int64_t(i)) return false;
  return true;
}

Json vocabulary(const BpeModel& model) {
  std::vector<std::pair<std::string, int32_t>> by_id;
  for (size_t id = 0; id < model.tokens.size(); ++id)
    if (!model.tokens[id].empty()) by_id.emplace_back(to_alphabet(model.tokens[id]), int32_t(id));
  const size_t ordinary = by_id.size();
  for (const AddedToken& token : model.added) by_id.emplace_back(token.text, token.id);
  std::unordered_set<std::string_view> seen;
  for (const auto& [text, id] : by_id)
    if (!seen.insert(text).second)
      fail(
          "this tokenizer cannot be written as tokenizer.json: two of its tokens are both written '{}' there",
          text);
  // Where whole words are looked up in the vocabulary, a word of a text could be an added token in it.
  if (model.whole_words && follow_the_vocabulary(model)) by_id.resize(ordinary);
  std::sort(by_id.begin(), by_id.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  Json vocabulary = Json::object();
  // Straight into the underlying vector: the map's own insertion searches all keys before.
  std::vector<Json::object_t::value_type>& entries = vocabulary.get_ref<Json::object_t&>();
  for (auto& [text, id] : by_id) entries.emplace_back(std::move(text), id);
  return vocabulary;
}

Json merges(const BpeModel& model) {
  std::vector<std::string> alphabet;
  for (const std::string& token : model.tokens) alphabet.push_back(to_alphabet(token));
  const auto token = [&](int32_t id) -> const std::string& { return alphabet[size_t(id)]; };
  // Readers take a line of text that begins with "#version" for a remark; then each merge is a pair of texts,
  // which only newer readers know.
  const bool pairs = std::any_of(model.merges.begin(), model.merges.end(),
                                 [&](const Merge& m) { return token(m.left).starts_with("#version"); });
  Json list = Json::array();
  for (const Merge& m : model.merges)
    if (pairs)
      list.push_back({token(m.left), token(m.right)});
    else
      list.push_back(token(m.left) + ' ' + token(m.right));
  return list;
}

Json byte_level(bool prefix_space, bool own_pattern) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", prefix_space},
          {"trim_offsets", true},
          {"use_regex", own_pattern}};
}

// The pattern as the readers' engine (Oniguruma) takes it: there `$` is also the end of a line, and a counted
// repetition cannot be possessive.
std::string regex_of(const std::string& pattern) {
  return pattern == patterns::cl100k_tiktoken ? std::string(patterns::cl100k_written) : pattern;
}

Json pre_tokenizer(const BpeModel& model) {
  std::vector<SplitStep> steps = model.splits;
  // "ByteLevel" brings GPT-2's pattern along; as the last step it is customarily left to it.
  const bool own_pattern =
      !steps.empty() && steps.back().kind == SplitStep::Kind::pattern &&
      (steps.back().pattern == patterns::gpt2 || steps.back().pattern == patterns::gpt2_tiktoken);
  if (own_pattern) steps.pop_back();
  // "ByteLevel" puts the space before each piece that reaches it.
  if (model.prefix_space && !steps.empty())
    fail(
        "this tokenizer cannot be written as tokenizer.json: it puts a space before a text and cuts it with "
        "{} "
        "other steps than GPT-2's pattern",
        steps.size());
  Json list = Json::array();
  for (const SplitStep& step : steps)
    if (step.kind == SplitStep::Kind::digits)
      list.push_back({{"type", "Digits"}, {"individual_digits", true}});
    else
      list.push_back({{"type", "Split"},
                      {"pattern", {{"Regex", regex_of(step.pattern)}}},
                      {"behavior", "Isolated"},
                      {"invert", false}});
  Json last = byte_level(model.prefix_space, own_pattern);
  if (list.empty()) return last;
  list.push_back(std::move(last));
  return {{"type", "Sequence"}, {"pretokenizers", std::move(list)}};
}

// tokenizer.json has no place for the end of text. Where its name does not give it away it is the special
// token of a template that adds nothing: readers' ids stay as they are, and it survives their writing the
// file again.
Json post_processor(const BpeModel& model) {
  if (usual_eot(model) == model.eot) return nullptr;
  const auto sequence = [](const char* id, int type) {
    return Json{{"Sequence", {{"id", id}, {"type_id", type}}}};
  };
  Json tokens = Json::object();
  for (const AddedToken& token : model.added)
    if (token.id == model.eot)
      tokens[token.text] = {{"id", token.text}, {"ids", {token.id}}, {"tokens", {token.text}}};
  return {{"type", "TemplateProcessing"},
          {"single", Json::array({sequence("A", 0)})},
          {"pair", Json::array({sequence("A", 0), sequence("B", 1)})},
          {"special_tokens", std::move(tokens)}};
}

std::string text_of(const Json& json) {
  try {
    return json.dump(2) + '\n';
  } catch (const Json::type_error&) {
    fail(
        "this tokenizer cannot be written as tokenizer.json: the text of a special token or a pattern is not "
        "UTF-8");
  }
}

}  // namespace

std::string to_tokenizer_json(const BpeModel& model) {
  Json added = Json::array();
  for (const AddedToken& token : model.added)
    added.push_back({{"id", token.id},
                     {"content", token.text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", token.special}});
  Json bpe{{"type", "BPE"},
           {"dropout", nullptr},
           {"unk_token", nullptr},
           {"continuing_subword_prefix", nullptr},
           {"end_of_word_suffix", nullptr},
           {"fuse_unk", false},
           {"byte_fallback", false},
           {"ignore_merges", model.whole_words},
           {"vocab", vocabulary(model)},
           {"merges", merges(model)}};
  return text_of({{"version", "1.0"},
                  {"truncation", nullptr},
                  {"padding", nullptr},
                  {"added_tokens", std::move(added)},
                  {"normalizer", model.nfc ? Json{{"type", "NFC"}} : Json(nullptr)},
                  {"pre_tokenizer", pre_tokenizer(model)},
                  {"post_processor", post_processor(model)},
                  {"decoder", byte_level(true, true)},
                  {"model", std::move(bpe)}});
}

std::string to_tokenizer_config_json(const BpeModel& model) {
  Json config{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
  for (const AddedToken& token : model.added)
    if (token.id == model.eot) config["eos_token"] = token.text;
  return text_of(config);
}

}  // namespace sps
