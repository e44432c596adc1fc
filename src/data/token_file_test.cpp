#include "data/token_file.h"

#include <cstring>
#include <fstream>

#include "base/error.h"
#include "base/test_dir.h"
#include "data/prepare.h"

namespace sps {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<int32_t>;

void write_tokens(const fs::path& path, const Ids& ids, TokenType type = TokenType::u16) {
  TokenWriter writer(path, type);
  writer.append(ids);
  writer.commit();
}

Ids all_of(const TokenFile& file) {
  Ids ids(static_cast<size_t>(file.size()));
  file.read(0, file.size(), ids.data());
  return ids;
}

// A description that fits train.bin = `train` and an empty val.bin.
TokenMeta write_data_set(const TestDir& dir, const Ids& train, TokenType type, int32_t vocab_size) {
  TokenMeta meta;
  meta.tokenizer = "t";
  meta.fingerprint = "f";
  meta.vocab_size = vocab_size;
  meta.eot = 0;
  meta.type = type;
  meta.seed = UINT64_MAX;
  meta.val_fraction = 0.01;
  meta.text_field = "text";
  meta.inputs = {"a \"b\"", "c"};
  meta.files = {{"c/x", 5}, {"c/y", UINT64_MAX}};
  meta.split_by = SplitBy::text;
  meta.id_field = "key";
  meta.empty_documents = 3;
  TokenWriter writer(dir / "train.bin", type), val(dir / "val.bin", type);
  writer.append(train);
  meta.train = {writer.tokens(), 1, writer.hash(), 7};
  meta.val = {0, 0, val.hash(), 0};
  writer.commit();
  val.commit();
  write_token_meta(dir.path(), meta);
  return meta;
}

std::string headed(int32_t magic, int32_t version, int32_t count, const std::string& tokens) {
  std::string bytes(1024, '\0');
  const int32_t head[] = {magic, version, count};
  std::memcpy(bytes.data(), head, sizeof head);
  return bytes + tokens;
}

TEST(TokenFile, RawFilesAreUint16WithoutADescription) {
  const TestDir dir;
  const Ids ids{0, 1, 255, 256, 50256, 65535};
  write_tokens(dir / "train.bin", ids);
  EXPECT_EQ(fs::file_size(dir / "train.bin"), 12u);
  const TokenFile file = TokenFile::open(dir.path());
  EXPECT_EQ(file.type(), TokenType::u16);
  EXPECT_EQ(all_of(file), ids);
  EXPECT_EQ(file.token(4), 50256);
  EXPECT_FALSE(file.meta());
  file.verify();
  Ids part(2);
  TokenFile::open(dir / "train.bin").read(3, 2, part.data());
  EXPECT_EQ(part, (Ids{256, 50256}));
}

TEST(TokenFile, ADescriptionSaysTypeVocabularyAndCounts) {
  const TestDir dir;
  const Ids ids{5, 70000, 0, INT32_MAX - 1};
  const TokenMeta meta = write_data_set(dir, ids, TokenType::u32, INT32_MAX);
  const TokenFile file = TokenFile::open(dir.path(), "train");
  EXPECT_EQ(all_of(file), ids);
  EXPECT_EQ(file.vocab_size(), INT32_MAX);
  ASSERT_TRUE(file.meta());
  EXPECT_EQ(*file.meta(), meta);
  file.verify();
  const TokenFile val = TokenFile::open(dir.path(), "val");
  EXPECT_EQ(val.size(), 0);
  val.verify();
}

TEST(TokenFile, LlmCFilesAreRecognised) {
  const TestDir dir;
  dir.write("a.bin", headed(20240520, 1, 3, std::string("\x01\x00\x02\x00\xFF\xFF", 6)));
  EXPECT_EQ(all_of(TokenFile::open(dir / "a.bin")), (Ids{1, 2, 65535}));
  dir.write("b.bin", headed(20240801, 7, 1, std::string("\x01\x00\x02\x00", 4)));
  EXPECT_EQ(all_of(TokenFile::open(dir / "b.bin")), (Ids{0x20001}));
  dir.write("c.bin", headed(20240520, 1, 4, std::string("\x01\x00\x02\x00\xFF\xFF", 6)));
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir / "c.bin"); }),
               "4 tokens of 2 bytes, but 6 bytes");
  dir.write("d.bin", headed(20240520, 1, -1, ""));
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir / "d.bin"); }), "-1 tokens");
  // Neither the magic number nor its version alone makes a header.
  dir.write("e.bin", headed(20240520, 2, 0, ""));
  EXPECT_EQ(TokenFile::open(dir / "e.bin").size(), 512);
}

TEST(TokenFile, ErrorsNameTheFileTheValueAndTheExpectation) {
  const TestDir dir;
  dir.write("odd.bin", "abc");
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir / "odd.bin"); }), "odd.bin: has 3 bytes");
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir / "none.bin"); }), (dir / "none.bin").string());
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path()); }), (dir / "train.bin").string());
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path(), "val"); }), (dir / "val.bin").string());

  write_data_set(dir, {1, 2, 9}, TokenType::u16, 10);
  for (const char* wrong : {"ab", "abcdefgh", "abcde"}) {
    dir.write("train.bin", wrong);
    EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path()); }), "says 3 tokens of 2 bytes");
  }
}

TEST(TokenFile, IdsBeyondTheVocabularyAreFoundOnReading) {
  const TestDir dir;
  write_data_set(dir, {1, 9, 10, 3}, TokenType::u16, 10);
  const TokenFile file = TokenFile::open(dir.path());
  Ids ids(4);
  file.read(0, 2, ids.data());
  file.read(3, 1, ids.data());
  for (const auto& sentence :
       {error_of([&] { file.read(1, 3, ids.data()); }), error_of([&] { file.verify(); })}) {
    EXPECT_PRED2(mentions, sentence, "token 2 is 10");
    EXPECT_PRED2(mentions, sentence, "10 ids");
  }
  // A file without a description learns the vocabulary from the model.
  write_tokens(dir / "x.bin", {7, 8});
  TokenFile bare = TokenFile::open(dir / "x.bin");
  bare.verify();
  bare.set_vocab_size(8);
  EXPECT_PRED2(mentions, error_of([&] { bare.verify(); }), "token 1 is 8");
  // uint32 ids that are no int32.
  dir.write("y.bin", headed(20240801, 7, 1, "\xFF\xFF\xFF\xFF"));
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir / "y.bin").token(0); }), "4294967295");
}

TEST(TokenFile, VerifyFindsAChangedId) {
  const TestDir dir;
  write_data_set(dir, Ids(100000, 3), TokenType::u16, 10);
  TokenFile::open(dir.path()).verify();
  std::fstream(dir / "train.bin", std::ios::in | std::ios::out | std::ios::binary).seekp(199998) << '\4';
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path()).verify(); }), "hash");
}

// peer-faults 1, 2: 32-bit offsets. Tokens beyond 2 GiB and beyond 4 GiB are the right ones.
TEST(TokenFile, ReachesBeyond2And4GiB) {
  const TestDir dir;
  for (const uint64_t bytes : {(uint64_t{1} << 31) + 4096, (uint64_t{1} << 32) + 4096}) {
    std::ofstream(dir / "big.bin").close();
    fs::resize_file(dir / "big.bin", bytes);
    std::fstream(dir / "big.bin", std::ios::in | std::ios::out | std::ios::binary).seekp(int64_t(bytes) - 4)
        << "\x07\x01\x08\x02";
    const TokenFile file = TokenFile::open(dir / "big.bin");
    ASSERT_EQ(file.size(), int64_t(bytes / 2));
    Ids ids(3);
    file.read(file.size() - 3, 3, ids.data());
    EXPECT_EQ(ids, (Ids{0, 0x107, 0x208}));
    fs::remove(dir / "big.bin");
  }
}

TEST(TokenWriter, WithoutCommitThereIsNoFile) {
  const TestDir dir;
  {
    TokenWriter writer(dir / "train.bin", TokenType::u16);
    writer.append(Ids(2'000'000, 1));
    EXPECT_EQ(writer.tokens(), 2'000'000u);
  }
  EXPECT_EQ(dir.count_entries(), 0u);
}

TEST(TokenWriter, CountsAndHashesWhatItWrites) {
  const TestDir dir;
  TokenWriter writer(dir / "x.bin", TokenType::u32);
  std::vector<std::byte> packed;
  pack_tokens(Ids{3, 4}, TokenType::u32, packed);
  for (int i = 0; i < 100'000; ++i) {
    writer.append(Ids{1, 2});
    writer.append_bytes(packed);
  }
  EXPECT_EQ(writer.tokens(), 400'000u);
  const std::string hash = writer.hash();
  writer.commit();
  const std::string content = read_text(dir / "x.bin");
  EXPECT_EQ(content.size(), 1'600'000u);
  EXPECT_EQ(hash, hex(hash64(content)));
  EXPECT_EQ(content.substr(1'599'984), std::string("\1\0\0\0\2\0\0\0\3\0\0\0\4\0\0\0", 16));
}

TEST(TokenWriter, WritesTheHeaderOfLlmC) {
  const TestDir dir;
  const std::pair<TokenType, std::string> types[] = {
      {TokenType::u16, std::string("\x07\0\x08\0", 4)},
      {TokenType::u32, std::string("\x07\0\0\0\x08\0\0\0", 8)}};
  for (const auto& [type, tokens] : types) {
    TokenWriter writer(dir / "x.bin", type, 2);
    writer.append(Ids{7, 8});
    EXPECT_EQ(writer.tokens(), 2u);
    EXPECT_EQ(writer.hash(), hex(hash64(tokens)));
    writer.commit();
    EXPECT_EQ(read_text(dir / "x.bin"),
              type == TokenType::u16 ? headed(20240520, 1, 2, tokens) : headed(20240801, 7, 2, tokens));
    EXPECT_EQ(all_of(TokenFile::open(dir / "x.bin")), (Ids{7, 8}));
    fs::remove(dir / "x.bin");
  }
  // peer-faults 2: a count that the header cannot hold is refused, not wrapped.
  TokenWriter largest(dir / "x.bin", TokenType::u16, INT32_MAX);
  const std::string sentence =
      error_of([&] { TokenWriter(dir / "x.bin", TokenType::u16, uint64_t{1} << 31); });
  EXPECT_PRED2(mentions, sentence, "2147483648 tokens");
  EXPECT_PRED2(mentions, sentence, "2147483647");
  EXPECT_EQ(dir.count_entries(), 0u);
}

TEST(TokenFile, ADescribedHeaderMustBeThereAndAgree) {
  const TestDir dir;
  TokenMeta meta = write_data_set(dir, {1, 2, 3}, TokenType::u16, 10);
  meta.format = TokenFormat::llmc;
  write_token_meta(dir.path(), meta);
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path()); }), "header of llm.c comes first");
  const std::string tokens("\1\0\2\0\3\0", 6);
  dir.write("train.bin", headed(20240520, 1, 3, tokens));
  const TokenFile file = TokenFile::open(dir.path());
  EXPECT_EQ(all_of(file), (Ids{1, 2, 3}));
  file.verify();
  dir.write("train.bin", headed(20240520, 1, 2, tokens.substr(2)));
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path()); }), "says 3 tokens of 2 bytes");
  dir.write("train.bin", headed(20240801, 7, 3, tokens + tokens));
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path()); }), "says tokens of 4 bytes");
  // Where the description says that there is none, ids that look like a header are ids.
  meta.format = TokenFormat::sps;
  meta.vocab_size = 65536;
  meta.train.tokens = 512;
  write_token_meta(dir.path(), meta);
  dir.write("train.bin", headed(20240520, 1, 0, ""));
  EXPECT_EQ(TokenFile::open(dir.path()).size(), 512);
}

TEST(TokenMeta, DamagedDescriptionsAreErrorsThatNameTheKey) {
  const TestDir dir;
  const std::string good = write_data_set(dir, {1}, TokenType::u16, 10).to_json();
  const auto error_after = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    dir.write("meta.json", text);
    const std::string sentence = error_of([&] { TokenFile::open(dir.path()); });
    EXPECT_PRED2(mentions, sentence, (dir / "meta.json").string());
    return sentence;
  };
  EXPECT_PRED2(mentions, error_after("\"version\": 1", "\"version\": 2"), "version 2");
  EXPECT_PRED2(mentions, error_after("\"dtype\"", "\"type\""), "'dtype' is missing");
  EXPECT_PRED2(mentions, error_after("uint16", "int16"), "'dtype' should be");
  EXPECT_PRED2(mentions, error_after("\"tokens\": 1", "\"tokens\": -1"), "'train.tokens' should be");
  EXPECT_PRED2(mentions, error_after("\"documents\": 1", "\"documents\": \"1\""), "'train.documents'");
  EXPECT_PRED2(mentions, error_after("\"vocab_size\": 10", "\"vocab_size\": 4294967306"), "vocab_size");
  EXPECT_PRED2(mentions, error_after("\"eot\": 0", "\"eot\": 10"), "'tokenizer.eot' should be below");
  EXPECT_PRED2(mentions, error_after("\"c\"", "3"), "'inputs'");
  EXPECT_PRED2(mentions, error_after("\"format\": \"sps\"", "\"format\": \"zip\""), "'format' should be");
  EXPECT_PRED2(mentions, error_after("\"split_by\": \"text\"", "\"split_by\": 1"), "'split_by' should be");
  EXPECT_PRED2(mentions, error_after("\"text_bytes\": 7", "\"text_bytes\": -7"), "'train.text_bytes'");
  EXPECT_PRED2(mentions, error_after("\"bytes\": 5", "\"bytes\": 5.5"), "'files.bytes'");
  EXPECT_PRED2(mentions, error_after("\"files\": [", "\"files\": [3,"), "'files' should be");
  EXPECT_PRED2(mentions, error_after("}", ""), "not valid JSON");
  dir.write("meta.json", "[]");
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path()); }), "array");
  dir.write("meta.json", good);
  EXPECT_EQ(TokenFile::open(dir.path()).size(), 1);
}

// As `sps prepare` wrote it before there were formats, ids and lists of files.
TEST(TokenMeta, DescriptionsOfBeforeTheNewerKeysAreRead) {
  const TestDir dir;
  dir.write("meta.json", R"({"version": 1, "tokenizer": {"name": "bytes", "fingerprint": "0278a6e2d5f13c80",
    "vocab_size": 257, "eot": 256}, "dtype": "uint16",
    "train": {"tokens": 3, "documents": 1, "hash": "5840bc1f25dd7f86"},
    "val": {"tokens": 4, "documents": 1, "hash": "61cba362060cbbda"},
    "seed": 42, "val_fraction": 0.01, "text_field": "text", "inputs": ["in"]})");
  const TokenMeta meta = *read_token_meta(dir.path());
  EXPECT_EQ(meta.format, TokenFormat::sps);
  EXPECT_EQ(meta.split_by, SplitBy::text);
  EXPECT_EQ(meta.id_field, "id");
  EXPECT_EQ(meta.empty_documents, 0u);
  EXPECT_EQ(meta.train.text_bytes, 0u);
  EXPECT_TRUE(meta.files.empty());
  EXPECT_EQ(meta.train.hash, "5840bc1f25dd7f86");
}

TEST(TokenMeta, AnUnfinishedDataSetIsRefused) {
  const TestDir dir;
  const TokenMeta meta = write_data_set(dir, {1}, TokenType::u16, 10);
  EXPECT_FALSE(is_marked_unfinished(dir.path()));
  mark_unfinished(dir.path());
  EXPECT_TRUE(is_marked_unfinished(dir.path()));
  EXPECT_PRED2(mentions, error_of([&] { TokenFile::open(dir.path()); }), "unfinished");
  write_token_meta(dir.path(), meta);
  EXPECT_EQ(TokenFile::open(dir.path()).size(), 1);
}

// The worked bytes of docs/formats/token-files.md.
TEST(TokenFile, TheDocumentedExampleIsWhatIsWritten) {
  const TestDir dir;
  dir.write("in/a.txt", "Hi");
  dir.write("in/b.txt", "Yo!");
  PrepareOptions options;
  options.inputs = {dir / "in"};
  options.out = dir / "out";
  prepare(options);
  const std::string doc = read_text(fs::path(SPS_SOURCE_DIR) / "docs/formats/token-files.md");
  for (const char* name : {"train.bin", "val.bin"}) {
    std::string bytes;
    for (const char c : read_text(dir.path() / "out" / name)) bytes += fmt::format("{:02x} ", uint8_t(c));
    bytes.pop_back();
    EXPECT_PRED2(mentions, doc, fmt::format("{:<10} {}", name, bytes));
  }
  std::string json = read_text(dir / "out/meta.json");
  const std::string folder = dir.path().string() + "/";
  for (size_t at; (at = json.find(folder)) != std::string::npos;) json.erase(at, folder.size());
  EXPECT_PRED2(mentions, doc, json);
}

}  // namespace
}  // namespace sps
