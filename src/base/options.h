// Options: one typed table describes every key of a configuration. The command line (`key=value`), TOML
// files, stored JSON, the help text and the reference table of the documentation are all read from it.
//
//   struct Config { int64_t layers = 12; double lr = 6e-4; Family family = Family::standard; } config;
//   OptionTable table;
//   table.add("model.layers", &config.layers, "number of layers", at_least<int64_t>(1));
//   table.add("optim.lr", &config.lr, "peak learning rate", above(0.0));
//   table.add("model.family", &config.family, {{"standard", Family::standard}, {"sps", Family::sps}},
//   "family"); table.set("optim.lr", "3e-4");
//
// A table points into the configuration it was made for and must not outlive it. What a field holds when it
// is added is its default. Wrong keys and values throw usage errors that name the key, the value and what is
// expected; keys before the wrong one have then been set.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace sps {

// The values from min to max; min itself is excluded if `open`.
template <class T>
struct Range {
  T min = std::numeric_limits<T>::lowest();
  T max = std::numeric_limits<T>::max();
  bool open = false;
  bool contains(T value) const { return (open ? value > min : value >= min) && value <= max; }
};
template <class T>
Range<T> at_least(T min) {
  return {.min = min};
}
template <class T>
Range<T> between(T min, T max) {
  return {.min = min, .max = max};
}
inline Range<double> above(double min) {
  return {.min = min, .open = true};
}

// A type that is written as text, for instance a window that is a number or "full".
struct TextType {
  std::string expected;                           // "none or lo,hi"
  std::function<bool(const std::string&)> parse;  // sets the field; false: not such a value, field unchanged
  std::function<std::string()> print;             // parse(print()) changes nothing
};

class OptionTable {
 public:
  // Keys are words of [a-z0-9_] joined by dots; no key may be the first words of another.
  void add(std::string key, bool* field, std::string help);
  void add(std::string key, int64_t* field, std::string help, Range<int64_t> range = {});
  void add(std::string key, double* field, std::string help, Range<double> range = {});  // finite
  void add(std::string key, std::string* field, std::string help);                       // UTF-8
  void add(std::string key, std::vector<int64_t>* field, std::string help, Range<int64_t> range = {});
  void add(std::string key, TextType type, std::string help);
  template <class E>
  void add(std::string key, E* field, std::vector<std::pair<std::string, E>> names, std::string help);

  // From the command line. Integers may also be written 20_000_000 or 2e7, lists 1,2,3 or [1,2,3].
  void set(const std::string& key, const std::string& text);
  void set_assignment(const std::string& assignment);  // "key=value"

  // Tables within tables are keys joined by dots. `source` names the text in errors.
  void set_from_toml(const std::filesystem::path& file);
  void set_from_toml_text(std::string_view text, const std::string& source);
  void set_from_json(const nlohmann::json& value, const std::string& source);  // what to_json() returns

  bool has(const std::string& key) const;
  bool is_set(const std::string& key) const;       // by any of the functions above, as opposed to its default
  std::string text(const std::string& key) const;  // the present value, as set() would take it
  std::vector<std::string> keys() const;           // in the order they were added

  // All present values. Reading the result back gives the same configuration to the last bit.
  std::string to_toml() const;
  nlohmann::json to_json() const;

  std::string help() const;            // aligned columns: key, type, default, meaning
  std::string markdown_table() const;  // the same as a table for the documentation

 private:
  struct Option {
    std::string key, expected, help;
    std::string default_text{};                         // filled in by insert()
    std::function<bool(const nlohmann::json&)> assign;  // from TOML or JSON; false: not such a value
    std::function<bool(const std::string&)> parse;      // from the command line
    std::function<nlohmann::json()> read;
  };
  void insert(Option option);
  const Option& find(const std::string& key, const std::string& where = "") const;
  [[noreturn]] void unknown(const std::string& key, const std::string& where) const;
  void assign(const std::string& key, const nlohmann::json& value, const std::string& where);

  std::vector<Option> options_;
  std::set<std::string> set_keys_;
};

template <class E>
void OptionTable::add(std::string key, E* field, std::vector<std::pair<std::string, E>> names,
                      std::string help) {
  std::string expected;
  for (const auto& [name, value] : names) expected += (expected.empty() ? "" : " | ") + name;
  const auto parse = [field, names](const std::string& text) {
    for (const auto& [name, value] : names)
      if (name == text) return *field = value, true;
    return false;
  };
  const auto print = [field, names] {
    for (const auto& [name, value] : names)
      if (value == *field) return name;
    return std::string("?");
  };
  add(std::move(key), TextType{expected, parse, print}, std::move(help));
}

}  // namespace sps
