#include "tokenizer/eot_config.h"

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"

namespace sps {

namespace fs = std::filesystem;

EotChoice parse_eot_config(std::string_view text, const std::string& what) {
  const nlohmann::json config = parse_json(text, what);
  if (!config.is_object()) fail("{} is not a JSON object", what);
  const auto at = [](const nlohmann::json& object, const char* key) {
    const auto found = object.find(key);
    return found == object.end() ? nlohmann::json() : *found;
  };
  nlohmann::json token = at(config, "eos_token");
  if (token.is_object()) token = at(token, "content");
  if (!token.is_null()) {
    if (!token.is_string() || token.get_ref<const std::string&>().empty())
      fail("{}: eos_token is {}; expected the text of a token", what, dump_json(token));
    return {.text = token.get<std::string>(), .file = what};
  }
  nlohmann::json id = at(config, "eos_token_id");
  if (id.is_null()) return {};
  if (id.is_array() && !id.empty()) id = nlohmann::json(id[0]);
  if (!id.is_number_unsigned() || id.get<uint64_t>() > uint64_t(INT32_MAX))
    fail("{}: eos_token_id is {}; expected an id or a list of ids", what, dump_json(id));
  return {.id = id.get<int64_t>(), .file = what};
}

EotChoice eot_in_folder(const fs::path& folder) {
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
    const fs::path file = folder / name;
    std::error_code ignored;
    if (!fs::exists(file, ignored)) continue;
    if (EotChoice choice = parse_eot_config(read_text(file), file.string()); choice.made()) return choice;
  }
  return {};
}

}  // namespace sps
