#include "tokenizer/load_tokenizer_json.h"

#include <algorithm>

#include "base/error.h"
#include "base/files.h"
#include "tokenizer/splitter.h"
#include "tokenizer/vocabulary.h"

namespace sps {

namespace {

using nlohmann::json;

// Reads members of one JSON object with errors that name file and key.
class Members {
 public:
  Members(const json& object, std::string what, std::string key)
      : object_(object), what_(std::move(what)), key_(std::move(key)) {
    if (!object.is_object()) wrong(key_, object, "an object");
  }

  // Null where the key is missing.
  const json& at(const std::string& key) const {
    static const json null;
    const auto found = object_.find(key);
    return found == object_.end() ? null : *found;
  }
  bool flag(const std::string& key, bool fallback) const {
    const json& value = at(key);
    if (value.is_null()) return fallback;
    if (!value.is_boolean()) wrong(path(key), value, "true or false");
    return value.get<bool>();
  }
  std::string text(const std::string& key) const {
    const json& value = at(key);
    if (value.is_null()) return "";
    if (!value.is_string()) wrong(path(key), value, "text");
    return value.get<std::string>();
  }
  // Each element of a list.
  template <class Visit>
  void each(const std::string& key, Visit&& visit) const {
    const json& list = at(key);
    if (list.is_null()) return;
    if (!list.is_array()) wrong(path(key), list, "a list");
    for (size_t i = 0; i < list.size(); ++i)
      visit(Members(list[i], what_, fmt::format("{}[{}]", path(key), i)));
  }
  // The object under a key.
  template <class Visit>
  void member(const std::string& key, Visit&& visit) const {
    if (!at(key).is_null()) visit(Members(at(key), what_, path(key)));
  }

  std::string path(const std::string& key) const { return key_.empty() ? key : key_ + "." + key; }
  const std::string& what() const { return what_; }
  const std::string& key() const { return key_; }
  [[noreturn]] void unsupported(const std::string& key, const std::string& expected) const {
    wrong(path(key), at(key), expected);
  }

 private:
  [[noreturn]] void wrong(const std::string& key, const json& value, const std::string& expected) const {
    std::string shown = dump_json(value);
    if (shown.size() > 60)
      shown = std::string(value.type_name()) + " of " + std::to_string(shown.size()) + " bytes";
    fail("{}: {} is {}; expected {}", what_, key.empty() ? "the file" : key, shown, expected);
  }

  const json& object_;
  std::string what_, key_;
};

void read_model(const Members& model, BpeModel& out) {
  const std::string type = model.text("type");
  if (!type.empty() && type != "BPE") model.unsupported("type", "\"BPE\"");
  if (model.flag("byte_fallback", false))
    model.unsupported("byte_fallback", "false, because only byte-level vocabularies are supported");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!model.text(affix).empty()) model.unsupported(affix, "null");
  const json& dropout = model.at("dropout");
  if (!dropout.is_null() && dropout != 0) model.unsupported("dropout", "null");
  out.whole_words = model.flag("ignore_merges", false);
}

void read_added(const Members& file, BpeModel& out) {
  file.each("added_tokens", [&](const Members& token) {
    AddedToken added;
    added.text = token.text("content");
    if (added.text.empty()) token.unsupported("content", "the token's text");
    const json& id = token.at("id");
    if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX) token.unsupported("id", "an id");
    added.id = id.get<int32_t>();
    added.special = token.flag("special", false);
    for (const char* flag : {"single_word", "lstrip", "rstrip"})
      if (!added.special && token.flag(flag, false))
        token.unsupported(flag, "false for a token that is not special");
    out.added.push_back(std::move(added));
  });
  std::stable_sort(out.added.begin(), out.added.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
}

void read_normalizer(const Members& normalizer, BpeModel& out) {
  const std::string type = normalizer.text("type");
  if (type == "NFC")
    out.nfc = true;
  else if (type == "Sequence")
    normalizer.each("normalizers", [&](const Members& each) { read_normalizer(each, out); });
  else
    normalizer.unsupported("type", "NFC or a Sequence of it");
}

void read_decoder(const Members& decoder) {
  const std::string type = decoder.text("type");
  if (type == "Sequence")
    decoder.each("decoders", read_decoder);
  else if (type != "ByteLevel")
    decoder.unsupported("type", "ByteLevel, because only byte-level vocabularies are supported");
}

class PreTokenizers {
 public:
  explicit PreTokenizers(BpeModel& out) : out_(out) {}

  void read(const Members& step) {
    const std::string type = step.text("type");
    if (type == "Sequence") return step.each("pretokenizers", [&](const Members& each) { read(each); });
    if (byte_level_) step.unsupported("type", "nothing after ByteLevel");
    if (type == "ByteLevel")
      read_byte_level(step);
    else if (type == "Split")
      read_split(step);
    else if (type == "Digits" && step.flag("individual_digits", false))
      out_.splits.push_back({SplitStep::Kind::digits, ""});
    else if (type == "Digits")
      out_.splits.push_back({SplitStep::Kind::pattern, "\\p{N}+"});
    else
      step.unsupported("type", "ByteLevel, Split, Digits or a Sequence of them");
  }
  bool byte_level() const { return byte_level_; }

 private:
  void read_byte_level(const Members& step) {
    byte_level_ = true;
    out_.prefix_space = step.flag("add_prefix_space", true);
    // Behind other steps every piece would get its space.
    if (out_.prefix_space && !out_.splits.empty())
      step.unsupported("add_prefix_space", "false after other steps");
    if (step.flag("use_regex", true))
      out_.splits.push_back({SplitStep::Kind::pattern, std::string(patterns::gpt2)});
  }

  void read_split(const Members& step) {
    std::string pattern;
    step.member("pattern", [&](const Members& p) {
      pattern = p.at("Regex").is_null() ? pattern_of_text(p.text("String")) : p.text("Regex");
    });
    if (pattern.empty()) step.unsupported("pattern", "a Regex or a String");
    if (pattern == patterns::cl100k_written) pattern = patterns::cl100k_tiktoken;
    const std::string behavior = step.text("behavior");
    // What does not match is removed: nothing, with a pattern that leaves nothing between matches.
    const bool keeps_matches =
        behavior == "Removed" && step.flag("invert", false) && is_known_pattern(pattern);
    if (behavior != "Isolated" && !keeps_matches)
      step.unsupported("behavior", "Isolated, or Removed and inverted with the pattern of a known family");
    out_.splits.push_back({SplitStep::Kind::pattern, pattern});
  }

  BpeModel& out_;
  bool byte_level_ = false;
};

// The special token of a template that adds nothing to a text (save_tokenizer_json.cpp); empty for any other
// post-processor, whatever it is.
std::string noted_eot(const json& processor) {
  static const json nothing_added = json::array({{{"Sequence", {{"id", "A"}, {"type_id", 0}}}}});
  const auto at = [&](const char* key) {
    return processor.is_object() && processor.contains(key) ? processor[key] : json();
  };
  const json tokens = at("special_tokens");
  const bool is_note = at("type") == "TemplateProcessing" && at("single") == nothing_added &&
                       tokens.is_object() && tokens.size() == 1;
  return is_note ? tokens.begin().key() : "";
}

}  // namespace

BpeModel parse_tokenizer_json(std::string_view text, std::string_view what, const TokenizerOptions& options,
                              const std::function<EotChoice()>& beside) {
  const VocabularyJson vocabulary = read_tokenizer_json(text, what);
  const Members file(vocabulary.rest, std::string(what), "");
  BpeModel model;
  if (file.at("model").is_null()) fail("{} has no model; expected a tokenizer.json", what);
  file.member("model", [&](const Members& m) { read_model(m, model); });
  file.member("normalizer", [&](const Members& m) { read_normalizer(m, model); });
  PreTokenizers pre_tokenizers(model);
  file.member("pre_tokenizer", [&](const Members& m) { pre_tokenizers.read(m); });
  if (!pre_tokenizers.byte_level())
    fail("{} has no ByteLevel pre-tokenizer; only byte-level vocabularies are supported", what);
  file.member("decoder", read_decoder);
  read_added(file, model);
  set_tokens(model, vocabulary, what);
  set_eot(model, {options, noted_eot(file.at("post_processor")), beside}, what);
  return model;
}

BpeModel load_tokenizer_json(const std::filesystem::path& file, const TokenizerOptions& options) {
  return parse_tokenizer_json(read_text(file), file.string(), options,
                              [&] { return eot_in_folder(file.parent_path()); });
}

}  // namespace sps
