#include "data/check_ids.h"

#include "base/test_dir.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

fs::path write_ids(const TestDir& dir, const char* name, std::vector<int32_t> ids,
                   TokenType type = TokenType::u16) {
  TokenWriter writer(dir / name, type);
  writer.append(ids);
  writer.commit();
  return dir / name;
}

TokenFile opened(const fs::path& path, int64_t vocab_size) {
  TokenFile file = TokenFile::open(path);
  file.set_vocab_size(vocab_size);
  return file;
}

void check(const TokenFile& a, const TokenFile& b, const fs::path& note) {
  const TokenFile* const files[] = {&a, &b};
  check_ids(files, note);
}

TEST(CheckIds, TheFirstWrongOneIsNamed) {
  const TestDir dir;
  std::vector<int32_t> ids(10'000'000, 7);
  const auto good = write_ids(dir, "good.bin", {7, 99});
  ids[9'000'000] = ids[9'999'999] = 300;
  ids[8'999'999] = 100;
  const auto bad = write_ids(dir, "bad.bin", ids);
  const std::string sentence = error_of([&] { check(opened(good, 100), opened(bad, 100), dir / "note"); });
  EXPECT_PRED2(mentions, sentence, "bad.bin: token 8999999 is 100, but the vocabulary has 100 ids");
  EXPECT_FALSE(fs::exists(dir / "note"));
  check(opened(good, 100), opened(bad, 301), dir / "note");
  EXPECT_TRUE(fs::exists(dir / "note"));
}

// A change that the note cannot know of shows whether the file is read.
TEST(CheckIds, AFileIsReadOnceForAVocabulary) {
  const TestDir dir;
  const auto a = write_ids(dir, "a.bin", {1, 2, 3}), b = write_ids(dir, "b.bin", {4});
  const auto note = dir / "note";
  check(opened(a, 10), opened(b, 10), note);
  const auto modified = fs::last_write_time(a);
  write_ids(dir, "a.bin", {1, 2, 30});
  fs::last_write_time(a, modified);
  check(opened(a, 10), opened(b, 10), note);
  const auto error = [&](int64_t vocab_size) {
    return error_of([&] { check(opened(a, vocab_size), opened(b, 10), note); });
  };
  EXPECT_PRED2(mentions, error(11), "token 2 is 30");
  fs::last_write_time(a, modified + std::chrono::seconds(1));
  EXPECT_PRED2(mentions, error(10), "token 2 is 30");
  fs::last_write_time(a, modified);
  check(opened(a, 10), opened(b, 10), note);
  for (const char* damaged : {"", "[]", "{\"x\"", "{\"a.bin\": 1}"}) {
    dir.write("note", damaged);
    EXPECT_PRED2(mentions, error(10), "token 2 is 30") << damaged;
  }
  // Without a place for the note it is only a warning.
  check(opened(a, 31), opened(b, 31), dir / "none/note");
}

TEST(CheckIds, FilesThatCannotBeWrongAreNotRead) {
  const TestDir dir;
  const auto a = write_ids(dir, "a.bin", {65535}), b = write_ids(dir, "b.bin", {0});
  check(opened(a, 65536), opened(b, 65536), dir / "note");
  EXPECT_FALSE(fs::exists(dir / "note"));
  EXPECT_PRED2(mentions, error_of([&] { check(opened(a, 65535), opened(b, 65535), dir / "note"); }),
               "token 0 is 65535");
}

}  // namespace
}  // namespace sps
