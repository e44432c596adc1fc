// The files are written by pyarrow where CMake found a Python that has it.
#include "data/parquet_documents.h"

#include <cstdlib>

#include "base/files.h"
#include "base/rng.h"
#include "base/test_dir.h"
#include "base/test_memory.h"
#include "data/documents.h"
#include "data/test_packing.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using Pairs = std::vector<std::pair<std::string, std::string>>;

// Row i has this text; some are null, some empty.
constexpr const char* kScript = R"(
import sys, pyarrow as pa, pyarrow.parquet as pq
folder = sys.argv[1] + "/"
def text(i): return None if i % 7 == 3 else "text %d \u00e9\n" % i * (i % 5)
texts = [text(i) for i in range(1000)]
def write(name, columns, **options):
    pq.write_table(pa.table(columns), folder + name + ".parquet", **{"row_group_size": 300, **options})
for codec in ["none", "snappy", "gzip", "zstd", "lz4", "brotli"]:
    for dictionary in [False, True]:
        write("codec-%s-%d" % (codec, dictionary), {"n": pa.array(range(1000)), "text": texts},
              compression=codec, use_dictionary=dictionary)
for version in ["1.0", "2.0"]:
    write("page-" + version, {"text": texts}, data_page_version=version, data_page_size=500)
for encoding in ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"]:
    write("encoding-" + encoding, {"text": texts}, use_dictionary=False, column_encoding={"text": encoding})
kinds = {"string": pa.string(), "large_string": pa.large_string(), "string_view": pa.string_view(),
         "binary": pa.binary(), "large_binary": pa.large_binary()}
for name, kind in kinds.items():
    write("type-" + name, {"text": pa.array(texts, pa.string()).cast(kind) if "view" not in name else pa.array(texts, kind)})
write("type-dictionary", {"text": pa.array(texts).dictionary_encode()})
write("no-nulls", {"text": pa.array(["a", "", "c"])})
pq.write_table(pa.table([pa.array(["a", "b"])], pa.schema([pa.field("text", pa.string(), nullable=False)])),
               folder + "required.parquet")
write("nested", {"tags": [["x", "y"], [], None], "text": ["one", "two", None],
                 "meta": [{"text": "m1", "id": 5}, None, {"text": "m3", "id": 7}], "lists": [["a"], ["b", "c"], []]})
write("ids", {"text": ["a", "b", "c"], "id": ["x", None, ""], "number": pa.array([-5, None, 2**40]),
              "small": pa.array([1, 2, 3], pa.int32()), "score": [1.5, 2.5, 3.5]})
write("types", {"text": [1, 2], "decimal": pa.array([1, 2]).cast(pa.decimal128(25, 2)), "flag": [True, False]})
write("none", {"text": pa.array([], pa.string())})
pq.write_table(pa.table({}), folder + "columns.parquet")
edu = {"text": texts, "id": ["<urn:uuid:%d>" % i for i in range(1000)], "dump": ["CC-MAIN-2013-20"] * 1000,
       "url": ["http://example.org/%d" % i for i in range(1000)], "file_path": ["s3://commoncrawl/x"] * 1000,
       "language": ["en"] * 1000, "language_score": [0.9] * 1000, "token_count": list(range(1000)),
       "score": [2.5] * 1000, "int_score": [3] * 1000}
write("edu", edu)
write("bytes", {"text": pa.array([b"\xff\x00\xfe", b"ok"], pa.binary())})
write("large", {"text": [("%07d" % i) * 150000 for i in range(120)]}, row_group_size=120, use_dictionary=False,
      write_batch_size=4)
write("small", {"text": texts[:50], "id": ["i%d" % i for i in range(50)]}, row_group_size=20)
)";

std::string text_of(int i) {
  if (i % 7 == 3) return "";
  return repeat(fmt::format("text {} \xC3\xA9\n", i), size_t(i % 5));
}

class ParquetFiles : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!ParquetDocuments::supported() || *SPS_PYARROW_PYTHON == '\0') return;
    dir_ = new TestDir;
    const std::string script = dir_->write("write.py", kScript);
    const std::string command =
        fmt::format("'{}' '{}' '{}'", SPS_PYARROW_PYTHON, script, dir_->path().string());
    ASSERT_EQ(std::system(command.c_str()), 0);
  }
  static void TearDownTestSuite() {
    delete dir_;
    dir_ = nullptr;
  }
  void SetUp() override {
    if (!ParquetDocuments::supported()) GTEST_SKIP() << "this build has no Parquet support";
    if (*SPS_PYARROW_PYTHON == '\0') GTEST_SKIP() << "there is no Python with pyarrow to write Parquet files";
  }

  static std::string path(const std::string& name) { return dir_->path() / (name + ".parquet"); }
  // Texts and ids of all rows.
  static Pairs rows(const std::string& file, const std::string& text = "text", const std::string& id = "id") {
    ParquetDocuments documents(file, text, id);
    Pairs all;
    for (std::pair<std::string, std::string> row; documents.next(row.first, row.second);) all.push_back(row);
    EXPECT_EQ(documents.row(), documents.rows());
    return all;
  }
  static void expect_all_texts(const std::string& name) {
    const Pairs all = rows(path(name));
    ASSERT_EQ(all.size(), 1000u) << name;
    for (int i = 0; i < 1000; ++i) ASSERT_EQ(all[size_t(i)].first, text_of(i)) << name << " row " << i;
  }

  static TestDir* dir_;
};
TestDir* ParquetFiles::dir_ = nullptr;

TEST_F(ParquetFiles, AnyCompressionEncodingAndPage) {
  for (const char* codec : {"none", "snappy", "gzip", "zstd", "lz4", "brotli"})
    for (const char* dictionary : {"0", "1"}) expect_all_texts(fmt::format("codec-{}-{}", codec, dictionary));
  for (const char* name :
       {"page-1.0", "page-2.0", "encoding-DELTA_LENGTH_BYTE_ARRAY", "encoding-DELTA_BYTE_ARRAY"})
    expect_all_texts(name);
}

TEST_F(ParquetFiles, AnyTypeOfText) {
  for (const char* name : {"type-string", "type-large_string", "type-string_view", "type-binary",
                           "type-large_binary", "type-dictionary", "edu"})
    expect_all_texts(name);
  EXPECT_EQ(rows(path("no-nulls")), (Pairs{{"a", ""}, {"", ""}, {"c", ""}}));
  EXPECT_EQ(rows(path("required")), (Pairs{{"a", ""}, {"b", ""}}));
  EXPECT_EQ(rows(path("bytes"))[0].first, std::string("\xFF\0\xFE", 3));
  EXPECT_EQ(rows(path("none")), Pairs());
}

TEST_F(ParquetFiles, NestedColumns) {
  EXPECT_EQ(rows(path("nested")), (Pairs{{"one", ""}, {"two", ""}, {"", ""}}));
  EXPECT_EQ(rows(path("nested"), "meta.text", "meta.id"), (Pairs{{"m1", "5"}, {"", ""}, {"m3", "7"}}));
}

TEST_F(ParquetFiles, Ids) {
  EXPECT_EQ(rows(path("ids")), (Pairs{{"a", "x"}, {"b", ""}, {"c", ""}}));
  EXPECT_EQ(rows(path("ids"), "text", "number"), (Pairs{{"a", "-5"}, {"b", ""}, {"c", "1099511627776"}}));
  EXPECT_EQ(rows(path("ids"), "text", "small"), (Pairs{{"a", "1"}, {"b", "2"}, {"c", "3"}}));
  for (const char* none : {"score", "nowhere", "text", ""})
    EXPECT_EQ(rows(path("ids"), "text", none), (Pairs{{"a", ""}, {"b", ""}, {"c", ""}})) << none;
  EXPECT_EQ(rows(path("edu"))[999].second, "<urn:uuid:999>");
}

TEST_F(ParquetFiles, WrongColumnsAreErrors) {
  const auto error_for = [](const std::string& name, const std::string& column) {
    const std::string sentence = error_of([&] { ParquetDocuments(path(name), column, "id"); });
    EXPECT_PRED2(mentions, sentence, path(name));
    EXPECT_PRED2(mentions, sentence, "'" + column + "'");
    return sentence;
  };
  EXPECT_PRED2(mentions, error_for("edu", "content"),
               "no column 'content' (its columns: text, id, dump, url, ");
  EXPECT_PRED2(mentions, error_for("nested", "meta"), "meta.text, meta.id");
  EXPECT_PRED2(mentions, error_for("columns", "text"), "its columns: none");
  EXPECT_PRED2(mentions, error_for("types", "text"), "should hold strings, but it holds INT64");
  EXPECT_PRED2(mentions, error_for("types", "flag"), "BOOLEAN");
  EXPECT_PRED2(mentions, error_for("types", "decimal"), "should hold strings");
  EXPECT_PRED2(mentions, error_for("nested", "lists.list.element"), "within a list");
}

TEST_F(ParquetFiles, SkipsRows) {
  for (const uint64_t start : {0, 1, 50, 299, 300, 301, 700, 999, 1000, 1001}) {
    ParquetDocuments documents(path("edu"), "text", "id");
    EXPECT_EQ(documents.skip(start / 2) + documents.skip(start - start / 2), std::min<uint64_t>(start, 1000));
    std::string text, id;
    for (uint64_t i = start; i < 1000; ++i) {
      ASSERT_TRUE(documents.next(text, id));
      ASSERT_EQ(text, text_of(int(i)));
      ASSERT_EQ(id, fmt::format("<urn:uuid:{}>", i));
    }
    EXPECT_FALSE(documents.next(text, id));
  }
}

TEST_F(ParquetFiles, ADocumentReaderTakesThem) {
  const TestDir dir;
  fs::copy_file(path("nested"), dir / "a.parquet");
  fs::copy_file(path("ids"), dir / "b.parquet");
  fs::copy_file(path("ids"), dir / "c.bin");  // known by its first bytes
  dir.write("z.txt", "text");
  DocumentReader reader({dir.path(), dir / "c.bin"});
  Pairs all;
  for (Document document; reader.next(document);) all.emplace_back(document.id, document.text);
  EXPECT_EQ(all, (Pairs{{"a.parquet:1", "one"},
                        {"a.parquet:2", "two"},
                        {"x", "a"},
                        {"b.parquet:2", "b"},
                        {"b.parquet:3", "c"},
                        {"z.txt", "text"},
                        {"x", "a"},
                        {(dir / "c.bin").string() + ":2", "b"},
                        {(dir / "c.bin").string() + ":3", "c"}}));
  EXPECT_EQ(reader.empty_documents(), 1u);
  EXPECT_EQ(reader.bytes_read(), reader.total_bytes());
  DocumentReader again({dir.path()});
  again.seek({1, 2});
  Document document;
  ASSERT_TRUE(again.next(document));
  EXPECT_EQ(document.id, "b.parquet:3");
  EXPECT_PRED2(mentions, error_of([&] { DocumentReader({dir.path()}).seek({1, 4}); }), "has 3 records");
  EXPECT_PRED2(mentions, error_of([&] {
                 DocumentReader packed({dir.write("d.parquet.gz", gzip(read_text(path("ids"))))});
                 packed.next(document);
               }),
               "holds a Parquet file");
  const std::string prose = dir.write("prose.txt", "PAR1 is a receptor.\n");
  DocumentReader text({prose});
  ASSERT_TRUE(text.next(document));
  EXPECT_EQ(document.text, "PAR1 is a receptor.\n");
}

TEST_F(ParquetFiles, MemoryIsAPageAndNotARowGroup) {
  ParquetDocuments documents(path("large"), "text", "id");
  std::string text, id;
  size_t count = 0;
  const uint64_t grown = memory_growth([&] {
    for (; documents.next(text, id); ++count) ASSERT_EQ(text.size(), 1'050'000u);
  });
  EXPECT_EQ(count, 120u);
  EXPECT_LT(grown, uint64_t{60} << 20);
}

TEST_F(ParquetFiles, TruncatedFilesAreErrors) {
  const std::string whole = read_text(path("small"));
  for (size_t n = 0; n < whole.size(); n += n < 20 || n + 20 > whole.size() ? 1 : whole.size() / 40) {
    const TestDir dir;
    const std::string file = dir.write("cut.parquet", whole.substr(0, n));
    const std::string sentence = error_of([&] {
      DocumentReader reader({file});
      for (Document document; reader.next(document);) continue;
    });
    EXPECT_PRED2(mentions, sentence, file);
    EXPECT_EQ(sentence.find('\n'), std::string::npos) << sentence;
  }
}

TEST_F(ParquetFiles, DamagedFilesAreErrorsOrHarmless) {
  const std::string whole = read_text(path("small"));
  const Rng rng(4, "damage");
  const TestDir dir;
  int errors = 0;
  for (uint64_t i = 0; i < 300; ++i) {
    std::string damaged = whole;
    for (uint64_t k = 0; k <= i % 4; ++k)
      damaged[4 + rng.below(16 * i + 2 * k, damaged.size() - 4)] = char(rng.bits(16 * i + 2 * k + 1));
    try {
      DocumentReader reader({dir.write("damaged.parquet", damaged)});
      for (Document document; reader.next(document);) continue;
    } catch (const Error& e) {
      ++errors;
      EXPECT_PRED2(mentions, e.what(), "damaged.parquet");
    }
  }
  EXPECT_GT(errors, 30);
}

TEST(ParquetDocuments, WithoutTheLibraryThereIsASentence) {
  if (ParquetDocuments::supported()) GTEST_SKIP() << "this build has Parquet support";
  const TestDir dir;
  const std::string file = dir.write("a.parquet", "PAR1\x15...PAR1");
  const std::string sentence = error_of([&] {
    DocumentReader reader({file});
    Document document;
    reader.next(document);
  });
  EXPECT_PRED2(mentions, sentence, file + " is a Parquet file, but this build");
  EXPECT_PRED2(mentions, sentence, "-DSPS_PYTHON");
}

TEST(ParquetDocuments, AFileMustBeginLikeOne) {
  const TestDir dir;
  for (const char* content : {"", "P", "text"}) {
    const std::string file = dir.write("a.parquet", content);
    EXPECT_PRED2(mentions, error_of([&] {
                   DocumentReader reader({file});
                   Document document;
                   reader.next(document);
                 }),
                 file + " is not a Parquet file");
  }
}

}  // namespace
}  // namespace sps
