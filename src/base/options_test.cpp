#include "base/options.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>

#include "base/error.h"
#include "base/rng.h"
#include "base/test_dir.h"

namespace sps {
namespace {

enum class Color { red, green };

struct Config {
  bool tie = true;
  int64_t layers = 12;
  int64_t any = 0;
  double lr = 6e-4;
  double decay = 0.1;
  std::string dir = "data";
  std::vector<int64_t> levels{1, 2};
  Color color = Color::green;
  int64_t window = -1;  // -1: full

  OptionTable table() {
    OptionTable t;
    t.add("seed", &any, "seed of everything");
    t.add("model.tie_head", &tie, "output head tied to the embedding");
    t.add("model.layers", &layers, "number of layers", between<int64_t>(1, 1000));
    t.add("optim.lr", &lr, "peak learning rate", above(0.0));
    t.add("optim.decay", &decay, "weight decay", at_least(0.0));
    t.add("data.dir", &dir, "folder of the token files");
    t.add("model.read.levels", &levels, "state levels", at_least<int64_t>(0));
    t.add("model.color", &color, {{"red", Color::red}, {"green", Color::green}}, "a colour");
    t.add("model.window",
          TextType{"full or an integer of at least 0",
                   [this](const std::string& text) {
                     if (text == "full") return window = -1, true;
                     if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos)
                       return false;
                     return window = std::stoll(text), true;
                   },
                   [this] { return window < 0 ? "full" : std::to_string(window); }},
          "window of the prediction stream");
    return t;
  }
};

std::string usage_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& e) {
    EXPECT_EQ(e.exit_status(), 2);
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST(Options, CommandLineSetsEveryType) {
  Config c;
  OptionTable t = c.table();
  for (const char* a :
       {"model.tie_head=false", "model.layers=24", "optim.lr=3e-4", "optim.decay=0", "data.dir=a=b c",
        "model.read.levels=3,0, 5", "model.color=red", "model.window=64", "seed=-7"})
    t.set_assignment(a);
  EXPECT_FALSE(c.tie);
  EXPECT_EQ(c.layers, 24);
  EXPECT_EQ(c.lr, 3e-4);
  EXPECT_EQ(c.decay, 0.0);
  EXPECT_EQ(c.dir, "a=b c");
  EXPECT_EQ(c.levels, (std::vector<int64_t>{3, 0, 5}));
  EXPECT_EQ(c.color, Color::red);
  EXPECT_EQ(c.window, 64);
  EXPECT_EQ(c.any, -7);
  t.set("model.read.levels", "[]");
  EXPECT_TRUE(c.levels.empty());
  t.set("data.dir", "");
  EXPECT_EQ(c.dir, "");
}

TEST(Options, IntegersMayBeWrittenForPeople) {
  Config c;
  OptionTable t = c.table();
  t.set("seed", "20_000_000_000");
  EXPECT_EQ(c.any, 20000000000);
  t.set("seed", "2e10");
  EXPECT_EQ(c.any, 20000000000);
  t.set("seed", "9223372036854775807");
  EXPECT_EQ(c.any, INT64_MAX);
  for (const char* bad :
       {"1.5", "1e300", "9223372036854775808", "_1", "1_", "1__0", "0x10", "", " 1", "1 ", "nan"})
    EXPECT_EQ(usage_of([&] { t.set("seed", bad); }), fmt::format("seed is '{}', expected an integer", bad));
  EXPECT_EQ(c.any, INT64_MAX);
}

TEST(Options, ErrorsNameKeyValueAndExpectation) {
  Config c;
  OptionTable t = c.table();
  const auto error = [&](const char* assignment) { return usage_of([&] { t.set_assignment(assignment); }); };
  EXPECT_EQ(error("model.layers=0"), "model.layers is '0', expected an integer from 1 to 1000");
  EXPECT_EQ(error("model.layers=many"), "model.layers is 'many', expected an integer from 1 to 1000");
  EXPECT_EQ(error("optim.lr=0"), "optim.lr is '0', expected a number above 0");
  EXPECT_EQ(error("optim.lr=inf"), "optim.lr is 'inf', expected a number above 0");
  EXPECT_EQ(error("optim.lr=nan"), "optim.lr is 'nan', expected a number above 0");
  EXPECT_EQ(error("optim.decay=-1"), "optim.decay is '-1', expected a number of at least 0");
  EXPECT_EQ(error("model.tie_head=maybe"), "model.tie_head is 'maybe', expected true | false");
  EXPECT_EQ(error("model.color=blue"), "model.color is 'blue', expected red | green");
  EXPECT_EQ(error("model.read.levels=1,-2"),
            "model.read.levels is '1,-2', expected a list, each an integer of at least 0");
  EXPECT_EQ(error("model.read.levels=1,,2"),
            "model.read.levels is '1,,2', expected a list, each an integer of at least 0");
  EXPECT_EQ(error("model.window=-3"), "model.window is '-3', expected full or an integer of at least 0");
  EXPECT_EQ(error("data.dir=\xFF").substr(0, 11), "data.dir is");
  EXPECT_EQ(error("layers"), "'layers' was given, expected key=value");
  EXPECT_EQ(error("=3"), "'=3' was given, expected key=value");
  EXPECT_EQ(c.layers, 12);
  EXPECT_EQ(c.lr, 6e-4);
}

TEST(Options, UnknownKeysSuggestTheNearest) {
  Config c;
  OptionTable t = c.table();
  const auto error = [&](const char* key) { return usage_of([&] { t.set(key, "1"); }); };
  EXPECT_EQ(error("model.layer"), "unknown key 'model.layer': did you mean 'model.layers'?");
  EXPECT_EQ(error("layers"), "unknown key 'layers': did you mean 'model.layers'?");
  EXPECT_EQ(error("optm.lr"), "unknown key 'optm.lr': did you mean 'optim.lr'?");
  EXPECT_EQ(error("levels"), "unknown key 'levels': did you mean 'model.read.levels'?");
  EXPECT_EQ(error("model"), "unknown key 'model': --help lists the keys");
  EXPECT_EQ(error("something.else_entirely"), "unknown key 'something.else_entirely': --help lists the keys");
  EXPECT_EQ(error(""), "unknown key '': --help lists the keys");
}

TEST(Options, TomlTablesAreDottedKeys) {
  Config c;
  OptionTable t = c.table();
  t.set_from_toml_text(R"(
seed = 5
optim.lr = 1        # an integer is a number
[model]
layers = 1e2
window = 16
[model.read]
levels = [7, 8]
)",
                       "recipe.toml");
  EXPECT_EQ(c.any, 5);
  EXPECT_EQ(c.lr, 1.0);
  EXPECT_EQ(c.layers, 100);
  EXPECT_EQ(c.window, 16);
  EXPECT_EQ(c.levels, (std::vector<int64_t>{7, 8}));
  EXPECT_TRUE(t.is_set("model.layers"));
  EXPECT_TRUE(t.is_set("model.read.levels"));
  EXPECT_FALSE(t.is_set("data.dir"));
}

TEST(Options, TomlErrorsNameFileAndLine) {
  Config c;
  OptionTable t = c.table();
  const auto error = [&](const char* text) {
    return usage_of([&] { t.set_from_toml_text(text, "r.toml"); });
  };
  EXPECT_EQ(error("\n[model]\nlyers = 3"),
            "r.toml:3: unknown key 'model.lyers': did you mean 'model.layers'?");
  EXPECT_EQ(error("model.layers = 'three'"),
            "r.toml:1: model.layers is \"three\", expected an integer from 1 to 1000");
  EXPECT_EQ(error("model.layers = 1.5"), "r.toml:1: model.layers is 1.5, expected an integer from 1 to 1000");
  EXPECT_EQ(error("model.tie_head = 1"), "r.toml:1: model.tie_head is 1, expected true | false");
  EXPECT_EQ(error("optim.lr = nan"), "r.toml:1: optim.lr is nan, expected a number above 0");
  EXPECT_EQ(error("data.dir = 3"), "r.toml:1: data.dir is 3, expected text");
  EXPECT_EQ(error("data.dir = 1979-05-27"), "r.toml:1: data.dir is of another type, expected text");
  EXPECT_EQ(error("model = 3"), "r.toml:1: unknown key 'model': --help lists the keys");
  EXPECT_EQ(error("model.layers.deep = 3").substr(0, 42), "r.toml:1: unknown key 'model.layers.deep':");
  EXPECT_EQ(error("model.layers = ").substr(0, 28), "r.toml:1 is not valid TOML: ");
  EXPECT_EQ(error("seed = 1\nseed = 2").substr(0, 28), "r.toml:2 is not valid TOML: ");
  // On these toml++ asserts.
  for (const char* text : {"[~", "[~model]\nlayers = 3", "[[~]]"})
    EXPECT_EQ(error(text), "r.toml is not valid TOML") << text;
  for (const char* text : {"\xC3\xA9 = 1", "seed = 1 \xC3\xA9", "seed \xEF\xB7\xB2 = 1"})
    EXPECT_EQ(error(text).substr(0, 28), "r.toml:1 is not valid TOML: ") << text;
  // Tables within tables, too many for the stack.
  std::string deep = "a";
  for (int i = 0; i < 200'000; ++i) deep += ".a";
  for (const std::string& text : {deep + " = 1", "[" + deep + "]"})
    EXPECT_EQ(error(text.c_str()), "r.toml has more than 4096 dots, which no configuration needs");
  EXPECT_EQ(usage_of([&] { t.set_from_json(3, "config.json"); }),
            "config.json is a JSON number, expected an object");
}

TEST(Options, TomlAndJsonRoundTripExactly) {
  const Rng rng(1, "options");
  for (uint64_t i = 0; i < 300; ++i) {
    Config c;
    OptionTable t = c.table();
    c.any = int64_t(rng.bits(4 * i));
    double lr = std::abs(std::bit_cast<double>(rng.bits(4 * i + 1)));
    c.lr = std::isfinite(lr) && lr > 0 ? lr : 0.1 + 0.2;
    c.decay = rng.uniform(4 * i + 2);
    c.tie = i % 2 == 0;
    c.dir.clear();
    for (uint64_t k = 0; k < i % 40; ++k) c.dir += char(1 + rng.below(1000 + 40 * i + k, 127));
    c.dir += "\xC3\xA9\"\\";
    c.levels.assign(i % 3, int64_t(i));
    c.color = i % 3 == 0 ? Color::red : Color::green;
    c.window = int64_t(i) - 1;
    const auto equals_c = [&](const Config& o) {
      EXPECT_EQ(o.any, c.any);
      EXPECT_EQ(std::bit_cast<uint64_t>(o.lr), std::bit_cast<uint64_t>(c.lr));
      EXPECT_EQ(std::bit_cast<uint64_t>(o.decay), std::bit_cast<uint64_t>(c.decay));
      EXPECT_EQ(o.tie, c.tie);
      EXPECT_EQ(o.dir, c.dir);
      EXPECT_EQ(o.levels, c.levels);
      EXPECT_EQ(o.color, c.color);
      EXPECT_EQ(o.window, c.window);
    };
    Config from_toml, from_json, from_text;
    OptionTable toml = from_toml.table(), json = from_json.table(), text = from_text.table();
    toml.set_from_toml_text(t.to_toml(), "round trip");
    equals_c(from_toml);
    json.set_from_json(parse_json(dump_json(t.to_json()), "round trip"), "round trip");
    equals_c(from_json);
    for (const std::string& key : t.keys()) text.set(key, t.text(key));
    equals_c(from_text);
    EXPECT_EQ(toml.to_toml(), t.to_toml());
  }
}

TEST(Options, PrintsTomlGroupedByTable) {
  Config c;
  EXPECT_EQ(c.table().to_toml(), R"(seed = 0

[model]
tie_head = true
layers = 12
read.levels = [1,2]
color = "green"
window = "full"

[optim]
lr = 0.0006
decay = 0.1

[data]
dir = "data"
)");
  EXPECT_EQ(c.table().to_json()["model"]["read"]["levels"], nlohmann::json({1, 2}));
}

TEST(Options, HelpShowsTypeAndDefaultNotThePresentValue) {
  Config c;
  OptionTable t = c.table();
  t.set("model.layers", "99");
  const std::string help = t.help();
  const size_t line = help.find("model.layers");
  ASSERT_NE(line, std::string::npos);
  const std::string row = help.substr(line, help.find('\n', line) - line);
  EXPECT_NE(row.find("an integer from 1 to 1000"), std::string::npos);
  EXPECT_NE(row.find(" 12 "), std::string::npos);
  EXPECT_NE(row.find("number of layers"), std::string::npos);
  EXPECT_NE(t.markdown_table().find("| `model.color` | red \\| green | `green` | a colour |"),
            std::string::npos);
  EXPECT_EQ(t.text("model.layers"), "99");
}

TEST(Options, ReadsAFileAndNamesItWhenItIsMissing) {
  const TestDir dir;
  const auto path = dir.write("recipe.toml", "model.layers = 3\n");
  Config c;
  OptionTable t = c.table();
  t.set_from_toml(path);
  EXPECT_EQ(c.layers, 3);
  std::filesystem::remove(path);
  EXPECT_PRED2(mentions, error_of([&] { t.set_from_toml(path); }), path.string());
}

}  // namespace
}  // namespace sps
