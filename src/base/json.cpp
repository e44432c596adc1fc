#include "base/json.h"

#include <set>
#include <vector>

#include "base/error.h"

namespace sps {

namespace {

constexpr int kMaxDepth = 64;

template <class Json>
std::string dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

nlohmann::json parse_json(std::string_view text, std::string_view what) {
  using nlohmann::json;
  // nlohmann's lexer takes a NUL byte for the end of the text and would not look at what follows it.
  if (text.find('\0') != std::string_view::npos) fail("{} is not valid JSON: it contains a NUL byte", what);
  std::vector<std::set<std::string>> open_objects;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= kMaxDepth)
      fail("{} is nested more than {} levels deep", what, kMaxDepth);
    if (event == Event::object_start) open_objects.emplace_back();
    if (event == Event::object_end) open_objects.pop_back();
    if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!open_objects.back().insert(key).second) fail("{} has a duplicate key '{}'", what, key);
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::parse_error& e) {
    fail("{} is not valid JSON: the error is at byte {}", what, e.byte);
  } catch (const json::exception&) {
    fail("{} is not valid JSON: a number is out of range", what);
  }
}

std::string dump_json(const nlohmann::json& value) {
  return dump(value);
}
std::string dump_json(const nlohmann::ordered_json& value) {
  return dump(value);
}

std::string storable_json(const nlohmann::json& value, std::string_view what) {
  std::string text;
  try {
    text = value.dump(2) + "\n";
  } catch (const nlohmann::json::type_error&) {
    fail("{} cannot be stored: it contains text that is not UTF-8", what);
  }
  // NaN and infinity have no JSON: nlohmann writes null.
  if (nlohmann::json::parse(text) != value)
    fail("{} cannot be stored: it contains a number that is not finite", what);
  return text;
}

bool is_utf8(std::string_view text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

}  // namespace sps
