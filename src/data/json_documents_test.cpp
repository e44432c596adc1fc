#include "data/json_documents.h"

#include <optional>

#include "base/json.h"
#include "base/rng.h"
#include "base/test_dir.h"

namespace sps {
namespace {

Document parse(const std::string& json, const std::string& text_field = "text",
               const std::string& id_field = "id") {
  Document document{"old text", "default"};
  parse_json_document(json, "x.jsonl:7", text_field, id_field, document);
  return document;
}
std::string text_of(const std::string& json, const std::string& field = "text") {
  return parse(json, field).text;
}
std::string id_of(const std::string& json, const std::string& field = "id") {
  return parse(json, "text", field).id;
}
std::string refused(const std::string& json, const std::string& field = "text") {
  const std::string sentence = error_of([&] { parse(json, field); });
  EXPECT_PRED2(mentions, sentence, "x.jsonl:7");
  return sentence;
}

TEST(JsonDocuments, TakesTheTextAmongOtherFields) {
  EXPECT_EQ(text_of(R"({"text":"a"})"), "a");
  EXPECT_EQ(
      text_of(" { \"n\" : [ 1 , -2.5e+3 , { \"text\" : \"no\" } , [ ] , { } ] ,\t\"text\" : \"a\" , \"z\" : "
              "null , \"t\" : true,\"f\":false } \r\n"),
      "a");
  EXPECT_EQ(text_of(R"({"te\u0078t":"escaped name"})"), "escaped name");
  EXPECT_EQ(text_of(R"({"x":1,"x":2,"text":"others may be repeated"})"), "others may be repeated");
  EXPECT_EQ(text_of(R"({"n":1e99999,"text":"and numbers of any size"})"), "and numbers of any size");
}

TEST(JsonDocuments, Unescapes) {
  EXPECT_EQ(text_of(R"({"text":"\"\\\/\b\f\n\r\t"})"), "\"\\/\b\f\n\r\t");
  EXPECT_EQ(text_of(R"({"text":"\u0041\u00e9\u20AC\ud83d\uDE00\u0000."})"),
            std::string("A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\0.", 12));
  EXPECT_EQ(text_of("{\"text\":\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\x7F\"}"),
            "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\x7F");
  // An escape at every place of a word of eight bytes.
  for (size_t before = 0; before < 20; ++before)
    for (size_t after = 0; after < 20; ++after)
      EXPECT_EQ(text_of("{\"text\":\"" + std::string(before, 'x') + "\\n" + std::string(after, 'y') + "\"}"),
                std::string(before, 'x') + "\n" + std::string(after, 'y'));
}

TEST(JsonDocuments, NullIsAnEmptyText) {
  EXPECT_EQ(text_of(R"({"text":null})"), "");
  EXPECT_EQ(text_of(R"({"text":""})"), "");
  EXPECT_EQ(text_of(R"({"a":null})", "a.b"), "");
}

TEST(JsonDocuments, ADottedFieldIsWithinAnObject) {
  EXPECT_EQ(text_of(R"({"a":{"x":1,"b":"t"},"b":"no"})", "a.b"), "t");
  EXPECT_EQ(text_of(R"({"a.b":"literal"})", "a.b"), "literal");
  EXPECT_EQ(text_of(R"({"a":{"b.c":"t"}})", "a.b.c"), "t");
  EXPECT_EQ(text_of(R"({"a.b":{"c":"t"},"a":{"b":{}}})", "a.b.c"), "t");
  EXPECT_PRED2(mentions, refused(R"({"a":{"b":"1"},"a.b":"2"})", "a.b"), "'a.b' twice");
  EXPECT_PRED2(mentions, refused(R"({"a":"b"})", "a.b"), "no field 'a.b'");
  EXPECT_PRED2(mentions, refused(R"({"a":[{"b":"t"}]})", "a.b"), "no field 'a.b'");
  const Document both = parse(R"({"meta":{"id":5,"text":"t"}})", "meta.text", "meta.id");
  EXPECT_EQ(both.text + both.id, "t5");
}

TEST(JsonDocuments, IdsAreStringsAndWholeNumbers) {
  EXPECT_EQ(id_of(R"({"id":"a\u0062","text":""})"), "ab");
  EXPECT_EQ(id_of(R"({"text":"","id":-12345678901234567890123})"), "-12345678901234567890123");
  for (const char* other : {"null", "true", "1.5", "1e3", "\"\"", "[1]", "{\"id\":1}"})
    EXPECT_EQ(id_of(fmt::format("{{\"text\":\"\",\"id\":{}}}", other)), "default") << other;
  EXPECT_EQ(id_of(R"({"text":"x"})"), "default");
  EXPECT_EQ(id_of(R"({"text":"x","id":1,"url":"u"})", "url"), "u");
  EXPECT_EQ(id_of(R"({"text":"x"})", "text"), "default");  // the text itself is no id
  EXPECT_EQ(id_of(R"({"text":"x","":"y"})", ""), "default");
  EXPECT_PRED2(mentions, refused(R"({"id":1,"text":"x","id":2})"), "'id' twice");
}

TEST(JsonDocuments, SentencesSayWhatIsWrong) {
  EXPECT_PRED2(mentions, refused(R"({"title":1,"content":""})"),
               "no field 'text' (its fields: title, content)");
  EXPECT_PRED2(mentions, refused("{}"), "its fields: none");
  EXPECT_PRED2(mentions, refused(R"({"text":12})"), "'text' should be a string, but it is a JSON number");
  EXPECT_PRED2(mentions, refused(R"({"text":false})"), "boolean");
  EXPECT_PRED2(mentions, refused(R"({"text":{"a":1}})"), "object");
  EXPECT_PRED2(mentions, refused(R"(["text"])"), "a JSON object is expected, but there is a JSON array");
  EXPECT_PRED2(mentions, refused("\"text\""), "JSON string");
  EXPECT_PRED2(mentions, refused(R"({"text":"a","text":"b"})"), "'text' twice");
  EXPECT_PRED2(mentions, refused(R"({"text":"a)"), "a string does not end at byte 11");
  EXPECT_PRED2(mentions, refused(R"({"text":"a"} {})"), "something follows the value at byte 14");
  EXPECT_PRED2(mentions, refused("{\"text\":\"a\nb\"}"), "control character at byte 11");
  EXPECT_PRED2(mentions, refused("{\"text\":\"\xFF\"}"), "not UTF-8 at byte 10");
  EXPECT_PRED2(mentions, refused(R"({"text":"\ud83d"})"), "half a surrogate pair");
  EXPECT_PRED2(mentions, refused(R"({"text":"\udc00"})"), "half a surrogate pair");
  EXPECT_PRED2(mentions, refused(R"({"text":"\x"})"), "unknown escape");
  EXPECT_PRED2(mentions, refused(R"({"text":"\u12g4"})"), "\\u escape");
  EXPECT_PRED2(mentions, refused(R"({"text")"), "the end comes too early");
  std::string many = "{";
  for (int i = 0; i < 1000; ++i) many += fmt::format("\"field{}\":{},", i, i);
  many.back() = '}';
  EXPECT_LT(refused(many).size(), 500u);
}

TEST(JsonDocuments, NestingIsLimited) {
  const auto nested = [](int depth, char open, char close) {
    return "{\"text\":\"x\",\"n\":" + std::string(size_t(depth), open) + std::string(size_t(depth), close) +
           "}";
  };
  EXPECT_EQ(text_of(nested(63, '[', ']')), "x");
  EXPECT_PRED2(mentions, refused(nested(64, '[', ']')), "nested more than 64 levels deep");
  EXPECT_PRED2(mentions, refused("{\"n\":" + std::string(1'000'000, '[')), "nested more than 64 levels deep");
}

// What nlohmann's parser makes of it; nothing where it refuses.
struct Oracle {
  bool valid = false, out_of_range = false, repeated = false;
  nlohmann::json value;
};
Oracle oracle(const std::string& json) {
  Oracle result;
  int texts = 0, ids = 0;
  const auto watch = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    if (event == nlohmann::json::parse_event_t::key && depth == 1) {
      texts += parsed == "text";
      ids += parsed == "id";
    }
    return true;
  };
  try {
    result.value = nlohmann::json::parse(json, watch);
    result.valid = json.find('\0') == std::string::npos && !json.starts_with("\xEF");
  } catch (const nlohmann::json::parse_error&) {
  } catch (const nlohmann::json::out_of_range&) {
    result.out_of_range = true;
  }
  result.repeated = texts > 1 || ids > 1;
  return result;
}

// Random bytes that are often JSON: pieces of it put together, and valid objects with bytes changed.
class Hostile {
 public:
  explicit Hostile(uint64_t i) : rng_(i, "hostile") {}
  std::string object(int depth) {
    std::string all = "{";
    for (uint64_t i = 0, n = below(5); i < n; ++i)
      all += (i ? "," : "") + blank() + key() + blank() + ":" + blank() + value(depth + 1) + blank();
    return all + "}";
  }
  std::string damage(std::string text) {
    for (uint64_t i = 0, n = below(3); i < n; ++i) {
      const size_t at = below(text.size());
      switch (below(4)) {
        case 0:
          text.erase(at, 1 + below(4));
          break;
        case 1:
          text[at] = char(below(256));
          break;
        case 2:
          text.insert(at, 1, "\"\\{}[],:0e-.\x80\xC3 u"[below(16)]);
          break;
        default:
          text.resize(at);
      }
      if (text.empty()) text = "{";
    }
    return text;
  }

 private:
  uint64_t below(uint64_t n) { return rng_.below(n_++, n); }
  std::string blank() { return std::string(below(4) == 0, " \t\n\r"[below(4)]); }
  std::string key() {
    static const char* keys[] = {"\"text\"", "\"id\"", "\"te\\u0078t\"", "\"other\"", "\"\""};
    return below(2) ? keys[below(2)] : keys[below(5)];
  }
  std::string string() {
    static const char* parts[] = {
        "plain words of a text ", "\\n",      "\\\"", "\\u00e9",      "\xC3\xA9",
        "\\ud83d\\ude00",         "\\ud83d",  "\x7F", "\\u0000",      "\xF0\x9F\x98\x80",
        "\xED\xA0\x80",           "\xC0\x80", "a",    "\xE2\x82\xAC", "\\/"};
    std::string all = "\"";
    for (uint64_t i = 0, n = below(6); i < n; ++i) all += parts[below(8) ? below(5) : below(15)];
    return all + "\"";
  }
  std::string value(int depth) {
    static const char* words[] = {"null", "true", "0",  "-1.5E+7", "12345678901234567890123",
                                  "-0",   "01",   "1.", "nul"};
    if (below(2)) return string();
    if (depth > 4 || below(2)) return words[below(6) ? below(6) : below(9)];
    if (below(2)) return object(depth);
    std::string all = "[";
    for (uint64_t i = 0, n = below(4); i < n; ++i) all += (i ? "," : "") + value(depth + 1);
    return all + "]";
  }
  Rng rng_;
  uint64_t n_ = 0;
};

TEST(JsonDocuments, AgreesWithNlohmannOnHostileText) {
  int accepted = 0, refused = 0;
  for (uint64_t i = 0; i < 60'000; ++i) {
    Hostile hostile(i);
    std::string json = hostile.object(0);
    if (i % 2) json = hostile.damage(json);
    const Oracle expected = oracle(json);
    if (expected.out_of_range) continue;
    const bool object = expected.valid && expected.value.is_object();
    const auto text = object ? expected.value.find("text") : expected.value.end();
    const bool good = object && !expected.repeated && text != expected.value.end() &&
                      (text->is_string() || text->is_null());
    std::optional<Document> got;
    try {
      got = parse(json);
    } catch (const Error&) {
    }
    ASSERT_EQ(got.has_value(), good) << i << ": " << json;
    ++(good ? accepted : refused);
    if (!good) continue;
    ASSERT_EQ(got->text, text->is_null() ? "" : text->get<std::string>()) << json;
    const auto id = expected.value.find("id");
    if (id == expected.value.end() || (!id->is_number() && (!id->is_string() || *id == ""))) {
      ASSERT_EQ(got->id, "default") << json;
    } else if (id->is_string()) {
      ASSERT_EQ(got->id, id->get<std::string>()) << json;
    }
  }
  EXPECT_GT(accepted, 5'000);  // the comparison is of both kinds
  EXPECT_GT(refused, 5'000);
}

TEST(JsonDocuments, ChecksUtf8LikeNlohmann) {
  const Rng rng(3, "utf8");
  const auto check = [](const std::string& bytes) {
    const std::string json = "{\"text\":\"" + bytes + "\"}";
    bool good = true;
    try {
      EXPECT_EQ(text_of(json), bytes);
    } catch (const Error&) {
      good = false;
    }
    ASSERT_EQ(good, is_utf8(bytes)) << fmt::format("{:02x}", fmt::join(bytes, " "));
  };
  // Every lead byte with every second byte, then with good and bad tails.
  for (int a = 0x80; a < 0x100; ++a)
    for (int b = 0x70; b < 0xD0; ++b)
      for (const char* tail : {"", "\x80", "\x80\x80", "\xBF\xBF", "\x80\xC0"})
        check(std::string{char(a), char(b)} + tail);
}

}  // namespace
}  // namespace sps
