#include "tokenizer/save_tokenizer_json.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "base/test_dir.h"
#include "tokenizer/load_tokenizer_json.h"
#include "tokenizer/splitter.h"

namespace sps {
namespace {

// "ab", " a" and end of text over the bytes a, b and space.
BpeModel small_model() {
  BpeModel model;
  model.tokens = {"a", "b", " ", "ab", " a", ""};
  model.merges = {{0, 1, 3}, {2, 0, 4}};
  model.splits = {{SplitStep::Kind::pattern, std::string(patterns::gpt2)}};
  model.added = {{"<|endoftext|>", 5, true}};
  model.eot = 5;
  return model;
}

nlohmann::json written(const BpeModel& model) {
  return parse_json(to_tokenizer_json(model), "tokenizer.json");
}

TEST(SaveTokenizerJson, TheWholeFile) {
  EXPECT_EQ(to_tokenizer_json(small_model()), R"({
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "added_tokens": [
    {
      "id": 5,
      "content": "<|endoftext|>",
      "single_word": false,
      "lstrip": false,
      "rstrip": false,
      "normalized": false,
      "special": true
    }
  ],
  "normalizer": null,
  "pre_tokenizer": {
    "type": "ByteLevel",
    "add_prefix_space": false,
    "trim_offsets": true,
    "use_regex": true
  },
  "post_processor": null,
  "decoder": {
    "type": "ByteLevel",
    "add_prefix_space": true,
    "trim_offsets": true,
    "use_regex": true
  },
  "model": {
    "type": "BPE",
    "dropout": null,
    "unk_token": null,
    "continuing_subword_prefix": null,
    "end_of_word_suffix": null,
    "fuse_unk": false,
    "byte_fallback": false,
    "ignore_merges": false,
    "vocab": {
      "a": 0,
      "b": 1,
      "Ġ": 2,
      "ab": 3,
      "Ġa": 4,
      "<|endoftext|>": 5
    },
    "merges": [
      "a b",
      "Ġ a"
    ]
  }
}
)");
  EXPECT_EQ(to_tokenizer_json(small_model()), to_tokenizer_json(small_model()));
}

TEST(SaveTokenizerJson, Splits) {
  const auto pre_tokenizer = [](std::vector<SplitStep> splits) {
    BpeModel model = small_model();
    model.splits = std::move(splits);
    return written(model).at("pre_tokenizer");
  };
  const SplitStep digits{SplitStep::Kind::digits, ""}, gpt2 = small_model().splits[0];
  const SplitStep own{SplitStep::Kind::pattern, "\\p{L}+"};
  const auto json = [](const char* text) { return parse_json(text, "test"); };
  const auto with_byte_level = [&](const std::string& steps, const char* regex) {
    return json((R"({"type": "Sequence", "pretokenizers": [)" + steps +
                 R"(, {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": )" +
                 regex + "}]}")
                    .c_str());
  };
  const std::string digits_json = R"({"type": "Digits", "individual_digits": true})";
  const std::string own_json =
      R"({"type": "Split", "pattern": {"Regex": "\\p{L}+"}, "behavior": "Isolated", "invert": false})";
  EXPECT_EQ(pre_tokenizer({digits, gpt2}), with_byte_level(digits_json, "true"));
  EXPECT_EQ(pre_tokenizer({own}), with_byte_level(own_json, "false"));
  EXPECT_EQ(pre_tokenizer({own, digits}), with_byte_level(own_json + "," + digits_json, "false"));
  EXPECT_EQ(pre_tokenizer({gpt2}),
            pre_tokenizer({{SplitStep::Kind::pattern, std::string(patterns::gpt2_tiktoken)}}));
  EXPECT_EQ(pre_tokenizer({}).at("use_regex"), false);
  // `$` would be the end of any line to the readers.
  const std::string tiktoken =
      pre_tokenizer({{SplitStep::Kind::pattern, std::string(patterns::cl100k_tiktoken)}}).dump();
  EXPECT_EQ(tiktoken.find('$'), std::string::npos);
}

TEST(SaveTokenizerJson, OtherFields) {
  BpeModel model = small_model();
  model.nfc = model.prefix_space = true;
  model.added[0].special = false;
  const auto json = written(model);
  EXPECT_EQ(json.at("normalizer"), parse_json(R"({"type": "NFC"})", "test"));
  EXPECT_EQ(json.at("pre_tokenizer").at("add_prefix_space"), true);
  EXPECT_EQ(json.at("added_tokens")[0].at("special"), false);
}

// Readers find the ids of added tokens in the vocabulary, or count on from its size.
TEST(SaveTokenizerJson, AddedTokensInTheVocabulary) {
  BpeModel model = small_model();
  model.whole_words = true;
  auto json = written(model);
  EXPECT_EQ(json.at("model").at("ignore_merges"), true);
  EXPECT_FALSE(json.at("model").at("vocab").contains("<|endoftext|>")) << "a text could spell it";
  // In the middle, and behind a gap, its id can only stand in the vocabulary.
  model.tokens = {"a", "", "b", " ", "ab", " a"};
  model.merges = {{0, 2, 4}, {3, 0, 5}};
  model.added = {{"<s>", 1, true}};
  EXPECT_EQ(written(model).at("model").at("vocab").at("<s>"), 1);
  model = small_model();
  model.whole_words = true;
  model.added[0].id = model.eot = 9;
  EXPECT_EQ(written(model).at("model").at("vocab").at("<|endoftext|>"), 9);
}

// Readers of merges as lines skip those that begin like the version line of merges.txt.
TEST(SaveTokenizerJson, AMergeThatLooksLikeAVersionLine) {
  BpeModel model = small_model();
  model.tokens = {"#version", "s", "#versions", ""};
  model.merges = {{0, 1, 2}};
  model.added[0].id = model.eot = 3;
  EXPECT_EQ(written(model).at("model").at("merges"), parse_json(R"([["#version", "s"]])", "test"));
}

TEST(SaveTokenizerJson, TheLoaderGivesTheModelBack) {
  const auto back = [](const BpeModel& model) {
    return parse_tokenizer_json(to_tokenizer_json(model), "written");
  };
  BpeModel model = small_model();
  for (int b = 0; b < 256; ++b)
    if (b != 'a' && b != 'b' && b != ' ') model.tokens.push_back(std::string(1, char(b)));
  EXPECT_EQ(back(model), model);
  model.prefix_space = model.nfc = true;
  EXPECT_EQ(back(model), model);
  model.prefix_space = false;
  model.whole_words = true;
  model.splits = {{SplitStep::Kind::digits, ""}, {SplitStep::Kind::pattern, "[ab]+"}};
  model.added.push_back({"<not special>", 400, false});
  model.tokens.resize(401);
  EXPECT_EQ(back(model), model);
  model.tokens[400] = "#version";
  model.tokens.insert(model.tokens.end(), {"#versiona", ""});
  model.added.back().id = 402;
  model.merges.push_back({400, 0, 401});
  EXPECT_EQ(back(model), model);
}

// A template that adds nothing, so that readers give the same ids.
TEST(SaveTokenizerJson, NotesAnEndOfTextThatNoNameGivesAway) {
  BpeModel model = small_model();
  EXPECT_TRUE(written(model).at("post_processor").is_null());
  model.added[0].text = "<fin>";
  EXPECT_EQ(written(model).at("post_processor"), parse_json(R"({
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<fin>": {"id": "<fin>", "ids": [5], "tokens": ["<fin>"]}}
  })",
                                                            "test"));
}

TEST(SaveTokenizerJson, WhatCannotBeWritten) {
  const auto error = [](auto change) {
    BpeModel model = small_model();
    change(model);
    return error_of([&] { to_tokenizer_json(model); });
  };
  EXPECT_PRED2(mentions, error([](BpeModel& m) { m.added[0].text = "ab"; }), "'ab'");
  EXPECT_PRED2(mentions, error([](BpeModel& m) { m.tokens[3] = "a"; }), "'a'");
  EXPECT_PRED2(mentions, error([](BpeModel& m) { m.added[0].text = "\xFF"; }), "UTF-8");
  EXPECT_PRED2(mentions, error([](BpeModel& m) {
                 m.prefix_space = true;
                 m.splits[0].pattern = "x";
               }),
               "space");
}

TEST(SaveTokenizerJson, Config) {
  const auto config = parse_json(to_tokenizer_config_json(small_model()), "tokenizer_config.json");
  EXPECT_EQ(config.at("eos_token"), "<|endoftext|>");
}

}  // namespace
}  // namespace sps
