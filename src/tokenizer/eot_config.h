// Which token ends a text, as the configuration files that Hugging Face keeps beside a tokenizer say.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace sps {

// A token named by its text or, where that is empty, by its id.
struct EotChoice {
  std::string text{};
  int64_t id = -1;
  std::string file{};  // that says so, for errors
  bool made() const { return !text.empty() || id >= 0; }
};

// eos_token (text, or an object with the text as its content) or else eos_token_id (a number, or a list whose
// first one is meant). Not made if the file has neither; Error if they are something else. `what` names the
// text.
EotChoice parse_eot_config(std::string_view text, const std::string& what);

// The first choice of tokenizer_config.json, special_tokens_map.json and generation_config.json in `folder`.
EotChoice eot_in_folder(const std::filesystem::path& folder);

}  // namespace sps
