#include "tokenizer/score_bpe.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/files.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/test_dir.h"
#include "tokenizer/load_score_bpe.h"
#include "tokenizer/load_sentencepiece.h"
#include "tokenizer/stream_decoder.h"
#include "tokenizer/test_models.h"
#include "tokenizer/test_score_bpe.h"
#include "tokenizer/utf8.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using Kind = ScoredPiece::Kind;

std::vector<std::string> pieces(const ScoreBpeTokenizer& tokenizer, std::string_view text) {
  std::vector<std::string> texts;
  for (const int32_t id : encoded(tokenizer, text))
    texts.push_back(tokenizer.model().pieces[size_t(id)].text);
  return texts;
}

// The definition, with every pair looked at again after each joining.
std::vector<int32_t> joined_naively(const ScoreBpeModel& model, std::string_view text) {
  const auto find = [&](std::string_view piece) {
    for (size_t id = 0; id < model.pieces.size(); ++id)
      if (model.pieces[id].kind == Kind::text && model.pieces[id].text == piece) return int32_t(id);
    return -1;
  };
  if (text.empty()) return {};
  const std::string spaced = " " + std::string(text);
  std::vector<int32_t> ids;
  std::vector<std::string> texts;  // empty: a byte
  for (const char *p = spaced.data(), *end = p + spaced.size(); p != end;) {
    const Utf8Char c = read_utf8(p, end);
    const std::string piece(p, size_t(c.length));
    const int32_t id = c.state == Utf8::valid ? find(piece) : -1;
    if (id >= 0) ids.push_back(id), texts.push_back(piece);
    for (const char byte : id < 0 ? piece : "")
      ids.push_back(3 + static_cast<unsigned char>(byte)), texts.emplace_back();
    p += c.length;
  }
  for (;;) {
    float best = -std::numeric_limits<float>::infinity();
    size_t at = 0;
    int32_t joined = -1;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      if (texts[i].empty() || texts[i + 1].empty()) continue;
      const int32_t id = find(texts[i] + texts[i + 1]);
      if (id >= 0 && model.pieces[size_t(id)].score > best)
        best = model.pieces[size_t(id)].score, at = i, joined = id;
    }
    if (joined < 0) return ids;
    ids[at] = joined;
    texts[at] += texts[at + 1];
    ids.erase(ids.begin() + std::ptrdiff_t(at) + 1);
    texts.erase(texts.begin() + std::ptrdiff_t(at) + 1);
  }
}

TEST(ScoreBpe, JoinsTheHighestScoreFirstAndTheLeftmostOfEqualOnes) {
  const ScoreBpeTokenizer tokenizer(small_score_bpe());
  using Texts = std::vector<std::string>;
  EXPECT_EQ(pieces(tokenizer, "the"), (Texts{" the"}));
  EXPECT_EQ(pieces(tokenizer, "thing"), (Texts{" th", "ing"}));
  EXPECT_EQ(pieces(tokenizer, " the"), (Texts{" ", " the"}));
  EXPECT_EQ(pieces(tokenizer, "aaaa"), (Texts{" ", "aaa", "a"}));
  EXPECT_EQ(pieces(tokenizer, "aaaaa"), (Texts{" ", "aaa", "aa"}));
  EXPECT_EQ(pieces(tokenizer, "日本é€"),
            (Texts{" ", "日", "<0xE6>", "<0x9C>", "<0xAC>", "é", "<0xE2>", "<0x82>", "<0xAC>"}));
  EXPECT_EQ(pieces(tokenizer, ""), Texts{});
  // Names of bytes and control ids are text like any other.
  EXPECT_EQ(tokenizer.decode(encoded(tokenizer, "<0x0A>\n<s>\n")), "<0x0A>\n<s>\n");
  EXPECT_EQ(tokenizer.name(), "score-bpe-281");
  EXPECT_EQ(tokenizer.vocab_size(), 281);
  EXPECT_EQ(tokenizer.eot(), 1);
  EXPECT_EQ(tokenizer.bos(), 1);
}

TEST(ScoreBpe, IsWhatTheDefinitionSaysAndDecodesToTheText) {
  const ScoreBpeTokenizer tokenizer(small_score_bpe());
  for (uint64_t i = 0; i < 600; ++i) {
    std::string text = strange_text(i, i % 2 == 0);
    constexpr std::string_view kLetters[] = {"t", "h", "e", " ", "i", "n", "g", "a", "\n", "日", "本", "é"};
    const Rng rng(i, "letters");
    for (uint64_t k = 0; k < 60; ++k) text += kLetters[rng.below(k, std::size(kLetters))];
    const auto ids = encoded(tokenizer, text);
    ASSERT_EQ(ids, joined_naively(tokenizer.model(), text)) << text;
    ASSERT_EQ(tokenizer.decode(ids), text);
    std::vector<int32_t> parts;
    tokenizer.encode_in_parts(
        text, [&](std::span<const int32_t> part) { parts.insert(parts.end(), part.begin(), part.end()); });
    ASSERT_EQ(parts, ids);
  }
  std::vector<int32_t> parts;
  const std::string text(100000, 't');
  size_t calls = 0;
  tokenizer.encode_in_parts(text, [&](std::span<const int32_t> part) {
    parts.insert(parts.end(), part.begin(), part.end());
    ++calls;
  });
  EXPECT_EQ(tokenizer.decode(parts), text);
  EXPECT_GT(calls, 5u);
}

TEST(ScoreBpe, OneSpaceGoesAtTheBeginningOfATextAlone) {
  const ScoreBpeTokenizer tokenizer(small_score_bpe());
  const int32_t the = encoded(tokenizer, "the")[0], space = encoded(tokenizer, " the")[0];
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{the, the}), "the the");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{1, the, 1, the, the}), "thethe the");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{space, the}), " the");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{3 + ' ', the}), " the");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{-1, 0, 2, 9999, the}), "the");
  EXPECT_EQ(StreamDecoder(tokenizer).feed(the), "the");
  EXPECT_EQ(StreamDecoder(tokenizer, 1).feed(the), "the");
  EXPECT_EQ(StreamDecoder(tokenizer, the).feed(the), " the");
}

TEST(ScoreBpe, BytesOfACharacterComeOutTogether) {
  const ScoreBpeTokenizer tokenizer(small_score_bpe());
  StreamDecoder decoder(tokenizer);
  std::vector<std::string> shown;
  for (const int32_t id : encoded(tokenizer, "t€")) shown.push_back(decoder.feed(id));
  EXPECT_EQ(shown, (std::vector<std::string>{"t", "", "", "€"}));
}

TEST(ScoreBpe, ItsFilesSayTheSame) {
  const TestDir dir;
  const ScoreBpeModel model = small_score_bpe();
  const ScoreBpeTokenizer tokenizer(model);
  const std::string file = llama2c_tokenizer_file(model), json = tokenizer.to_json();
  EXPECT_EQ(parse_llama2c_tokenizer(file, "x"), model);
  EXPECT_EQ(parse_score_bpe_json(json, "x"), model);
  EXPECT_TRUE(is_score_bpe_json(json));
  EXPECT_FALSE(is_score_bpe_json("{\"model\": {\"type\": \"BPE\"}}"));
  dir.write("a/tokenizer.json", json);
  dir.write("b/tokenizer.bin", file);
  dir.write("tok.bin", file);
  for (const fs::path& path : {dir / "a", dir / "a/tokenizer.json", dir / "b", dir / "tok.bin"}) {
    const auto read = make_tokenizer(path.string());
    EXPECT_EQ(read->fingerprint(), tokenizer.fingerprint());
    EXPECT_EQ(read->to_json(), json);
  }
  EXPECT_EQ(make_tokenizer((dir / "tok.bin").string(), {.eot_id = 2})->eot(), 2);
  EXPECT_EQ(make_tokenizer((dir / "tok.bin").string(), {.eot = "\n</s>\n"})->eot(), 2);
  ScoreBpeModel other = model;
  other.pieces[260].score = -2.5F;
  EXPECT_NE(ScoreBpeTokenizer(other).fingerprint(), tokenizer.fingerprint());
}

TEST(ScoreBpe, SentencepiecesFileSaysTheSame) {
  const TestDir dir;
  ScoreBpeModel model = small_score_bpe();
  model.eot = 2;
  const std::string file = sentencepiece_file(model);
  EXPECT_TRUE(is_sentencepiece(file));
  EXPECT_EQ(parse_sentencepiece(file, "x"), model);
  dir.write("a/tokenizer.model", file);
  for (const fs::path& path : {dir / "a", dir / "a/tokenizer.model"})
    EXPECT_EQ(make_tokenizer(path.string())->fingerprint(), ScoreBpeTokenizer(model).fingerprint());
  EXPECT_EQ(make_tokenizer((dir / "a").string(), {.eot_id = 1})->eot(), 1);
  model.bos = -1;
  EXPECT_EQ(parse_sentencepiece(sentencepiece_file(model), "x").bos, -1);
}

TEST(ScoreBpeFaults, ModelsOfSentencepieceThatAreNotSupported) {
  const ScoreBpeModel model = small_score_bpe();
  const auto error = [](const std::string& bytes) {
    return error_of([&] { parse_sentencepiece(bytes, "t.model"); });
  };
  EXPECT_PRED2(mentions, error(sentencepiece_file(model, 1)), "no BPE");
  EXPECT_PRED2(mentions, error(sentencepiece_file(model, 2, {true, true, false})), "normalises");
  EXPECT_PRED2(mentions, error(sentencepiece_file(model, 2, {false, false, false})), "no space before");
  EXPECT_PRED2(mentions, error(sentencepiece_file(model, 2, {false, true, true})), "removes spaces");
  std::string bad = sentencepiece_file(model);
  bad.replace(bad.find("<unk>") + 5 + 5, 2, "\x18\x04");  // the type of the first piece
  EXPECT_PRED2(mentions, error(bad), "piece 0 is user-defined");
  const std::string good = sentencepiece_file(model);
  size_t refused = 0;
  for (size_t size = 0; size < good.size(); ++size)
    refused += mentions(error(good.substr(0, size)), "t.model");
  EXPECT_EQ(refused, good.size());
  EXPECT_PRED2(mentions, error(std::string("\x0A\x02\x0B\x00", 4)), "damaged");  // a group, which nobody writes
  EXPECT_PRED2(mentions, error("\x08\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01"), "damaged");
  EXPECT_PRED2(mentions, error(std::string("\x0A\x02\x10\x01", 4)), "damaged");  // a score that is a number
}

TEST(ScoreBpe, TheDocumentedFilesAreWhatIsWritten) {
  const std::string page = read_text(fs::path(SPS_SOURCE_DIR) / "docs/formats/tokenizer.md");
  const std::string json = ScoreBpeTokenizer(small_score_bpe()).to_json();
  EXPECT_PRED2(mentions, page, json.substr(0, json.find("\"<0x01>\"") - 5));
}

TEST(ScoreBpeFaults, DamagedFilesOfLlama2cAreNamed) {
  const std::string good = llama2c_tokenizer_file(small_score_bpe());
  const auto error = [](const std::string& bytes) {
    return error_of([&] { ScoreBpeTokenizer(parse_llama2c_tokenizer(bytes, "t.bin")); });
  };
  // Every cut is an error but those behind a whole piece, and of these only where all bytes have one.
  size_t accepted = 0;
  for (size_t size = 0; size < good.size(); ++size) {
    try {
      const ScoreBpeTokenizer cut(parse_llama2c_tokenizer(good.substr(0, size), "t.bin"));
      ++accepted;
    } catch (const Error& e) {
      ASSERT_FALSE(std::string(e.what()).empty());
    }
  }
  EXPECT_EQ(accepted, 22u);  // after the bytes, and after each of the 22 pieces but the last
  EXPECT_PRED2(mentions, error(good.substr(0, good.size() - 1)), "t.bin");
  EXPECT_PRED2(mentions, error(""), "0 bytes");
  std::string bad = good;
  bad[0] = 3;
  EXPECT_PRED2(mentions, error(bad), "said to have 3");
  bad = good;
  bad[4 + 4 + 3] = char(0x80);  // the first length is negative
  EXPECT_PRED2(mentions, error(bad), "piece 0");
  bad = good;
  const size_t at = bad.find("<0x41>");
  bad[at + 3] = '5';
  EXPECT_PRED2(mentions, error(bad), "<0x41>");
  EXPECT_PRED2(mentions, error_of([&] { parse_llama2c_tokenizer(good, "t.bin", {.eot = "the"}); }), "'the'");
  EXPECT_PRED2(mentions, error_of([&] { parse_llama2c_tokenizer(good, "t.bin", {.pattern = "x"}); }),
               "pattern");
}

TEST(ScoreBpeFaults, ModelsThatContradictThemselvesAreRefused) {
  const auto error = [](auto&& change) {
    ScoreBpeModel model = small_score_bpe();
    change(model);
    return error_of([&] { ScoreBpeTokenizer t(model); });
  };
  EXPECT_PRED2(mentions,
               error([](auto& m) { m.pieces[260].score = std::numeric_limits<float>::quiet_NaN(); }),
               "piece 260");
  EXPECT_PRED2(mentions, error([](auto& m) { m.pieces[261].text = "\xFF"; }), "piece 261");
  EXPECT_PRED2(mentions, error([](auto& m) { m.pieces[68].kind = Kind::text; }), "<0x41>");
  EXPECT_PRED2(mentions, error([](auto& m) { m.pieces[68].text = "<0x4G>"; }), "<0x4G>");
  EXPECT_PRED2(mentions, error([](auto& m) { m.eot = 260; }), "260");
  EXPECT_PRED2(mentions, error([](auto& m) { m.eot = 9999; }), "9999");
  EXPECT_PRED2(mentions, error([](auto& m) { m.bos = 7; }), "begin of text");
}

TEST(ScoreBpeFaults, WrongJsonIsNamed) {
  const nlohmann::json good = parse_json(ScoreBpeTokenizer(small_score_bpe()).to_json(), "x");
  const auto error = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json bad = good;
    bad[key] = value;
    return error_of([&] { ScoreBpeTokenizer t(parse_score_bpe_json(bad.dump(), "t.json")); });
  };
  EXPECT_PRED2(mentions, error("version", 2), "version 2");
  EXPECT_PRED2(mentions, error("format", "other"), "other");
  EXPECT_PRED2(mentions, error("eot", 1.5), "1.5");
  EXPECT_PRED2(mentions, error("bos", -2), "-2");
  EXPECT_PRED2(mentions, error("pieces", 3), "pieces");
  for (const nlohmann::json& row :
       {nlohmann::json{"a"}, nlohmann::json{"a", "b"}, nlohmann::json{1, 2}, nlohmann::json{"a", 1, "x"}})
    EXPECT_PRED2(mentions, error("pieces", nlohmann::json::array({row})), "piece 0");
  nlohmann::json without = good;
  without.erase("eot");
  EXPECT_PRED2(mentions, error_of([&] { parse_score_bpe_json(without.dump(), "t.json"); }), "'eot'");
}

}  // namespace
}  // namespace sps
