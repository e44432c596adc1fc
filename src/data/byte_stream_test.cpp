#include "data/byte_stream.h"

#include "base/rng.h"
#include "base/test_dir.h"
#include "base/test_memory.h"
#include "data/test_packing.h"

namespace sps {
namespace {

std::string read_all(const std::filesystem::path& path) {
  ByteStream stream(path);
  std::string all;
  for (std::string_view piece; !(piece = stream.peek()).empty();) {
    // Not always the whole piece.
    const size_t n = std::min(piece.size(), all.size() % 5000 + 1);
    all += piece.substr(0, n);
    stream.take(n);
  }
  EXPECT_EQ(stream.bytes_read(), std::filesystem::file_size(path));
  EXPECT_TRUE(stream.peek().empty());  // and stays so
  return all;
}

// Longer than the buffers, and hard to pack.
std::string noise(size_t bytes) {
  const Rng rng(1, "noise");
  std::string text(bytes, ' ');
  for (size_t i = 0; i < bytes; ++i) text[i] = char('a' + rng.below(i, 26));
  return text;
}

TEST(ByteStream, UnpacksWhateverTheNameSays) {
  const TestDir dir;
  for (const std::string& text : {std::string(), std::string("x"), noise(3), noise(1'000'000)}) {
    EXPECT_EQ(read_all(dir.write("a.txt", text)), text);
    for (const char* name : {"a.txt", "a.gz", "a.zst"}) {
      EXPECT_EQ(read_all(dir.write(name, gzip(text))), text);
      EXPECT_EQ(read_all(dir.write(name, zstd(text))), text);
    }
  }
}

TEST(ByteStream, MembersAndFramesFollowOneAnother) {
  const TestDir dir;
  const std::string a = noise(700'000), b = "the end\n";
  EXPECT_EQ(read_all(dir.write("a", gzip(a) + gzip("") + gzip(b))), a + b);
  EXPECT_EQ(read_all(dir.write("a", zstd(a) + zstd("") + zstd(b))), a + b);
  EXPECT_EQ(read_all(dir.write("a", repeat(gzip(b), 20'000))),
            repeat(b, 20'000));  // magics on buffer borders
  EXPECT_EQ(read_all(dir.write("a", repeat(zstd(b), 20'000))), repeat(b, 20'000));
  EXPECT_EQ(read_all(dir.write("a", gzip(a) + std::string(600'000, '\0'))), a);  // padding
  const std::string skippable("\x5A\x2A\x4D\x18\x03\0\0\0abc", 11);
  EXPECT_EQ(read_all(dir.write("a", skippable + zstd(b) + skippable + zstd(a))), b + a);
}

TEST(ByteStream, TruncatedFilesAreErrorsWhereverTheyEnd) {
  const TestDir dir;
  const std::string text = noise(2'000);
  for (const std::string& packed : {gzip(text), zstd(text)}) {
    const size_t magic = packed.starts_with("\x1F") ? 2 : 4;
    for (size_t n = magic; n < packed.size(); n += n < 30 || n + 30 > packed.size() ? 1 : 97) {
      const std::string file = dir.write("a", packed.substr(0, n));
      const std::string sentence = error_of([&] { read_all(file); });
      EXPECT_PRED2(mentions, sentence, file + " is truncated");
      EXPECT_PRED2(mentions, sentence, fmt::format("after {} bytes", n));
    }
  }
  for (const char* name : {"a.gz", "a.zst"})
    EXPECT_PRED2(mentions, error_of([&] { read_all(dir.write(name, "")); }), "truncated");
}

TEST(ByteStream, DamageIsAnErrorOrHarmless) {
  const TestDir dir;
  const std::string text = noise(3'000);
  const Rng rng(2, "damage");
  int errors = 0;
  for (const std::string& packed : {gzip(text), zstd(text)}) {
    for (uint64_t i = 0; i < 100; ++i) {
      std::string damaged = packed;
      damaged[4 + rng.below(2 * i, packed.size() - 4)] ^= char(1 << rng.below(2 * i + 1, 8));
      try {
        read_all(dir.write("a", damaged));
      } catch (const Error& e) {
        ++errors;
        EXPECT_PRED2(mentions, e.what(), (dir / "a").string());
      }
    }
  }
  EXPECT_GT(errors, 80);  // zstd() adds no checksum
}

TEST(ByteStream, WhatFollowsPackedDataIsAnError) {
  const TestDir dir;
  for (const char* rest : {"x", "PK", "\x1F", "\x28\xB5", "more text"})
    for (const std::string& packed : {gzip("text"), zstd("text")}) {
      const std::string sentence = error_of([&] { read_all(dir.write("a", packed + rest)); });
      EXPECT_PRED2(mentions, sentence, fmt::format("after byte {}", packed.size()));
    }
}

TEST(ByteStream, OtherArchivesAreRefused) {
  const TestDir dir;
  std::string tar(1024, '\0');
  tar.replace(257, 5, "ustar");
  const std::pair<std::string, const char*> archives[] = {{"PK\x03\x04zip", "zip"},
                                                          {"BZh91AY&SYxx", "bzip2"},
                                                          {std::string("\xFD\x37zXZ\0", 6), "xz"},
                                                          {"7z\xBC\xAF\x27\x1Cxx", "7z"},
                                                          {tar, "tar"}};
  for (const auto& [bytes, name] : archives) {
    const std::string plain = error_of([&] { read_all(dir.write("a", bytes)); });
    EXPECT_PRED2(mentions, plain, fmt::format("is a {} file", name));
    const std::string packed = error_of([&] { read_all(dir.write("a", gzip(bytes))); });
    EXPECT_PRED2(mentions, packed, fmt::format("holds a {} file", name));
  }
  EXPECT_PRED2(mentions, error_of([&] { read_all(dir.write("a", zstd(gzip("text")))); }),
               "holds a gzip file");
  EXPECT_PRED2(mentions, error_of([&] { read_all(dir / "none"); }), (dir / "none").string());
  EXPECT_EQ(read_all(dir.write("a", "BZh is no archive")), "BZh is no archive");
}

TEST(ByteStream, MemoryDoesNotGrowWithTheFile) {
  const TestDir dir;
  const std::string zeros(size_t{8} << 20, '\0');
  const std::pair<std::string, std::string> files[] = {{dir.write("a", repeat(gzip(zeros), 32)), "gzip"},
                                                       {dir.write("b", repeat(zstd(zeros), 32)), "zstd"}};
  for (const auto& [file, format] : files) {
    uint64_t bytes = 0;
    const uint64_t grown = memory_growth([&] {
      ByteStream stream(file);
      for (std::string_view piece; !(piece = stream.peek()).empty(); stream.take(piece.size()))
        bytes += piece.size();
    });
    EXPECT_EQ(bytes, uint64_t{256} << 20) << format;
    EXPECT_LT(grown, uint64_t{24} << 20) << format;
  }
}

}  // namespace
}  // namespace sps
