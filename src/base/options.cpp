#include "base/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include <toml++/toml.h>

#include "base/error.h"
#include "base/files.h"

namespace sps {

namespace {

using nlohmann::json;

template <class T>
std::string describe(const std::string& noun, const Range<T>& range) {
  const bool low = range.min != std::numeric_limits<T>::lowest(),
             high = range.max != std::numeric_limits<T>::max();
  if (low && range.open)
    return fmt::format("{} above {}{}", noun, range.min,
                       high ? fmt::format(" and at most {}", range.max) : "");
  if (low && high) return fmt::format("{} from {} to {}", noun, range.min, range.max);
  if (low) return fmt::format("{} of at least {}", noun, range.min);
  if (high) return fmt::format("{} of at most {}", noun, range.max);
  return noun;
}

template <class T>
std::optional<T> parse_whole(std::string_view text) {
  T value{};
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// A float that is a whole number stands for that integer as long as every integer around it is a float too.
std::optional<int64_t> to_integer(double value) {
  if (!(std::abs(value) <= 0x1p53) || value != std::floor(value)) return std::nullopt;
  return int64_t(value);
}

// Underscores between two digits are dropped, as in TOML.
std::string without_underscores(const std::string& text) {
  const auto digit = [&](size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
  std::string result;
  for (size_t i = 0; i < text.size(); ++i)
    if (text[i] != '_' || i == 0 || !digit(i - 1) || !digit(i + 1)) result += text[i];
  return result;
}

std::optional<int64_t> parse_integer(const std::string& text) {
  const std::string plain = without_underscores(text);
  if (const auto value = parse_whole<int64_t>(plain)) return value;
  if (const auto value = parse_whole<double>(plain)) return to_integer(*value);
  return std::nullopt;
}

std::optional<std::vector<int64_t>> parse_integers(std::string text) {
  if (text.size() >= 2 && text.front() == '[' && text.back() == ']') text = text.substr(1, text.size() - 2);
  std::vector<int64_t> values;
  if (text.find_first_not_of(' ') == std::string::npos) return values;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    std::string item = text.substr(begin, comma - begin);
    item.erase(0, std::min(item.find_first_not_of(' '), item.size()));
    item.erase(item.find_last_not_of(' ') + 1);
    const auto value = parse_integer(item);
    if (!value) return std::nullopt;
    values.push_back(*value);
    begin = comma + 1;
  }
  return values;
}

std::optional<int64_t> integer_of(const json& value) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(std::numeric_limits<int64_t>::max()))
    return std::nullopt;
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) return to_integer(value.get<double>());
  return std::nullopt;
}

// Shortest text that reads back as the same double; always with a point or exponent.
std::string double_text(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

// A value as set() takes it.
std::string plain_text(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return double_text(value.get<double>());
  if (!value.is_array()) return dump_json(value);
  std::string text;
  for (const json& item : value) {
    if (!text.empty()) text += ',';
    text += plain_text(item);
  }
  return fmt::format("[{}]", text);
}

// Both are TOML: a JSON string is a TOML string once DEL, which TOML wants escaped, is.
std::string toml_text(const json& value) {
  if (!value.is_string()) return plain_text(value);
  std::string text;
  for (const char c : dump_json(value))
    if (c == 0x7F)
      text += "\\u007F";
    else
      text += c;
  return text;
}

std::string found_text(const json& value) {
  if (value.is_null()) return "of another type";
  return value.is_number_float() ? fmt::format("{}", value.get<double>()) : dump_json(value);
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

struct Leaf {
  std::string key;
  json value;
  std::string where;  // "file.toml:3"
};

std::string joined(const std::string& prefix, std::string_view name) {
  return prefix.empty() ? std::string(name) : fmt::format("{}.{}", prefix, name);
}

json to_json_value(const toml::node& node) {
  if (const auto* array = node.as_array()) {
    json items = json::array();
    for (const toml::node& item : *array) items.push_back(to_json_value(item));
    return items;
  }
  if (const auto* v = node.as_string()) return v->get();
  if (const auto* v = node.as_integer()) return v->get();
  if (const auto* v = node.as_floating_point()) return v->get();
  if (const auto* v = node.as_boolean()) return v->get();
  return nullptr;  // dates, times and tables inside arrays: no option takes them
}

void flatten(const toml::table& table, const std::string& prefix, const std::string& source,
             std::vector<Leaf>& leaves) {
  for (const auto& [name, node] : table) {
    const std::string key = joined(prefix, name.str());
    if (const auto* inner = node.as_table())
      flatten(*inner, key, source, leaves);
    else
      leaves.push_back({key, to_json_value(node), fmt::format("{}:{}", source, node.source().begin.line)});
  }
}

void flatten(const json& object, const std::string& prefix, const std::string& source,
             std::vector<Leaf>& leaves) {
  for (const auto& [name, value] : object.items()) {
    const std::string key = joined(prefix, name);
    if (value.is_object())
      flatten(value, key, source, leaves);
    else
      leaves.push_back({key, value, source});
  }
}

bool is_key(const std::string& key) {
  char last = '.';
  for (const char c : key) {
    if (!((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || (c == '.' && last != '.')))
      return false;
    last = c;
  }
  return last != '.';
}

}  // namespace

void OptionTable::insert(Option option) {
  SPS_CHECK(is_key(option.key));
  for (const Option& other : options_) {
    SPS_CHECK(other.key != option.key);
    SPS_CHECK(!other.key.starts_with(option.key + ".") && !option.key.starts_with(other.key + "."));
  }
  option.default_text = plain_text(option.read());
  options_.push_back(std::move(option));
}

void OptionTable::add(std::string key, bool* field, std::string help) {
  insert({.key = std::move(key),
          .expected = "true | false",
          .help = std::move(help),
          .assign =
              [field](const json& v) {
                if (!v.is_boolean()) return false;
                *field = v.get<bool>();
                return true;
              },
          .parse =
              [field](const std::string& text) {
                if (text != "true" && text != "false") return false;
                *field = text == "true";
                return true;
              },
          .read = [field] { return json(*field); }});
}

void OptionTable::add(std::string key, int64_t* field, std::string help, Range<int64_t> range) {
  const auto take = [field, range](std::optional<int64_t> value) {
    if (!value || !range.contains(*value)) return false;
    *field = *value;
    return true;
  };
  insert({.key = std::move(key),
          .expected = describe("an integer", range),
          .help = std::move(help),
          .assign = [take](const json& v) { return take(integer_of(v)); },
          .parse = [take](const std::string& text) { return take(parse_integer(text)); },
          .read = [field] { return json(*field); }});
}

void OptionTable::add(std::string key, double* field, std::string help, Range<double> range) {
  const auto take = [field, range](std::optional<double> value) {
    if (!value || !std::isfinite(*value) || !range.contains(*value)) return false;
    *field = *value;
    return true;
  };
  insert(
      {.key = std::move(key),
       .expected = describe("a number", range),
       .help = std::move(help),
       .assign = [take](const json& v) { return v.is_number() && take(v.get<double>()); },
       .parse =
           [take](const std::string& text) { return take(parse_whole<double>(without_underscores(text))); },
       .read = [field] { return json(*field); }});
}

void OptionTable::add(std::string key, std::string* field, std::string help) {
  const auto take = [field](const std::string& text) {
    if (!is_utf8(text)) return false;
    *field = text;
    return true;
  };
  insert({.key = std::move(key),
          .expected = "text",
          .help = std::move(help),
          .assign = [take](const json& v) { return v.is_string() && take(v.get<std::string>()); },
          .parse = take,
          .read = [field] { return json(*field); }});
}

void OptionTable::add(std::string key, std::vector<int64_t>* field, std::string help, Range<int64_t> range) {
  const auto take = [field, range](const std::optional<std::vector<int64_t>>& values) {
    if (!values || !std::all_of(values->begin(), values->end(), [&](int64_t v) { return range.contains(v); }))
      return false;
    *field = *values;
    return true;
  };
  const auto from_json = [take](const json& value) {
    if (!value.is_array()) return false;
    std::vector<int64_t> values;
    for (const json& item : value) {
      const auto v = integer_of(item);
      if (!v) return false;
      values.push_back(*v);
    }
    return take(values);
  };
  insert({.key = std::move(key),
          .expected = "a list, each " + describe("an integer", range),
          .help = std::move(help),
          .assign = from_json,
          .parse = [take](const std::string& text) { return take(parse_integers(text)); },
          .read = [field] { return json(*field); }});
}

void OptionTable::add(std::string key, TextType type, std::string help) {
  // `window = 64` means the same as `window = "64"`.
  const auto from_json = [parse = type.parse](const json& v) {
    return !v.is_null() && !v.is_object() && parse(plain_text(v));
  };
  insert({.key = std::move(key),
          .expected = std::move(type.expected),
          .help = std::move(help),
          .assign = from_json,
          .parse = std::move(type.parse),
          .read = [print = std::move(type.print)] { return json(print()); }});
}

void OptionTable::unknown(const std::string& key, const std::string& where) const {
  // A key without dots is compared with last words too: "layers" means "model.layers".
  const Option* nearest = nullptr;
  size_t least = key.size();
  for (const Option& option : options_) {
    size_t distance = edit_distance(key, option.key);
    if (key.find('.') == std::string::npos)
      distance = std::min(distance, edit_distance(key, option.key.substr(option.key.rfind('.') + 1)));
    if (distance < least) least = distance, nearest = &option;
  }
  if (nearest != nullptr && least <= std::max<size_t>(2, key.size() / 3))
    usage_error("{}unknown key '{}': did you mean '{}'?", where, key, nearest->key);
  usage_error("{}unknown key '{}': --help lists the keys", where, key);
}

const OptionTable::Option& OptionTable::find(const std::string& key, const std::string& where) const {
  for (const Option& option : options_)
    if (option.key == key) return option;
  unknown(key, where);
}

void OptionTable::set(const std::string& key, const std::string& text) {
  const Option& option = find(key);
  if (!option.parse(text)) usage_error("{} is '{}', expected {}", key, text, option.expected);
  set_keys_.insert(key);
}

void OptionTable::set_assignment(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0)
    usage_error("'{}' was given, expected key=value", assignment);
  set(assignment.substr(0, equals), assignment.substr(equals + 1));
}

void OptionTable::assign(const std::string& key, const json& value, const std::string& where) {
  const Option& option = find(key, where + ": ");
  if (!option.assign(value))
    usage_error("{}: {} is {}, expected {}", where, key, found_text(value), option.expected);
  set_keys_.insert(key);
}

void OptionTable::set_from_toml(const std::filesystem::path& file) {
  set_from_toml_text(read_text(file), file.string());
}

void OptionTable::set_from_toml_text(std::string_view text, const std::string& source) {
  std::vector<Leaf> leaves;
  try {
    flatten(toml::parse(text), "", source, leaves);
  } catch (const toml::parse_error& e) {
    usage_error("{}:{} is not valid TOML: {}", source, e.source().begin.line, e.description());
  }
  for (const Leaf& leaf : leaves) assign(leaf.key, leaf.value, leaf.where);
}

void OptionTable::set_from_json(const json& value, const std::string& source) {
  if (!value.is_object()) usage_error("{} is a JSON {}, expected an object", source, value.type_name());
  std::vector<Leaf> leaves;
  flatten(value, "", source, leaves);
  for (const Leaf& leaf : leaves) assign(leaf.key, leaf.value, leaf.where);
}

bool OptionTable::has(const std::string& key) const {
  return std::any_of(options_.begin(), options_.end(), [&](const Option& o) { return o.key == key; });
}

bool OptionTable::is_set(const std::string& key) const {
  SPS_CHECK(has(key));
  return set_keys_.contains(key);
}

std::string OptionTable::text(const std::string& key) const {
  return plain_text(find(key).read());
}

std::vector<std::string> OptionTable::keys() const {
  std::vector<std::string> keys;
  for (const Option& option : options_) keys.push_back(option.key);
  return keys;
}

std::string OptionTable::to_toml() const {
  // Keys without a table have to stand before the first table.
  std::vector<std::string> tables{""};
  const auto table_of = [](const std::string& key) {
    return key.substr(0, key.find('.') == std::string::npos ? 0 : key.find('.'));
  };
  for (const Option& option : options_)
    if (std::find(tables.begin(), tables.end(), table_of(option.key)) == tables.end())
      tables.push_back(table_of(option.key));
  std::string text;
  for (const std::string& table : tables) {
    if (!table.empty()) text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", table);
    for (const Option& option : options_)
      if (table_of(option.key) == table)
        text += fmt::format("{} = {}\n", option.key.substr(table.empty() ? 0 : table.size() + 1),
                            toml_text(option.read()));
  }
  return text;
}

json OptionTable::to_json() const {
  json result = json::object();
  for (const Option& option : options_) {
    json* place = &result;
    for (size_t begin = 0; begin <= option.key.size();) {
      const size_t dot = std::min(option.key.find('.', begin), option.key.size());
      place = &(*place)[option.key.substr(begin, dot - begin)];
      begin = dot + 1;
    }
    *place = option.read();
  }
  return result;
}

std::string OptionTable::help() const {
  size_t key_width = 0, type_width = 0, default_width = 0;
  for (const Option& option : options_) {
    key_width = std::max(key_width, option.key.size());
    type_width = std::max(type_width, option.expected.size());
    default_width = std::max(default_width, option.default_text.size());
  }
  std::string text;
  for (const Option& option : options_)
    text += fmt::format("{:{}}  {:{}}  {:{}}  {}\n", option.key, key_width, option.expected, type_width,
                        option.default_text, default_width, option.help);
  return text;
}

std::string OptionTable::markdown_table() const {
  const auto cell = [](const std::string& text) {
    std::string escaped;
    for (const char c : text) escaped += c == '|' ? "\\|" : std::string(1, c);
    return escaped;
  };
  std::string text = "| key | type | default | meaning |\n|---|---|---|---|\n";
  for (const Option& option : options_)
    text += fmt::format("| `{}` | {} | {} | {} |\n", option.key, cell(option.expected),
                        option.default_text.empty() ? "" : fmt::format("`{}`", cell(option.default_text)),
                        cell(option.help));
  return text;
}

}  // namespace sps
