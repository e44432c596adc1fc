#include "tokenizer/vocabulary.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/token_index.h"

namespace sps {

namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;

// Takes the tables out of the stream of events and builds a tree of what is left.
class TableReader final : public nlohmann::json_sax<json> {
 public:
  TableReader(std::string_view what, bool whole_file_is_vocab)
      : what_(what), whole_file_(whole_file_is_vocab) {}

  VocabularyJson take() { return std::move(result_); }

  bool null() override { return scalar(nullptr); }
  bool boolean(bool value) override { return scalar(value); }
  bool number_integer(int64_t value) override { return scalar(value); }
  bool number_unsigned(uint64_t value) override {
    if (table_ == Table::vocab && depth_in_table_ == 1) {
      result_.vocab.emplace_back(std::move(key_), int64_t(std::min<uint64_t>(value, INT64_MAX)));
      return true;
    }
    return scalar(value);
  }
  bool number_float(double value, const std::string&) override { return scalar(value); }
  bool binary(json::binary_t&) override { return false; }
  bool string(std::string& value) override {
    if (table_ == Table::merges) {
      if (depth_in_table_ == 2) {
        if (parts_ < 2) pair_[parts_] = std::move(value);
        ++parts_;
        return true;
      }
      std::pair<std::string, std::string> merge;
      if (!split_merge(value, merge))
        fail("{}: merge {} is '{}'; expected two tokens with a space between them", what_,
             result_.merges.size(), value);
      result_.merges.push_back(std::move(merge));
      return true;
    }
    return scalar(std::move(value));
  }
  bool key(std::string& value) override {
    key_ = std::move(value);
    return true;
  }
  bool start_object(size_t) override { return start(json::object()); }
  bool start_array(size_t) override { return start(json::array()); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }
  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    if (dynamic_cast<const json::parse_error*>(&error) == nullptr)
      fail("{} is not valid JSON: a number is out of range", what_);
    fail("{} is not valid JSON: the error is at byte {}", what_, position);
  }

 private:
  enum class Table { none, vocab, merges };

  bool start(json container) {
    if (table_ == Table::merges && depth_in_table_ == 1 && container.is_array()) {
      parts_ = 0;
      ++depth_in_table_;
      return true;
    }
    if (table_ != Table::none) unexpected();
    if (container.is_object() && (whole_file_ ? open_.empty() : in_model() && key_ == "vocab"))
      table_ = Table::vocab;
    else if (container.is_array() && in_model() && key_ == "merges")
      table_ = Table::merges;
    if (table_ != Table::none) {
      if (seen_[size_t(table_)]) fail("{} has a duplicate key '{}'", what_, key_);
      seen_[size_t(table_)] = true;
      depth_in_table_ = 1;
      return true;
    }
    if (open_.size() >= kMaxDepth) fail("{} is nested more than {} levels deep", what_, kMaxDepth);
    names_.push_back(open_.empty() || open_.back()->is_array() ? "" : key_);
    open_.push_back(add(std::move(container)));
    return true;
  }

  bool end() {
    if (table_ != Table::none) {
      if (--depth_in_table_ == 0) {
        table_ = Table::none;
      } else {
        if (parts_ != 2) fail("{}: merge {} has {} parts; expected 2", what_, result_.merges.size(), parts_);
        result_.merges.emplace_back(std::move(pair_[0]), std::move(pair_[1]));
      }
      return true;
    }
    open_.pop_back();
    names_.pop_back();
    return true;
  }

  bool scalar(json value) {
    if (table_ != Table::none) unexpected();
    add(std::move(value));
    return true;
  }

  json* add(json value) {
    if (open_.empty()) return &(result_.rest = std::move(value));
    json& parent = *open_.back();
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    const auto [at, is_new] = parent.emplace(key_, std::move(value));
    if (!is_new) fail("{} has a duplicate key '{}'", what_, key_);
    return &*at;
  }

  bool in_model() const { return names_.size() == 2 && names_[1] == "model"; }

  [[noreturn]] void unexpected() const {
    if (table_ == Table::vocab) fail("{}: the id of token '{}' is not a number that ids can be", what_, key_);
    fail("{}: merge {} is neither text nor a list of two tokens", what_, result_.merges.size());
  }

  std::string_view what_;
  bool whole_file_;
  VocabularyJson result_;
  std::string key_;
  std::vector<json*> open_;         // containers of the tree that are not complete
  std::vector<std::string> names_;  // their keys
  Table table_ = Table::none;
  int depth_in_table_ = 0;
  std::array<bool, 3> seen_{};
  std::array<std::string, 2> pair_;
  size_t parts_ = 0;
};

VocabularyJson read_tables(std::string_view text, std::string_view what, bool whole_file) {
  if (text.find('\0') != std::string_view::npos) fail("{} is not valid JSON: it contains a NUL byte", what);
  TableReader reader(what, whole_file);
  json::sax_parse(text.begin(), text.end(), &reader);
  return reader.take();
}

std::string to_bytes(std::string_view token, std::string_view what) {
  auto bytes = from_alphabet(token);
  if (!bytes)
    fail(
        "{}: the token '{}' is not written in GPT-2's alphabet of bytes; vocabularies that are not "
        "byte-level are not "
        "supported",
        what, token);
  return std::move(*bytes);
}

}  // namespace

VocabularyJson read_tokenizer_json(std::string_view text, std::string_view what) {
  return read_tables(text, what, false);
}

VocabularyJson read_vocab_json(std::string_view text, std::string_view what) {
  VocabularyJson result = read_tables(text, what, true);
  if (!result.rest.is_null()) fail("{} is not an object of tokens and ids", what);
  return result;
}

bool split_merge(std::string_view text, std::pair<std::string, std::string>& merge) {
  const size_t space = text.find(' ');
  if (space == 0 || space == std::string_view::npos || space + 1 == text.size() ||
      text.find(' ', space + 1) != std::string_view::npos)
    return false;
  merge.first = text.substr(0, space);
  merge.second = text.substr(space + 1);
  return true;
}

void check_id(int64_t id, size_t count, std::string_view token, std::string_view what) {
  // The special ids of a known family (rank files) stand where they stand, however few tokens there are.
  const auto most = int64_t(2 * count + (size_t{1} << 18));
  if (id < 0 || id >= most)
    fail("{}: the token '{}' has id {}; with {} tokens ids below {} are expected", what, token, id, count,
         most);
}

void set_tokens(BpeModel& model, const VocabularyJson& vocabulary, std::string_view what) {
  std::unordered_map<std::string_view, int32_t> added;
  for (const AddedToken& token : model.added) {
    check_id(token.id, vocabulary.vocab.size() + model.added.size(), token.text, what);
    added.emplace(token.text, token.id);
  }
  for (const auto& [token, id] : vocabulary.vocab) {
    check_id(id, vocabulary.vocab.size(), token, what);
    if (const auto found = added.find(token); found != added.end()) {
      if (found->second != id)
        fail("{}: '{}' is token {} and added token {}", what, token, id, found->second);
      continue;
    }
    if (size_t(id) >= model.tokens.size()) model.tokens.resize(size_t(id) + 1);
    std::string& bytes = model.tokens[size_t(id)];
    if (!bytes.empty()) fail("{}: two tokens have id {}", what, id);
    bytes = to_bytes(token, what);
  }
  const TokenIndex index(model.tokens);
  model.merges.reserve(vocabulary.merges.size());
  std::string joined;
  for (const auto& [left, right] : vocabulary.merges) {
    joined = to_bytes(left, what);
    const size_t left_bytes = joined.size();
    joined += to_bytes(right, what);
    const std::string_view view = joined;
    const Merge merge{index.find(view.substr(0, left_bytes)), index.find(view.substr(left_bytes)),
                      index.find(view)};
    if (merge.left < 0 || merge.right < 0 || merge.result < 0)
      fail("{}: merge {} is '{} {}', but '{}' is no token", what, model.merges.size(), left, right,
           merge.left < 0    ? left
           : merge.right < 0 ? right
                             : left + right);
    model.merges.push_back(merge);
  }
}

namespace {

// The id of the token `name` if it can be a special one: an added token, or one that takes no part in merges.
int32_t find_special(const BpeModel& model, std::string_view name) {
  for (const AddedToken& token : model.added)
    if (token.text == name) return token.id;
  const auto found = std::find(model.tokens.begin(), model.tokens.end(), name);
  if (name.empty() || found == model.tokens.end()) return -1;
  const auto id = int32_t(found - model.tokens.begin());
  const auto uses = [id](const Merge& m) { return m.left == id || m.right == id || m.result == id; };
  return std::any_of(model.merges.begin(), model.merges.end(), uses) ? -1 : id;
}

// The same for a token that is known by its id.
int32_t find_special(const BpeModel& model, int64_t id) {
  for (const AddedToken& token : model.added)
    if (token.id == id) return token.id;
  const bool there = id >= 0 && size_t(id) < model.tokens.size();
  return there && find_special(model, model.tokens[size_t(id)]) == id ? int32_t(id) : -1;
}

void make_special(BpeModel& model, int32_t id) {
  const auto place = std::lower_bound(model.added.begin(), model.added.end(), id,
                                      [](const AddedToken& token, int32_t i) { return token.id < i; });
  if (place != model.added.end() && place->id == id)
    place->special = true;
  else
    model.added.insert(place, {std::exchange(model.tokens[size_t(id)], {}), id, true});
}

int32_t find_eot(const BpeModel& model, const EotSources& sources, std::string_view what) {
  const TokenizerOptions& options = sources.options;
  if (!options.eot.empty()) {
    const int32_t id = find_special(model, options.eot);
    if (id < 0) fail("{} has no added token '{}' that could be the end of text", what, options.eot);
    return id;
  }
  if (options.eot_id >= 0) {
    const int32_t id = find_special(model, options.eot_id);
    if (id < 0)
      fail("{} has no added token with the id {} that could be the end of text", what, options.eot_id);
    return id;
  }
  int32_t id = find_special(model, sources.noted);
  if (id < 0) id = usual_eot(model);
  if (id >= 0 || !sources.beside) return id;
  const EotChoice choice = sources.beside();
  if (!choice.made()) return -1;
  id = choice.text.empty() ? find_special(model, choice.id) : find_special(model, choice.text);
  if (id < 0)
    fail("{} names {} for the end of text, but {} has no such added token", choice.file,
         choice.text.empty() ? fmt::format("id {}", choice.id) : fmt::format("'{}'", choice.text), what);
  return id;
}

}  // namespace

int32_t usual_eot(const BpeModel& model) {
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>"})
    if (const int32_t id = find_special(model, name); id >= 0) return id;
  return -1;
}

void set_eot(BpeModel& model, const EotSources& sources, std::string_view what) {
  model.eot = find_eot(model, sources, what);
  if (model.eot >= 0) {
    make_special(model, model.eot);
    while (!model.tokens.empty() && model.tokens.back().empty()) model.tokens.pop_back();
    model.tokens.resize(std::max(model.tokens.size(), size_t(model.added.back().id) + 1));
    return;
  }
  std::string some;
  for (size_t i = 0; i < std::min<size_t>(model.added.size(), 4); ++i)
    some += (i == 0 ? " (it has " : ", ") + model.added[i].text;
  if (!some.empty()) some += model.added.size() > 4 ? ", ...)" : ")";
  fail("{} has none of the usual tokens for the end of text{}; --eot must name it", what, some);
}

}  // namespace sps
