// A run's TOML file, or a recipe's name, with key=value overrides.
#include "fuzz/fuzz.h"
#include "train/run_config.h"

namespace {

using namespace sps;

void check(const std::string& source, const std::vector<std::string>& overrides) {
  RunConfig config = load_run_config(source, overrides);
  OptionTable table = bind(config);
  const std::string toml = table.to_toml();

  fuzz::must_accept([&] {
    RunConfig from_toml, from_json;
    OptionTable toml_table = bind(from_toml), json_table = bind(from_json);
    toml_table.set_from_toml_text(toml, "what was written");
    SPS_CHECK(toml_table.to_toml() == toml);
    json_table.set_from_json(parse_json(dump_json(table.to_json()), "json"), "json");
    SPS_CHECK(json_table.to_toml() == toml);
    for (const std::string& key : table.keys()) toml_table.set(key, table.text(key));
    SPS_CHECK(toml_table.to_toml() == toml);
  });

  const ModelConfig model = resolve(config.model);
  fuzz::must_accept([&] { SPS_CHECK(resolve(keys_of(model)) == model); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fuzz::Scratch scratch;
  fuzz::Input input(data, size);
  const bool toml = input.choose(2) == 0;
  const std::string_view source = input.part();
  std::vector<std::string> overrides;
  for (std::string_view rest = input.rest(); !rest.empty();) {
    const size_t end = rest.find('\n');
    overrides.emplace_back(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  // Not every name: that of a file would be read.
  if (!toml && !looks_like_recipe(std::string(source))) return 0;
  fuzz::accepts(
      [&] { check(toml ? scratch.write("x.toml", source).string() : std::string(source), overrides); });
  return 0;
}
