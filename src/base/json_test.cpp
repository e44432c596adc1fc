#include "base/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/test_dir.h"

namespace sps {
namespace {

// Empty if the text parses.
std::string fault_of(std::string_view text) {
  try {
    parse_json(text, "notes.json");
  } catch (const Error& e) {
    EXPECT_EQ(e.exit_status(), 1);
    return e.what();
  }
  return "";
}

TEST(Json, ParsesWhatItPrints) {
  const nlohmann::json value = {{"a", {1, -2, 3.5}}, {"b", {{"c", nullptr}}}, {"text", "h\"i"}};
  EXPECT_EQ(parse_json(dump_json(value), "x"), value);
}

TEST(Json, RepeatedKeysAreFoundAtEveryLevel) {
  EXPECT_EQ(fault_of(R"({"a":1,"b":2,"a":3})"), "notes.json has a duplicate key 'a'");
  EXPECT_EQ(fault_of(R"({"x":[{"k":1},{"k":1,"k":2}]})"), "notes.json has a duplicate key 'k'");
  EXPECT_EQ(fault_of(R"({"a":{"b":1},"b":{"a":1}})"), "");
}

TEST(Json, NothingAfterTheValueIsOverlooked) {
  EXPECT_EQ(fault_of(std::string("{}\0{\"a\":1}", 10)),
            "notes.json is not valid JSON: it contains a NUL byte");
  EXPECT_NE(fault_of("{} {}"), "");
  EXPECT_NE(fault_of(""), "");
  EXPECT_NE(fault_of("{\"a\":1"), "");
  EXPECT_EQ(fault_of("{\"a\":1e999}"), "notes.json is not valid JSON: a number is out of range");
}

TEST(Json, NestingIsLimited) {
  EXPECT_EQ(fault_of(std::string(64, '[') + std::string(64, ']')), "");
  EXPECT_EQ(fault_of(std::string(65, '[') + std::string(65, ']')),
            "notes.json is nested more than 64 levels deep");
  EXPECT_NE(fault_of(std::string(1000000, '[')), "");
}

TEST(Json, OutputIsAlwaysJson) {
  const nlohmann::ordered_json line = {{"z", std::nan("")}, {"a", std::numeric_limits<double>::infinity()}};
  EXPECT_EQ(dump_json(line), R"({"z":null,"a":null})");
  EXPECT_EQ(dump_json(nlohmann::json("a\xFFz")), "\"a\xEF\xBF\xBDz\"");
  EXPECT_TRUE(is_utf8("h\xC3\xA9"));
  EXPECT_FALSE(is_utf8("h\xC3"));
}

TEST(Json, WhatIsStoredIsWhatIsReadBack) {
  const nlohmann::json value = {{"a", 0.1 + 0.2}, {"b", -0.0}, {"c", UINT64_MAX}, {"d", "h\xC3\xA9"}};
  EXPECT_EQ(parse_json(storable_json(value, "state"), "x"), value);
  EXPECT_EQ(storable_json({{"a", 1}}, "state"), "{\n  \"a\": 1\n}\n");
  const auto error = [](const nlohmann::json& bad) {
    return error_of([&] { storable_json(bad, "the state"); });
  };
  EXPECT_EQ(error({{"loss", std::nan("")}}),
            "the state cannot be stored: it contains a number that is not finite");
  EXPECT_EQ(error({{"loss", -INFINITY}}),
            "the state cannot be stored: it contains a number that is not finite");
  EXPECT_EQ(error({{"dir", "\xFF"}}), "the state cannot be stored: it contains text that is not UTF-8");
}

}  // namespace
}  // namespace sps
