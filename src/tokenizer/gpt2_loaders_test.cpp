// vocab.json with merges.txt, and tiktoken's files.
#include "base/test_dir.h"
#include "base/test_files.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/load_gpt2_files.h"
#include "tokenizer/load_tiktoken.h"
#include "tokenizer/load_tokenizer_json.h"
#include "tokenizer/test_tokenizer_json.h"

namespace sps {
namespace {

using nlohmann::json;

TEST(LoadGpt2Files, SmallFiles) {
  json vocab = small_json()["model"]["vocab"];
  vocab["<|endoftext|>"] = 258;
  BpeModel expected = small_as_model();
  const auto load = [&](std::string_view merges, const TokenizerOptions& options = {}) {
    return parse_gpt2_files(vocab.dump(), "vocab.json", merges, "merges.txt", options);
  };
  EXPECT_EQ(load("#version: 0.2\na b\n\u0120 ab\n"), expected);
  EXPECT_EQ(load("a b\r\n\u0120 ab"), expected);
  expected.splits[0].pattern = patterns::qwen2;
  EXPECT_EQ(load("a b\n\u0120 ab\n", {.pattern = std::string(patterns::qwen2)}), expected);

  EXPECT_PRED2(mentions, error_of([&] { load("a b\nab\n"); }), "merges.txt, line 2: 'ab'");
  EXPECT_PRED2(mentions, error_of([&] { load("a b\n#version\n"); }), "merges.txt, line 2");
  EXPECT_PRED2(mentions, error_of([&] { load("a c\n"); }), "vocab.json with merges.txt: merge 0 is 'a c'");
  EXPECT_PRED2(mentions, error_of([&] { parse_gpt2_files("[]", "v", "", "m"); }),
               "v is not an object of tokens");
  EXPECT_PRED2(mentions, error_of([&] { parse_gpt2_files("{}", "v", "", "m"); }), "--eot must name it");
}

std::string to_base64(std::string_view bytes) {
  static constexpr std::string_view letters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t j = 0; j < 3; ++j)
      bits = bits << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0);
    for (size_t j = 0; j < 4; ++j) text += i + j > bytes.size() ? '=' : letters[bits >> (18 - 6 * j) & 63];
  }
  return text;
}

std::string rank_file(const std::vector<std::string>& tokens) {
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (!tokens[i].empty()) text += to_base64(tokens[i]) + " " + std::to_string(i) + "\n";
  return text;
}

TEST(LoadTiktoken, EverySplitIsAMerge) {
  std::vector<std::string> tokens = small_model({}).tokens;
  tokens.back() = "ab";
  for (const char* token : {"bc", "abc", "zzz"}) tokens.push_back(token);
  const BpeModel model = parse_tiktoken(rank_file(tokens), "r", "mine",
                                        {.eot = "<end>", .pattern = std::string(patterns::gpt2)});
  tokens.emplace_back();  // the end of text
  EXPECT_EQ(model.tokens, tokens);
  EXPECT_EQ(model.merges,
            (std::vector<Merge>{{'a', 'b', 256}, {'b', 'c', 257}, {'a', 257, 258}, {256, 'c', 258}}));
  EXPECT_EQ(model.eot, 260);
  EXPECT_TRUE(model.whole_words);
  const BpeTokenizer tokenizer(model);
  EXPECT_EQ(encoded(tokenizer, "zzz"), (std::vector<int32_t>{259}));  // no merge leads there
  EXPECT_EQ(encoded(tokenizer, "abcbc"), (std::vector<int32_t>{258, 257}));
}

TEST(LoadTiktoken, KnownNames) {
  struct Case {
    const char* stem;
    std::string_view pattern;
    int32_t eot;
    size_t added;
  };
  for (const auto& [stem, pattern, eot, added] :
       {Case{"gpt2", patterns::gpt2_tiktoken, 50256, 1}, Case{"r50k_base", patterns::gpt2_tiktoken, 50256, 1},
        Case{"p50k_base", patterns::gpt2_tiktoken, 50256, 1},
        Case{"cl100k_base", patterns::cl100k_tiktoken, 100257, 5},
        Case{"o200k_base", patterns::o200k, 199999, 2}, Case{"tokenizer", patterns::cl100k, 128001, 256}}) {
    const BpeModel model = parse_tiktoken(rank_file(small_model({}).tokens), "r", stem);
    EXPECT_EQ(model.splits, (std::vector<SplitStep>{{SplitStep::Kind::pattern, std::string(pattern)}}))
        << stem;
    EXPECT_EQ(model.eot, eot) << stem;
    EXPECT_EQ(model.added.size(), added) << stem;
    // What is written is the same tokenizer, few tokens or not.
    const BpeTokenizer tokenizer(model);
    const BpeTokenizer written(parse_tokenizer_json(tokenizer.to_json(), "t"));
    EXPECT_EQ(written.fingerprint(), tokenizer.fingerprint()) << stem;
  }
  const BpeModel llama = parse_tiktoken(rank_file(small_model({}).tokens), "r", "tokenizer");
  EXPECT_EQ(llama.added[9].text, "<|eot_id|>");
  EXPECT_EQ(llama.added[11].text, "<|reserved_special_token_3|>");
  EXPECT_EQ(llama.added[255].text, "<|reserved_special_token_247|>");
}

TEST(LoadTiktoken, Errors) {
  const auto error = [](std::string_view text, const char* stem = "gpt2",
                        const TokenizerOptions& options = {}) {
    return error_of([&] { parse_tiktoken(text, "r.tiktoken", stem, options); });
  };
  const std::string expected = "is not a token in base64, a space and a rank";
  for (const char* line : {"\x0E\x05<unk>", "IQ==", "IQ== x", "IQ== -1", "IQ== 1 ", "IQ 0", "I=== 0",
                           "IQ=a 0", "!!!! 0", "IQ== 99999999999999999999", " 0"})
    EXPECT_PRED2(mentions, error("IQ== 0\n\n" + std::string(line)), "r.tiktoken, line 3 " + expected);
  EXPECT_PRED2(mentions, error("IQ== 0\nIg== 0\n"), "line 2 has rank 0, which an earlier line has too");
  EXPECT_PRED2(mentions, error("IQ== 4000000\n"), "has id 4000000");
  EXPECT_PRED2(mentions, error(to_base64(std::string(2000, 'a')) + " 0"), "a token of 2000 bytes");
  EXPECT_PRED2(mentions, error("IQ== 0\n", "mine"), "no rank file of the name 'mine' is known");
  EXPECT_PRED2(mentions, error("IQ== 0\n", "mine", {.pattern = "x"}), "there must be an eot");
  EXPECT_PRED2(mentions, error("IQ== 0\n", "gpt2", {.eot = "<x>"}), "no added token '<x>'");
}

TEST(Loaders, ThreeKindsOfFilesOfGpt2GiveTheSameIds) {
  SPS_NEEDS_SHARED_TOKENIZER();
  const TestDir dir;
  const auto files = make_tokenizer((shared_tokenizer() / "encoder.json").string());
  const BpeModel& model = dynamic_cast<const BpeTokenizer&>(*files).model();
  const auto from_json = make_tokenizer(dir.write("tokenizer.json", files->to_json()).string());
  const auto from_ranks = make_tokenizer(dir.write("gpt2.tiktoken", rank_file(model.tokens)).string());
  EXPECT_EQ(from_json->fingerprint(), files->fingerprint());
  EXPECT_EQ(from_ranks->fingerprint(), files->fingerprint());
  for (const auto* tokenizer : {from_json.get(), from_ranks.get()}) {
    EXPECT_EQ(tokenizer->vocab_size(), 50257);
    EXPECT_EQ(tokenizer->eot(), 50256);
    for (uint64_t i = 0; i < 3000; ++i) {
      const std::string text = strange_text(i, true);
      ASSERT_EQ(encoded(*tokenizer, text), encoded(*files, text)) << i;
    }
    const std::string prose = read_text(shared_tokenizer() / "MANIFEST.md");
    EXPECT_EQ(encoded(*tokenizer, prose), encoded(*files, prose));
  }
}

TEST(MakeTokenizer, FindsWhatIsInAFolder) {
  const TestDir dir;
  const std::string merges = "a b\n\u0120 ab\n";
  json vocab = small_json()["model"]["vocab"];
  vocab["<|endoftext|>"] = 258;
  dir.write("all/tokenizer.json", small_json().dump());
  dir.write("openai/encoder.json", vocab.dump());
  dir.write("openai/vocab.bpe", merges);
  dir.write("hf/vocab.json", vocab.dump());
  dir.write("hf/merges.txt", merges);
  dir.write("ranks/gpt2.tiktoken", rank_file(small_as_model().tokens));
  for (const char* name : {"all", "all/tokenizer.json", "openai", "openai/encoder.json", "openai/vocab.bpe",
                           "hf", "hf/vocab.json", "hf/merges.txt", "ranks", "ranks/gpt2.tiktoken"})
    EXPECT_EQ(encoded(*make_tokenizer((dir / name).string()), "x ab"), (std::vector<int32_t>{'x', 257}))
        << name;
  EXPECT_EQ(make_tokenizer((dir / "hf").string())->fingerprint(),
            make_tokenizer((dir / "all").string())->fingerprint());

  const auto error = [&](std::string_view name) {
    return error_of([&] { make_tokenizer((dir / name).string()); });
  };
  dir.write("alone/vocab.json", vocab.dump());
  EXPECT_PRED2(mentions, error("alone/vocab.json"), "needs 'merges.txt' beside it");
  EXPECT_PRED2(mentions, error("alone"), "no tokenizer is in the folder");
  EXPECT_PRED2(mentions, error("nothing"), "no such file is there; understood are bytes, a tokenizer.json");
  dir.write("ranks/r50k_base.tiktoken", "");
  EXPECT_PRED2(mentions, error("ranks"), "has 2 rank files");
  json bad = small_json();
  bad["model"]["merges"] = {"a b", "a b"};
  dir.write("bad/tokenizer.json", bad.dump());
  EXPECT_PRED2(mentions, error("bad"), "bad/tokenizer.json: merge 1 joins");
}

}  // namespace
}  // namespace sps
