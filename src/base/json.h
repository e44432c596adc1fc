// JSON: nlohmann's values with a stricter parser. Repeated keys, NUL bytes and absurd nesting are errors,
// because a file that has them means two things at once.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

namespace sps {

// Parses `text`; `what` names its origin in the error. Arrays and objects may nest at most 64 deep.
nlohmann::json parse_json(std::string_view text, std::string_view what);

// One line. Non-finite numbers become null and bytes that are not UTF-8 become U+FFFD, so the result is
// always JSON.
std::string dump_json(const nlohmann::json& value);
std::string dump_json(const nlohmann::ordered_json& value);

// Indented, for files that are read again: Error unless parse_json() of the result equals `value`, that is,
// if a number is not finite or text is not UTF-8. `what` names the value.
std::string storable_json(const nlohmann::json& value, std::string_view what);

bool is_utf8(std::string_view text);

}  // namespace sps
