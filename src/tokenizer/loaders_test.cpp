#include <functional>

#include "base/test_dir.h"
#include "base/test_files.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/eot_config.h"
#include "tokenizer/load_tokenizer_json.h"
#include "tokenizer/test_tokenizer_json.h"

namespace sps {
namespace {

using nlohmann::json;

json split(std::string_view pattern, const char* behavior = "Isolated", bool invert = false) {
  return {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", behavior}, {"invert", invert}};
}
json sequence(json steps) {
  return {{"type", "Sequence"}, {"pretokenizers", std::move(steps)}};
}

BpeModel parsed(const json& file, const TokenizerOptions& options = {}) {
  return parse_tokenizer_json(file.dump(), "t.json", options);
}

TEST(LoadTokenizerJson, Gpt2Style) {
  EXPECT_EQ(parsed(small_json()), small_as_model());
  json pairs = small_json();
  pairs["model"]["merges"] = json::array({json::array({"a", "b"}), json::array({"\u0120", "ab"})});
  EXPECT_EQ(parsed(pairs), small_as_model());
  json in_vocab = small_json();
  in_vocab["model"]["vocab"]["<|endoftext|>"] = 258;
  EXPECT_EQ(parsed(in_vocab), small_as_model());
  in_vocab["added_tokens"] = json::array();
  EXPECT_EQ(parsed(in_vocab), small_as_model());
}

TEST(LoadTokenizerJson, OtherFamilies) {
  struct Case {
    const char* name;
    std::function<void(json&)> file;
    std::function<void(BpeModel&)> model;
  };
  const auto only = [](std::string_view pattern) {
    return std::vector<SplitStep>{{SplitStep::Kind::pattern, std::string(pattern)}};
  };
  const SplitStep digits{SplitStep::Kind::digits, ""};
  const std::vector<Case> cases = {
      {"llama 3",
       [](json& f) {
         f["pre_tokenizer"] = sequence({split(patterns::cl100k), byte_level(false)});
         f["model"]["ignore_merges"] = true;
         f["post_processor"] = {{"type", "TemplateProcessing"}};
         f["decoder"] = {{"type", "Sequence"}, {"decoders", {byte_level()}}};
       },
       [&](BpeModel& m) { m.splits = only(patterns::cl100k), m.whole_words = true; }},
      {"qwen",
       [](json& f) {
         f["normalizer"] = {{"type", "NFC"}};
         f["pre_tokenizer"] = sequence({split(patterns::qwen2), byte_level(false)});
       },
       [&](BpeModel& m) { m.splits = only(patterns::qwen2), m.nfc = true; }},
      {"smol",
       [](json& f) {
         f["pre_tokenizer"] = sequence({{{"type", "Digits"}, {"individual_digits", true}}, byte_level()});
       },
       [&](BpeModel& m) { m.splits.insert(m.splits.begin(), digits); }},
      {"o200k, removed and inverted",
       [](json& f) {
         f["pre_tokenizer"] = sequence({split(patterns::o200k, "Removed", true), byte_level(false)});
       },
       [&](BpeModel& m) { m.splits = only(patterns::o200k); }},
      {"prefix space", [](json& f) { f["pre_tokenizer"] = byte_level(true, true); },
       [](BpeModel& m) { m.prefix_space = true; }},
      {"text, runs of digits, nested sequences",
       [](json& f) {
         const json text = {{"type", "Split"},
                            {"pattern", {{"String", "a.b"}}},
                            {"behavior", "Isolated"},
                            {"invert", false}};
         f["pre_tokenizer"] = sequence(
             {sequence({text, {{"type", "Digits"}, {"individual_digits", false}}}), byte_level(false)});
         f["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}};
       },
       [&](BpeModel& m) {
         m.splits = only("a\\.b");
         m.splits.push_back({SplitStep::Kind::pattern, "\\p{N}+"});
         m.nfc = true;
       }},
      {"added tokens, not sorted",
       [](json& f) {
         f["added_tokens"].push_back({{"id", 300}, {"content", "<x>"}, {"special", true}, {"lstrip", true}});
         f["added_tokens"].push_back({{"id", 299}, {"content", "<y>"}, {"special", false}});
       },
       [](BpeModel& m) {
         m.added.push_back({"<y>", 299, false});
         m.added.push_back({"<x>", 300, true});
         m.tokens.resize(301);
       }},
      {"a gap between ids", [](json& f) { f["model"]["vocab"]["zz"] = 280; },
       [](BpeModel& m) { m.tokens.resize(281), m.tokens[280] = "zz"; }},
  };
  for (const auto& [name, change_file, change_model] : cases) {
    json file = small_json();
    BpeModel model = small_as_model();
    change_file(file);
    change_model(model);
    EXPECT_EQ(parsed(file), model) << name;
    EXPECT_NO_THROW(BpeTokenizer{parsed(file)}) << name;
  }
}

TEST(LoadTokenizerJson, EndOfText) {
  json file = small_json();
  file["added_tokens"].push_back({{"id", 259}, {"content", "</s>"}, {"special", false}});
  EXPECT_EQ(parsed(file).eot, 258);
  const BpeModel chosen = parsed(file, {.eot = "</s>"});
  EXPECT_EQ(chosen.eot, 259);
  EXPECT_TRUE(chosen.added[1].special);  // it ends texts, so no text may spell it
  EXPECT_PRED2(mentions, error_of([&] { parsed(file, {.eot = "<eos>"}); }), "no added token '<eos>'");
  file["added_tokens"][0]["content"] = "<|im_end|>";
  EXPECT_EQ(parsed(file).eot, 258);
  for (auto& token : file["added_tokens"]) token["content"] = "<" + std::to_string(int(token["id"])) + ">";
  EXPECT_PRED2(mentions, error_of([&] { parsed(file); }), "(it has <258>, <259>); --eot must name it");
  EXPECT_EQ(parsed(file, {.eot = "<259>"}).eot, 259);
  EXPECT_EQ(parsed(file, {.eot_id = 259}).eot, 259);
  EXPECT_PRED2(mentions, error_of([&] { parsed(file, {.eot_id = 260}); }), "no added token with the id 260");
  // A token of the vocabulary will do unless merges need it; then it is an added one.
  file["model"]["vocab"]["<fin>"] = 260;
  const BpeModel plain = parsed(file, {.eot = "<fin>"});
  EXPECT_EQ(plain.eot, 260);
  EXPECT_EQ(plain.added.back(), (AddedToken{"<fin>", 260, true}));
  EXPECT_EQ(parsed(file, {.eot_id = 260}), plain);
  EXPECT_PRED2(mentions, error_of([&] { parsed(file, {.eot_id = 256}); }), "no added token with the id 256");
}

// The copy that a data set or a checkpoint takes along says it by itself, whatever the token is called.
TEST(LoadTokenizerJson, EndOfTextIsKept) {
  json file = small_json();
  file["added_tokens"].push_back({{"id", 259}, {"content", "<fin>"}, {"special", true}});
  for (const char* eot : {"<fin>", "<|endoftext|>"}) {
    const BpeTokenizer tokenizer(parsed(file, {.eot = eot}));
    const json written = parse_json(tokenizer.to_json(), "written");
    // Nothing is noted where the name says enough.
    EXPECT_EQ(written["post_processor"].is_null(), eot == std::string("<|endoftext|>"));
    const BpeTokenizer back(parsed(written));
    EXPECT_EQ(back.eot(), tokenizer.eot());
    EXPECT_EQ(back.fingerprint(), tokenizer.fingerprint());
    EXPECT_EQ(back.to_json(), tokenizer.to_json());
  }
  // A template that adds something is about something else, and so is one with several tokens.
  json noted = parse_json(BpeTokenizer(parsed(file, {.eot = "<fin>"})).to_json(), "written");
  EXPECT_EQ(parsed(noted).eot, 259);
  json other = noted;
  other["post_processor"]["single"].push_back({{"SpecialToken", {{"id", "<fin>"}, {"type_id", 0}}}});
  EXPECT_EQ(parsed(other).eot, 258);
  other = noted;
  other["post_processor"]["special_tokens"]["<bos>"] = json::object();
  EXPECT_EQ(parsed(other).eot, 258);
  other = noted;
  other["post_processor"]["special_tokens"] = {{"<gone>", json::object()}};
  EXPECT_EQ(parsed(other).eot, 258);
  for (const json& odd : {json(7), json::array(), json{{"type", 7}}, json{{"special_tokens", 7}}}) {
    other["post_processor"] = odd;
    EXPECT_EQ(parsed(other).eot, 258) << odd;
  }
}

TEST(EotConfig, TextOrId) {
  const auto choice = [](std::string_view text) { return parse_eot_config(text, "c.json"); };
  EXPECT_EQ(choice(R"({"eos_token": "<fin>", "eos_token_id": 3})").text, "<fin>");
  EXPECT_EQ(choice(R"({"eos_token": {"content": "<fin>", "lstrip": false}})").text, "<fin>");
  EXPECT_EQ(choice(R"({"eos_token_id": 3})").id, 3);
  EXPECT_EQ(choice(R"({"eos_token": null, "eos_token_id": [5, 3]})").id, 5);
  for (const char* none :
       {"{}", R"({"eos_token": null})", R"({"eos_token": {}})", R"({"eos_token_id": null})"})
    EXPECT_FALSE(choice(none).made()) << none;
  for (const char* wrong : {R"({"eos_token": 3})", R"({"eos_token": ""})", R"({"eos_token": ["a"]})",
                            R"({"eos_token_id": "3"})", R"({"eos_token_id": -1})", R"({"eos_token_id": []})",
                            R"({"eos_token_id": [null, 3]})", R"({"eos_token_id": 4294967296})", "[]", "{"})
    EXPECT_PRED2(mentions, error_of([&] { choice(wrong); }), "c.json") << wrong;
}

TEST(MakeTokenizer, EndOfTextFromTheFilesBeside) {
  const TestDir dir;
  json file = small_json();
  file["added_tokens"] = {{{"id", 258}, {"content", "<a>"}, {"special", true}},
                          {{"id", 259}, {"content", "<fin>"}, {"special", true}}};
  const std::string path = dir.write("t/tokenizer.json", file.dump());
  const auto eot = [&](const TokenizerOptions& options = {}) { return make_tokenizer(path, options)->eot(); };
  EXPECT_PRED2(mentions, error_of([&] { eot(); }), "--eot must name it");
  dir.write("t/generation_config.json", R"({"eos_token_id": [258, 7]})");
  EXPECT_EQ(eot(), 258);
  dir.write("t/special_tokens_map.json", R"({"eos_token": {"content": "<fin>"}})");
  EXPECT_EQ(eot(), 259);
  dir.write("t/tokenizer_config.json", R"({"eos_token": "<a>"})");
  EXPECT_EQ(eot(), 258);
  EXPECT_EQ(make_tokenizer((dir / "t").string())->eot(), 258);
  EXPECT_EQ(eot({.eot = "<fin>"}), 259);
  EXPECT_EQ(eot({.eot_id = 259}), 259);
  dir.write("t/tokenizer_config.json", R"({"eos_token": "<b>"})");
  const std::string sentence = error_of([&] { eot(); });
  EXPECT_PRED2(mentions, sentence, "tokenizer_config.json names '<b>' for the end of text, but");
  EXPECT_PRED2(mentions, sentence, "tokenizer.json has no such added token");
  dir.write("t/tokenizer_config.json", R"({"eos_token": 7})");
  EXPECT_PRED2(mentions, error_of([&] { eot(); }), "eos_token is 7");
  // What a usual name says is not asked for: chat models name the end of a turn there.
  dir.write("t/tokenizer.json", small_json().dump());
  EXPECT_EQ(eot(), 258);
  // The other files of Hugging Face have it beside them too.
  json vocab = file["model"]["vocab"];
  vocab["<fin>"] = 258;
  dir.write("gpt2/vocab.json", vocab.dump());
  dir.write("gpt2/merges.txt", "a b\n\u0120 ab\n");
  dir.write("gpt2/tokenizer_config.json", R"({"eos_token": "<fin>"})");
  EXPECT_EQ(make_tokenizer((dir / "gpt2").string())->eot(), 258);
}

TEST(LoadTokenizerJson, ErrorsSayWhatIsNotSupported) {
  struct Case {
    const char* sentence;
    std::function<void(json&)> change;
  };
  const std::vector<Case> cases = {
      {"model.type is \"WordPiece\"; expected \"BPE\"", [](json& f) { f["model"]["type"] = "WordPiece"; }},
      {"model.type is \"Unigram\"",
       [](json& f) {
         f["model"] = {{"type", "Unigram"}, {"vocab", json::array({json::array({"a", -1.5})})}};
       }},
      {"model.byte_fallback is true", [](json& f) { f["model"]["byte_fallback"] = true; }},
      {"model.end_of_word_suffix is \"</w>\"", [](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }},
      {"model.dropout is 0.1", [](json& f) { f["model"]["dropout"] = 0.1; }},
      {"model.ignore_merges is 3; expected true or false", [](json& f) { f["model"]["ignore_merges"] = 3; }},
      {"has no model", [](json& f) { f.erase("model"); }},
      {"model is \"BPE\"; expected an object", [](json& f) { f["model"] = "BPE"; }},
      {"the file is [1]; expected an object", [](json& f) { f = {1}; }},
      {"no ByteLevel pre-tokenizer", [](json& f) { f["pre_tokenizer"] = nullptr; }},
      {"pre_tokenizer.type is \"Metaspace\"",
       [](json& f) {
         f["pre_tokenizer"] = {{"type", "Metaspace"}};
       }},
      {"pre_tokenizer.pretokenizers[1].type is \"ByteLevel\"; expected nothing after ByteLevel",
       [](json& f) {
         f["pre_tokenizer"] = sequence({byte_level(), byte_level()});
       }},
      {"pre_tokenizer.pretokenizers[1].add_prefix_space is true",
       [](json& f) {
         f["pre_tokenizer"] = sequence({split("x"), byte_level(true, true)});
       }},
      {"behavior is \"MergedWithNext\"",
       [](json& f) {
         f["pre_tokenizer"] = sequence({split("x", "MergedWithNext"), byte_level()});
       }},
      {"behavior is \"Removed\"",
       [](json& f) {
         f["pre_tokenizer"] = sequence({split("x", "Removed", true), byte_level()});
       }},
      {"pattern is {}; expected a Regex or a String",
       [](json& f) {
         f["pre_tokenizer"] = sequence({split("x"), byte_level()});
         f["pre_tokenizer"]["pretokenizers"][0]["pattern"] = json::object();
       }},
      {"normalizer.type is \"Lowercase\"",
       [](json& f) {
         f["normalizer"] = {{"type", "Lowercase"}};
       }},
      {"decoder.type is \"Metaspace\"",
       [](json& f) {
         f["decoder"] = {{"type", "Metaspace"}};
       }},
      {"added_tokens[1].single_word is true",
       [](json& f) {
         f["added_tokens"].push_back({{"id", 300}, {"content", "x"}, {"single_word", true}});
       }},
      {"added_tokens[0].id is -1", [](json& f) { f["added_tokens"][0]["id"] = -1; }},
      {"added_tokens[0].id is 4294967296", [](json& f) { f["added_tokens"][0]["id"] = uint64_t{1} << 32; }},
      {"the token '<|endoftext|>' has id 2147483647; with 259 tokens",
       [](json& f) { f["added_tokens"][0]["id"] = INT32_MAX; }},
      {"added_tokens[0].content is null", [](json& f) { f["added_tokens"][0].erase("content"); }},
      {"added_tokens is 5; expected a list", [](json& f) { f["added_tokens"] = 5; }},
      {"the token '\u2581the' is not written in GPT-2's alphabet",
       [](json& f) { f["model"]["vocab"]["\u2581the"] = 259; }},
      {"the token 'x2' has id 1000000; with 259 tokens",
       [](json& f) { f["model"]["vocab"]["x2"] = 1000000; }},
      {"two tokens have id 5", [](json& f) { f["model"]["vocab"]["x2"] = 5; }},
      {"id of token 'ab' is not a number", [](json& f) { f["model"]["vocab"]["ab"] = "256"; }},
      {"id of token 'ab' is not a number", [](json& f) { f["model"]["vocab"]["ab"] = -2; }},
      {"id of token 'ab' is not a number", [](json& f) { f["model"]["vocab"]["ab"] = {1}; }},
      {"'<|endoftext|>' is token 300 and added token 258",
       [](json& f) { f["model"]["vocab"]["<|endoftext|>"] = 300; }},
      {"merge 0 is 'x y', but 'xy' is no token", [](json& f) { f["model"]["merges"] = {"x y"}; }},
      {"merge 0 is 'q ab', but 'qab' is no token", [](json& f) { f["model"]["merges"] = {"q ab"}; }},
      {"merge 1 is 'a b c'; expected two tokens",
       [](json& f) {
         f["model"]["merges"] = {"a b", "a b c"};
       }},
      {"merge 0 is 'ab'; expected two tokens", [](json& f) { f["model"]["merges"] = {"ab"}; }},
      {"merge 0 has 3 parts",
       [](json& f) {
         f["model"]["merges"] = json::array({json::array({"a", "b", "c"})});
       }},
      {"merge 0 is neither text nor a list", [](json& f) { f["model"]["merges"] = {7}; }},
      {"merge 0 is neither text nor a list",
       [](json& f) {
         f["model"]["merges"] = json::array({json::array({"a", json::array({"b"})})});
       }},
  };
  for (const auto& [sentence, change] : cases) {
    json file = small_json();
    change(file);
    const std::string error = error_of([&] { parsed(file); });
    EXPECT_PRED2(mentions, error, sentence);
    EXPECT_TRUE(error.starts_with("t.json")) << error;
  }
}

TEST(LoadTokenizerJson, TextThatIsNotSuchJson) {
  const auto error = [](std::string_view text) {
    return error_of([&] { parse_tokenizer_json(text, "t.json"); });
  };
  EXPECT_PRED2(mentions, error(""), "is not valid JSON");
  EXPECT_PRED2(mentions, error("{\"model\": {\"vocab\": {\"a\": 1"),
               "is not valid JSON: the error is at byte");
  EXPECT_PRED2(mentions, error("{} x"), "is not valid JSON");
  EXPECT_PRED2(mentions, error(std::string_view("{\0}", 3)), "NUL byte");
  EXPECT_PRED2(mentions, error("{\"a\": 1e999}"), "a number is out of range");
  EXPECT_PRED2(mentions, error("{\"a\": 1, \"a\": 2}"), "duplicate key 'a'");
  EXPECT_PRED2(mentions, error("{\"model\": {\"vocab\": {}, \"vocab\": {}}}"), "duplicate key 'vocab'");
  EXPECT_PRED2(mentions, error(std::string(100000, '[')), "nested more than 64 levels deep");
  EXPECT_PRED2(mentions, error("{\"model\": {\"vocab\": {\"\xFF\": 1}}}"), "is not valid JSON");
}

// Cut anywhere, or with a byte changed, a file is an Error or a model, never anything else.
TEST(LoadTokenizerJson, DamagedFiles) {
  const std::string text = small_json().dump();
  const Rng rng(3, "damage");
  int loaded = 0;
  for (uint64_t i = 0; i < 3000; ++i) {
    std::string damaged = text;
    if (i % 2 == 0) damaged.resize(rng.below(4 * i, text.size()));
    if (!damaged.empty()) damaged[rng.below(4 * i + 1, damaged.size())] = char(rng.bits(4 * i + 2));
    try {
      BpeTokenizer{parse_tokenizer_json(damaged, "t.json")};
      ++loaded;
    } catch (const Error&) {
    }
  }
  EXPECT_GT(loaded, 20);  // changes in the parts that are ignored
}

}  // namespace
}  // namespace sps
