// Our parser of JSON documents beside nlohmann-json's: what it says where both take the text, and whether it
// takes it.
#include <optional>

#include "base/json.h"
#include "data/json_documents.h"
#include "fuzz/fuzz.h"

namespace {

using nlohmann::json;

struct Fields {
  std::string_view text, id;
};
constexpr Fields kFields[] = {
    {"text", "id"}, {"a.b", "a.c"}, {"a.b", "id"}, {"text", "text"}, {"meta.a.b", ""}};

// Every value that a dotted path leads to: `a.b` is field "a.b", or field "b" of the object in field "a".
// `nulls` counts those that end early, in a null.
void find(const json& object, std::string_view path, std::vector<const json*>& found, int& nulls) {
  if (path.empty()) return;
  for (const auto& [name, value] : object.items()) {
    if (path == name) {
      found.push_back(&value);
    } else if (path.starts_with(name) && path.size() > name.size() + 1 && path[name.size()] == '.') {
      if (value.is_object()) find(value, path.substr(name.size() + 1), found, nulls);
      if (value.is_null()) ++nulls;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  fuzz::Input input(data, size);
  const Fields& fields = kFields[input.choose(std::size(kFields))];
  const std::string_view text_field = fields.text, id_field = fields.id;
  const std::string_view text = input.rest();
  Document document;
  const bool taken = fuzz::accepts([&] { parse_json_document(text, "x:1", text_field, id_field, document); });

  if (taken) {
    // Whole JSON only, though a number may be out of range there.
    try {
      [[maybe_unused]] const json whole = json::parse(text.begin(), text.end());
    } catch (const json::out_of_range&) {
    }
    SPS_CHECK(is_utf8(document.text) && is_utf8(document.id));
  }

  // nlohmann skips a byte order mark, which here is left to the reader of files.
  std::optional<json> value;
  if (text.starts_with("\xEF\xBB\xBF") || !fuzz::accepts([&] { value = parse_json(text, "x"); })) return 0;
  std::vector<const json*> texts, ids;
  int null_texts = 0, null_ids = 0;
  if (value->is_object()) {
    find(*value, text_field, texts, null_texts);
    if (id_field != text_field) find(*value, id_field, ids, null_ids);
  }
  const bool one_text = texts.size() + size_t(null_texts) == 1;
  const bool expected =
      one_text && ids.size() <= 1 && (texts.empty() || texts[0]->is_string() || texts[0]->is_null());
  SPS_CHECK(taken == expected);
  if (!taken) return 0;
  SPS_CHECK(document.text == (texts.empty() || texts[0]->is_null() ? "" : texts[0]->get<std::string>()));
  if (ids.empty() || (!ids[0]->is_string() && !ids[0]->is_number()))
    SPS_CHECK(document.id.empty());
  else if (ids[0]->is_string())
    SPS_CHECK(document.id == ids[0]->get<std::string>());
  else if (!document.id.empty())  // as it is written
    SPS_CHECK(parse_json(document.id, "id") == *ids[0]);
  return 0;
}
