#include "data/documents.h"

#include <fstream>

#include "base/test_dir.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using Pairs = std::vector<std::pair<std::string, std::string>>;

Pairs read_all(DocumentReader& reader) {
  Pairs all;
  for (Document d; reader.next(d);) all.emplace_back(d.id, d.text);
  return all;
}
Pairs read_all(const std::vector<std::string>& inputs, const std::string& field = "text") {
  DocumentReader reader(inputs, field);
  return read_all(reader);
}

TEST(DocumentReader, AFileIsADocumentAndALineOfJsonlIsOne) {
  const TestDir dir;
  const std::string text = dir.write("a.txt", "one\ntwo\n"), other = dir.write("notes.log", "three"),
                    lines = dir.write("b.jsonl",
                                      "{\"text\": \"four\"}\n\n  \t\r\n"
                                      "{\"id\": \"doc-5\", \"text\": \"fi\\u0076e\\n\", \"n\": [1]}\r\n"
                                      "{\"id\": 6, \"text\": \"six\"}");  // no last newline
  EXPECT_EQ(read_all({text, other, lines}), (Pairs{{text, "one\ntwo\n"},
                                                   {other, "three"},
                                                   {lines + ":1", "four"},
                                                   {"doc-5", "five\n"},
                                                   {"6", "six"}}));
  EXPECT_EQ(read_all({lines, text}).front().second, "four");  // inputs keep their order
}

TEST(DocumentReader, AFolderIsReadInTheOrderOfItsPaths) {
  const TestDir dir;
  dir.write("c/z.txt", "1");
  dir.write("c/b/y.md", "2");
  dir.write("c/b.TXT", "3");
  dir.write("c/a.rst", "4");
  dir.write("c/l.jsonl", "{\"text\":\"5\"}\n");
  dir.write("c/skip.py", "no");
  dir.write("c/.hidden.txt", "no");
  dir.write("c/.git/x.txt", "no");
  fs::create_symlink("nowhere.txt", dir / "c/dangling.txt");
  EXPECT_EQ(read_all({dir / "c"}),
            (Pairs{{"a.rst", "4"}, {"b.TXT", "3"}, {"b/y.md", "2"}, {"l.jsonl:1", "5"}, {"z.txt", "1"}}));
}

TEST(DocumentReader, PatternsMatchInOrderAndAFileIsReadOnce) {
  const TestDir dir;
  for (const char* name : {"a10", "a9", "a1", "b"}) dir.write(std::string(name) + ".txt", name);
  const auto texts = [](const Pairs& pairs) {
    std::string all;
    for (const auto& [id, text] : pairs) all += text + " ";
    return all;
  };
  EXPECT_EQ(texts(read_all({dir / "a*.txt"})), "a1 a10 a9 ");
  EXPECT_EQ(texts(read_all({dir / "b.txt", dir / "?.txt", dir.path(), dir / "./b.txt"})), "b a1 a10 a9 ");
  dir.write("[x]*.txt", "star");
  EXPECT_EQ(texts(read_all({dir / "[x]*.txt"})), "star ");  // a file of just this name
}

TEST(DocumentReader, EmptyDocumentsAreSkippedAndCounted) {
  const TestDir dir;
  dir.write("a.txt", "");
  dir.write("b.txt", "\xEF\xBB\xBF");  // nothing but a byte order mark
  dir.write("c.jsonl", "\xEF\xBB\xBF{\"text\":\"\"}\n{\"text\":\"x\"}\n{\"text\":\"\"}\n");
  dir.write("d.jsonl", "");
  dir.write("e.txt", "\xEF\xBB\xBFy");
  DocumentReader reader({dir.path()});
  EXPECT_EQ(read_all(reader), (Pairs{{"c.jsonl:2", "x"}, {"e.txt", "y"}}));
  EXPECT_EQ(reader.empty_documents(), 4u);
  EXPECT_EQ(reader.files(), 5u);
  EXPECT_EQ(reader.bytes_read(), reader.total_bytes());
}

TEST(DocumentReader, ErrorsNameTheFileAndTheLine) {
  const TestDir dir;
  const auto error_in = [&](std::string_view line, const std::string& field = "text") {
    const std::string file =
        dir.write("x.jsonl", "{\"text\":\"fine\",\"body\":\"b\"}\n\n" + std::string(line) + "\n");
    const std::string sentence = error_of([&] { read_all({file}, field); });
    EXPECT_PRED2(mentions, sentence, file + ":3");
    return sentence;
  };
  EXPECT_PRED2(mentions, error_in("{\"title\":\"t\",\"content\":\"c\"}"), "no field 'text'");
  EXPECT_PRED2(mentions, error_in("{\"title\":\"t\",\"content\":\"c\"}"), "content, title");
  EXPECT_PRED2(mentions, error_in("{\"text\":\"c\"}", "body"), "'body'");
  EXPECT_PRED2(mentions, error_in("{\"text\":12}"), "number");
  EXPECT_PRED2(mentions, error_in("{\"text\":null}"), "null");
  EXPECT_PRED2(mentions, error_in("[\"text\"]"), "array");
  EXPECT_PRED2(mentions, error_in("{\"text\":\"a"), "not valid JSON");
  EXPECT_PRED2(mentions, error_in("{\"text\":\"a\"} {\"text\":\"b\"}"), "not valid JSON");
  EXPECT_PRED2(mentions, error_in("{\"text\":\"\xFF\"}"), "not valid JSON");
  EXPECT_PRED2(mentions, error_in("{\"text\":\"\\ud800\"}"), "not valid JSON");
}

TEST(DocumentReader, ReadsAnotherFieldEvenTheId) {
  const TestDir dir;
  const std::string file = dir.write("x.jsonl", "{\"text\":\"t\",\"body\":\"b\",\"id\":\"i\"}\n");
  EXPECT_EQ(read_all({file}, "body"), (Pairs{{"i", "b"}}));
  EXPECT_EQ(read_all({file}, "id"), (Pairs{{file + ":1", "i"}}));
}

TEST(DocumentReader, InputsThatGiveNothingAreErrors) {
  const TestDir dir;
  fs::create_directory(dir / "empty");
  for (const char* input : {"none.txt", "none/*.txt", "empty"})
    EXPECT_PRED2(mentions, error_of([&] { read_all({dir / input}); }), (dir / input).string());
  EXPECT_PRED2(mentions, error_of([&] { read_all({}); }), "no input");
  EXPECT_PRED2(mentions, error_of([&] { read_all({"/dev/null"}); }), "/dev/null");
  for (const char* head : {"\x1F\x8B", "\x28\xB5\x2F\xFD", "PAR1"})
    for (const char* name : {"x.gz", "x.jsonl"})
      EXPECT_PRED2(mentions, error_of([&] { read_all({dir.write(name, head)}); }), "unpack");
}

}  // namespace
}  // namespace sps
