#include "data/documents.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/test_dir.h"
#include "base/test_memory.h"
#include "data/test_packing.h"

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

// Standard input comes from a file while this lives.
class StandardInput {
 public:
  explicit StandardInput(const fs::path& file) : saved_(::dup(STDIN_FILENO)) {
    const int fd = ::open(file.c_str(), O_RDONLY);
    SPS_CHECK(fd >= 0 && ::dup2(fd, STDIN_FILENO) == STDIN_FILENO);
    ::close(fd);
  }
  ~StandardInput() {
    ::dup2(saved_, STDIN_FILENO);
    ::close(saved_);
  }

 private:
  int saved_;
};

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
  dir.write("c/m.NDJSON", "{\"text\":\"6\"}\n");
  dir.write("c/n.json", "[{\"text\":\"7\"}]");
  dir.write("c/o.json.gz", gzip("{\"text\":\"8\"}\n"));
  dir.write("c/p.jsonl.zst", zstd("{\"text\":\"9\"}\n"));
  dir.write("c/q.txt.gz", gzip("10"));
  dir.write("c/skip.gz", gzip("no"));
  dir.write("c/skip.py.gz", gzip("no"));
  dir.write("c/skip.py", "no");
  dir.write("c/.hidden.txt", "no");
  dir.write("c/.git/x.txt", "no");
  fs::create_symlink("nowhere.txt", dir / "c/dangling.txt");
  EXPECT_EQ(read_all({dir / "c"}), (Pairs{{"a.rst", "4"},
                                          {"b.TXT", "3"},
                                          {"b/y.md", "2"},
                                          {"l.jsonl:1", "5"},
                                          {"m.NDJSON:1", "6"},
                                          {"n.json:1", "7"},
                                          {"o.json.gz:1", "8"},
                                          {"p.jsonl.zst:1", "9"},
                                          {"q.txt.gz", "10"},
                                          {"z.txt", "1"}}));
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
  dir.write("c.jsonl", "\xEF\xBB\xBF{\"text\":\"\"}\n{\"text\":\"x\"}\n{\"text\":null}\n");
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
  EXPECT_PRED2(mentions, error_in("{\"title\":\"t\",\"content\":\"c\"}"), "title, content");
  EXPECT_PRED2(mentions, error_in("{\"text\":\"c\"}", "body"), "'body'");
  EXPECT_PRED2(mentions, error_in("{\"text\":12}"), "number");
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
  EXPECT_PRED2(mentions, error_of([&] { read_all({dir.write("x.jsonl", "PK\x03\x04")}); }), "unpack");
}

TEST(DocumentReader, PackedFilesAreReadLikeOthers) {
  const TestDir dir;
  const std::string lines = "{\"text\":\"one\"}\n{\"text\":\"two\"}";
  const std::string array = " [ {\"text\":\"one\"},\n{\"text\":\"two\"} ]\n";
  for (const auto& pack : {gzip, zstd, +[](std::string_view text) { return std::string(text); }})
    for (const char* suffix : {"", ".gz", ".zst"}) {
      for (const char* name : {"a.jsonl", "a.ndjson", "a.json", "A.JSONL"}) {
        const std::string file = dir.write(std::string(name) + suffix, pack(lines));
        EXPECT_EQ(read_all({file}), (Pairs{{file + ":1", "one"}, {file + ":2", "two"}}));
      }
      const std::string file = dir.write(std::string("b.json") + suffix, pack("\xEF\xBB\xBF" + array));
      EXPECT_EQ(read_all({file}), (Pairs{{file + ":1", "one"}, {file + ":2", "two"}}));
      const std::string text = dir.write(std::string("c.txt") + suffix, pack("\xEF\xBB\xBFtext"));
      if (*suffix == '\0' || pack("") != "")
        EXPECT_EQ(read_all({text}), (Pairs{{text, "text"}}));
      else
        EXPECT_PRED2(mentions, error_of([&] { read_all({text}); }),
                     "does not begin like a " + std::string(suffix));
    }
}

TEST(DocumentReader, ArraysAreReadElementByElement) {
  const TestDir dir;
  const std::string tricky = R"({"x":["]}",{"y":"\\\"}"}],"text":"[{\"}\\"})";
  const std::string file = dir.write("a.json", "[" + tricky + " ,{\"id\":7,\"text\":\"b\"}]");
  EXPECT_EQ(read_all({file}), (Pairs{{file + ":1", "[{\"}\\"}, {"7", "b"}}));
  EXPECT_EQ(read_all({dir.write("a.json", "[]")}), Pairs());
  EXPECT_EQ(read_all({dir.write("a.json", "\n [ ] ")}), Pairs());
  EXPECT_EQ(read_all({dir.write("a.json", "")}), Pairs());
  const auto error_in = [&](const std::string& json) {
    const std::string sentence = error_of([&] { read_all({dir.write("a.json", json)}); });
    EXPECT_PRED2(mentions, sentence, file);
    return sentence;
  };
  const std::string good = "{\"text\":\"a\"}";
  EXPECT_PRED2(mentions, error_in("["), "not closed after element 0");
  EXPECT_PRED2(mentions, error_in("[" + good), "not closed after element 1");
  EXPECT_PRED2(mentions, error_in("[" + good + ","), "not closed after element 1");
  EXPECT_PRED2(mentions, error_in("[" + good + ",{\"text\":\"]}"), "not closed after element 1");
  EXPECT_PRED2(mentions, error_in("[" + good + good + "]"), "comma or ]");
  EXPECT_PRED2(mentions, error_in("[" + good + ",]"), "element 2: a JSON object is expected");
  EXPECT_PRED2(mentions, error_in("[" + good + ",\"text\"]"), "element 2: a JSON object is expected");
  EXPECT_PRED2(mentions, error_in("[," + good + "]"), "element 1: a JSON object is expected");
  EXPECT_PRED2(mentions, error_in("[" + good + "]]"), "something follows the array");
  EXPECT_PRED2(mentions, error_in("[" + good + ",{\"text\":1}]"), "element 2: the field 'text'");
  EXPECT_PRED2(mentions, error_in("[{\"text\":\"a\"]]"), "element 1 is not valid JSON");
}

TEST(DocumentReader, PlainTextKeepsItsBytes) {
  const TestDir dir;
  const std::string bytes("\xFF\xFE\0a\r\n\x80 {\"text\"", 15);
  const std::string file = dir.write("a.txt", bytes);
  EXPECT_EQ(read_all({file}), (Pairs{{file, bytes}}));
}

TEST(DocumentReader, ReadsStandardInput) {
  const TestDir dir;
  const auto from = [&](const std::string& bytes, InputFormat format = InputFormat::automatic) {
    const StandardInput input(dir.write("in", bytes));
    DocumentReader reader({"-", "-"}, ReaderOptions{.format = format});
    const Pairs all = read_all(reader);
    EXPECT_EQ(reader.bytes_read(), bytes.size());
    EXPECT_EQ(reader.total_bytes(), bytes.size());
    return all;
  };
  const std::string lines = "\n{\"text\":\"one\"}\n{\"text\":\"two\"}\n";
  const Pairs both = {{"stdin:2", "one"}, {"stdin:3", "two"}};
  EXPECT_EQ(from(lines), both);
  EXPECT_EQ(from(gzip(lines)), both);
  EXPECT_EQ(from(zstd(lines)), both);
  EXPECT_EQ(from("[ {\"text\":\"one\"}]"), (Pairs{{"stdin:1", "one"}}));
  EXPECT_EQ(from("[1] Prose.\n"), (Pairs{{"stdin", "[1] Prose.\n"}}));
  EXPECT_EQ(from("Prose.\n"), (Pairs{{"stdin", "Prose.\n"}}));
  EXPECT_EQ(from(lines, InputFormat::text), (Pairs{{"stdin", lines}}));
  EXPECT_EQ(from("[]", InputFormat::json), Pairs());
  EXPECT_EQ(from(""), Pairs());
  EXPECT_PRED2(mentions, error_of([&] { from("Prose.\n", InputFormat::json); }), "standard input:1");
  EXPECT_PRED2(mentions, error_of([&] { from("{\"text\":1}"); }), "standard input:1");
  EXPECT_PRED2(mentions, error_of([&] { from("PAR1\x15"); }), "standard input is a Parquet file");
}

TEST(DocumentReader, StandardInputMayBeAPipe) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::write(ends[1], "{\"text\":\"x\"}\n", 13), 13);
  ::close(ends[1]);
  const StandardInput input(fmt::format("/proc/self/fd/{}", ends[0]));
  DocumentReader reader({"-"});
  EXPECT_TRUE(reader.input_files().front().standard_input());
  EXPECT_EQ(reader.total_bytes(), 0u);
  EXPECT_EQ(read_all(reader), (Pairs{{"stdin:1", "x"}}));
  EXPECT_EQ(reader.bytes_read(), 13u);
  ::close(ends[0]);
}

TEST(DocumentReader, ListsItsFiles) {
  const TestDir dir;
  const fs::path file = dir.write("d/a.txt", "12345");
  fs::last_write_time(file, fs::file_time_type::clock::now() - std::chrono::hours(10));
  const DocumentReader reader({dir / "d"});
  ASSERT_EQ(reader.input_files().size(), 1u);
  const InputFile& listed = reader.input_files().front();
  EXPECT_EQ(listed.path, file);
  EXPECT_EQ(listed.id, "a.txt");
  EXPECT_EQ(listed.size, 5u);
  const int64_t now = int64_t(::time(nullptr)) * 1'000'000'000, hour = 3'600'000'000'000;
  EXPECT_GT(listed.modified, now - 11 * hour);
  EXPECT_LT(listed.modified, now - 9 * hour);
}

TEST(DocumentReader, GoesOnFromEveryPosition) {
  const TestDir dir;
  dir.write("d/a.txt", "plain");
  dir.write("d/b.jsonl.gz", gzip("\n{\"text\":\"1\"}\n \n{\"text\":\"\"}\n{\"text\":\"3\"}\n"));
  dir.write("d/c.json", "[{\"text\":\"4\"},{\"text\":\"5\",\"id\":\"five\"}]");
  dir.write("d/d.jsonl", "");
  dir.write("d/e.txt.zst", zstd("last"));
  const std::vector<std::string> inputs = {dir / "d"};
  struct Step {
    ReaderPosition position;
    std::string id, text;
    uint64_t bytes;
  };
  std::vector<Step> steps;
  DocumentReader reader(inputs);
  EXPECT_EQ(reader.position(), ReaderPosition());
  RawDocument raw;
  Document document;
  for (;;) {
    const ReaderPosition position = reader.position();
    if (!reader.next_raw(raw)) break;
    reader.parse(raw, document);
    steps.push_back({position, document.id, document.text, reader.bytes_read()});
  }
  const ReaderPosition end = reader.position();
  ASSERT_EQ(steps.size(), 7u);
  EXPECT_EQ(steps[4].text, "4");
  for (size_t i = 0; i <= steps.size(); ++i) {
    DocumentReader again(inputs);
    again.seek(i < steps.size() ? steps[i].position : end);
    for (size_t j = i; j < steps.size(); ++j) {
      ASSERT_TRUE(again.next_raw(raw));
      again.parse(raw, document);
      EXPECT_EQ(document.id, steps[j].id);
      EXPECT_EQ(document.text, steps[j].text);
      EXPECT_EQ(again.bytes_read(), steps[j].bytes);
    }
    EXPECT_FALSE(again.next_raw(raw));
    EXPECT_EQ(again.bytes_read(), again.total_bytes());
  }
  // In two goes, and to the end of a file written as its last record.
  DocumentReader twice(inputs);
  twice.seek({1, 1});
  twice.seek({1, 3});
  ASSERT_TRUE(twice.next_raw(raw));
  EXPECT_EQ(raw.id, "c.json:1");
  EXPECT_PRED2(mentions, error_of([&] { DocumentReader(inputs).seek({1, 4}); }), "b.jsonl.gz has 3 records");
  EXPECT_PRED2(mentions, error_of([&] { DocumentReader(inputs).seek({6, 0}); }), "5 inputs");
}

TEST(DocumentReader, SeekDoesNotParse) {
  const TestDir dir;
  const std::string file = dir.write("a.jsonl", "not JSON\n{\"text\":\"x\"}\n");
  DocumentReader reader({file});
  reader.seek({0, 1});
  EXPECT_EQ(read_all(reader), (Pairs{{file + ":2", "x"}}));
}

TEST(DocumentReader, ALongDocumentIsReadAndATooLongOneIsNot) {
  const TestDir dir;
  const std::string text(size_t{100} << 20, 'x');
  const std::string line = "{\"text\":\"" + text + "\"}\n";
  const std::string files[] = {dir.write("a.txt.gz", repeat(gzip(text.substr(0, 10 << 20)), 10)),
                               dir.write("b.jsonl", line), dir.write("c.json", "[" + line + "]")};
  for (const std::string& file : files) {
    DocumentReader reader({file});
    Document document;
    ASSERT_TRUE(reader.next(document));
    EXPECT_TRUE(document.text == text) << file;
    DocumentReader limited({file}, ReaderOptions{.max_document_bytes = 1'000'000});
    const uint64_t grown = memory_growth([&] {
      const std::string sentence = error_of([&] { limited.next(document); });
      EXPECT_PRED2(mentions, sentence, file);
      EXPECT_PRED2(mentions, sentence, "longer than 977 KiB");
    });
    EXPECT_LT(grown, uint64_t{8} << 20);
  }
}

TEST(DocumentReader, ALineOfNoiseDoesNotFillTheMemory) {
  const TestDir dir;
  for (const char c : {'\0', ' ', 'x', '['}) {
    const std::string zipped = gzip(std::string(size_t{16} << 20, c));
    const std::string file = dir.write("a.jsonl.gz", repeat(zipped, c == '\0' ? 128 : 4));  // two gigabytes
    const uint64_t grown = memory_growth([&] {
      const std::string sentence = error_of([&] { read_all({file}); });
      EXPECT_PRED2(mentions, sentence, file + ":1 is longer than 1.00 MiB and does not begin with {");
    });
    EXPECT_LT(grown, uint64_t{16} << 20);
  }
}

TEST(DocumentReader, MemoryDoesNotGrowWithTheCorpus) {
  const TestDir dir;
  const std::string line = "{\"text\":\"" + std::string(4'000, 'x') + "\"}\n";
  const std::string lines = repeat(line, 1'000);
  dir.write("a.jsonl.gz", repeat(gzip(lines), 25));
  dir.write("b.json.zst", zstd("[") + repeat(zstd(repeat(line + ",", 1'000)), 25) + zstd(line + "]"));
  DocumentReader reader({dir.path()});
  uint64_t bytes = 0;
  const uint64_t grown = memory_growth([&] {
    for (Document document; reader.next(document);) bytes += document.text.size();
  });
  EXPECT_EQ(bytes, 4'000u * 50'001);
  EXPECT_LT(grown, uint64_t{24} << 20);
}

}  // namespace
}  // namespace sps
