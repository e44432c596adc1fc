#include "base/files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "base/test_dir.h"
#include "base/test_limits.h"

namespace sps {
namespace {

namespace fs = std::filesystem;

TEST(ReadText, ReturnsTheWholeFileAndNamesAMissingOne) {
  const TestDir dir;
  std::string text(200001, 'x');
  text[100000] = '\0';
  EXPECT_EQ(read_text(dir.write("a", text)), text);
  EXPECT_EQ(read_text(dir.write("empty", "")), "");
  EXPECT_PRED2(mentions, error_of([&] { read_text(dir / "none"); }), (dir / "none").string());
  EXPECT_PRED2(mentions, error_of([&] { read_text(dir.path()); }), dir.path().string());
  EXPECT_FALSE(read_text("/proc/self/status").empty());  // a file that states no size
}

TEST(MappedFile, ShowsTheBytesAndMoves) {
  const TestDir dir;
  MappedFile a(dir.write("a", "hello"));
  MappedFile b(dir.write("b", "other one"));
  a = std::move(b);
  ASSERT_EQ(a.bytes().size(), 9u);
  EXPECT_EQ(std::memcmp(a.bytes().data(), "other one", 9), 0);
  MappedFile c(std::move(a));
  EXPECT_EQ(c.bytes().size(), 9u);
  EXPECT_TRUE(a.bytes().empty());  // NOLINT(bugprone-use-after-move,clang-analyzer-cplusplus.Move): the
                                   // moved-from map is empty
  EXPECT_TRUE(MappedFile(dir.write("empty", "")).bytes().empty());
  EXPECT_PRED2(mentions, error_of([&] { MappedFile(dir / "none"); }), (dir / "none").string());
  EXPECT_PRED2(mentions, error_of([&] { MappedFile(dir.path()); }), "not a regular file");
}

// peer-faults 1, 2, 4, 5: 32-bit offsets fail beyond 2 GiB (signed) and 4 GiB (unsigned).
TEST(MappedFile, ReachesBeyond2And4GiB) {
  const TestDir dir;
  for (const uint64_t size : {(uint64_t{1} << 31) + 4096, (uint64_t{1} << 32) + 12345}) {
    const fs::path file = dir / std::to_string(size);
    std::ofstream(file).close();
    fs::resize_file(file, size);  // sparse
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(int64_t(size) - 6) << "marker";
    const MappedFile map(file);
    ASSERT_EQ(map.bytes().size(), size);
    EXPECT_EQ(std::memcmp(map.bytes().data() + size - 6, "marker", 6), 0);
    EXPECT_EQ(map.bytes()[size - 7], std::byte{0});
    EXPECT_EQ(map.bytes()[(size & 0x7FFFFFFF) - 6], std::byte{0});
    fs::remove(file);
  }
}

TEST(AtomicFile, IsThereOnlyAfterCommit) {
  const TestDir dir;
  {
    AtomicFile file(dir / "a");
    file.write("one ");
    file.write("two");
    EXPECT_EQ(file.written(), 7u);
    EXPECT_FALSE(fs::exists(dir / "a"));
    file.commit();
    EXPECT_EQ(read_text(dir / "a"), "one two");
  }
  EXPECT_EQ(read_text(dir / "a"), "one two");
  EXPECT_EQ(dir.count_entries(), 1u);  // no temporary file
}

TEST(AtomicFile, WithoutCommitNothingRemainsAndTheOldFileStays) {
  const TestDir dir;
  dir.write("a", "old");
  {
    AtomicFile file(dir / "a");
    file.write("new");
  }
  EXPECT_EQ(read_text(dir / "a"), "old");
  EXPECT_EQ(dir.count_entries(), 1u);
  write_atomically(dir / "a", "new");
  EXPECT_EQ(read_text(dir / "a"), "new");
  EXPECT_EQ(dir.count_entries(), 1u);
}

TEST(AtomicFile, TwoWritersOfOneNameDoNotMix) {
  const TestDir dir;
  AtomicFile a(dir / "x"), b(dir / "x");
  a.write("aaaa");
  b.write("bb");
  a.commit();
  b.commit();
  EXPECT_EQ(read_text(dir / "x"), "bb");
  EXPECT_EQ(dir.count_entries(), 1u);
}

// peer-faults 4 and 29: a short write is continued, and a full disk leaves the old file and an error with the
// path.
TEST(AtomicFile, FullDiskIsAnErrorThatNamesThePath) {
  const TestDir dir;
  dir.write("a", "old");
  const std::string text(10000, 'x');
  const std::string sentence = error_of([&] {
    const FileSizeLimit limit(4096);
    AtomicFile file(dir / "a");
    file.write(text);  // the first write system call is short, the second fails
  });
  EXPECT_PRED2(mentions, sentence, (dir / "a").string());
  EXPECT_EQ(read_text(dir / "a"), "old");
  EXPECT_EQ(dir.count_entries(), 1u);
}

// A file moved over a device would take its place in the system.
TEST(AtomicFile, OnlyRegularFilesAreReplaced) {
  const TestDir dir;
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0666), 0);
  std::filesystem::create_symlink(dir / "pipe", dir / "to-pipe");
  for (const auto& path : {dir / "pipe", dir / "to-pipe"})
    EXPECT_PRED2(mentions, error_of([&] { write_atomically(path, "x"); }), "is not a regular file");
  EXPECT_TRUE(std::filesystem::is_fifo(dir / "pipe"));
  EXPECT_EQ(dir.count_entries(), 2u);
  dir.write("a", "old");
  std::filesystem::create_symlink("a", dir / "link");
  write_atomically(dir / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(dir / "link"));
  EXPECT_EQ(read_text(dir / "a"), "new");
}

TEST(AtomicFile, UnwritablePathsAreErrorsThatNameThePath) {
  const TestDir dir;
  const fs::path no_folder = dir / "none/a", below_a_file = dir.write("file", "") / "a";
  for (const fs::path& path : {no_folder, below_a_file, dir.path()})
    EXPECT_PRED2(mentions, error_of([&] { write_atomically(path, "text"); }), path.string());
  EXPECT_EQ(dir.count_entries(), 1u);
}

TEST(WorkFile, GrowsIsReadAnywhereAndIsContinued) {
  const TestDir dir;
  {
    WorkFile file(dir / "w");
    EXPECT_EQ(file.size(), 0u);
    file.append("abc", 3);
    file.append("defg", 4);
    file.sync();
    EXPECT_EQ(file.size(), 7u);
    char got[5] = {};
    file.read(2, got, 4);
    EXPECT_STREQ(got, "cdef");
  }
  {
    WorkFile file(dir / "w", 4);
    file.append("XY", 2);
    char got[3] = {};
    file.read(3, got, 2);
    EXPECT_STREQ(got, "dX");
  }
  EXPECT_EQ(read_text(dir / "w"), "abcdXY");
  EXPECT_PRED2(mentions, error_of([&] { WorkFile(dir / "w", 7); }), "has 6 bytes");
  EXPECT_EQ(read_text(dir / "w"), "abcdXY");
  { const WorkFile emptied(dir / "w"); }
  EXPECT_EQ(read_text(dir / "w"), "");
}

TEST(WorkFile, FailuresNameThePath) {
  const TestDir dir;
  EXPECT_PRED2(mentions, error_of([&] { WorkFile(dir / "none/w"); }), (dir / "none/w").string());
  EXPECT_PRED2(mentions, error_of([&] { WorkFile{dir.path()}; }), dir.path().string());
  WorkFile file(dir / "w");
  const std::string sentence = error_of([&] {
    const FileSizeLimit limit(4096);
    file.append(std::string(10000, 'x').data(), 10000);
  });
  EXPECT_PRED2(mentions, sentence, (dir / "w").string());
  // Somebody else cuts the file.
  WorkFile cut(dir / "c");
  cut.append("abcd", 4);
  fs::resize_file(dir / "c", 2);
  char got[4];
  EXPECT_PRED2(mentions, error_of([&] { cut.read(0, got, 4); }), "shorter");
}

TEST(AppendFile, AppendsLinesAndCutsATornOne) {
  const TestDir dir;
  AppendFile(dir / "log").line("one");
  AppendFile(dir / "log").line("two");
  EXPECT_EQ(read_text(dir / "log"), "one\ntwo\n");

  const std::string long_torn(200000, 'y');  // longer than the block that is searched at once
  for (const std::string& torn : {std::string("x"), long_torn}) {
    for (const std::string& whole : {std::string(), std::string("one\ntwo\n")}) {
      dir.write("log", whole + torn);
      AppendFile file(dir / "log");
      EXPECT_EQ(read_text(dir / "log"), whole);
      file.line("three");
      EXPECT_EQ(read_text(dir / "log"), whole + "three\n");  // before it is closed
    }
  }
}

TEST(AppendFile, FullDiskIsAnErrorAndLeavesNoTornLine) {
  const TestDir dir;
  dir.write("log", "one\n");
  AppendFile file(dir / "log");
  const std::string sentence = error_of([&] {
    const FileSizeLimit limit(4096);
    file.line(std::string(10000, 'x'));
  });
  EXPECT_PRED2(mentions, sentence, (dir / "log").string());
  file.line("two");
  EXPECT_EQ(read_text(dir / "log"), "one\ntwo\n");
  EXPECT_PRED2(mentions, error_of([&] { AppendFile(dir / "none/log"); }), (dir / "none/log").string());
  EXPECT_PRED2(mentions, error_of([&] { AppendFile("/dev/full").line("x"); }), "/dev/full");
}

TEST(PublishDirectory, PutsAFolderInPlaceOrReplacesOne) {
  const TestDir dir;
  dir.write("new/sub/a", "1");
  publish_directory(dir / "new", dir / "final");
  EXPECT_EQ(read_text(dir / "final/sub/a"), "1");
  EXPECT_FALSE(fs::exists(dir / "new"));

  dir.write("new/b", "2");
  publish_directory(dir / "new/", dir / "final/");  // trailing slashes name the same folders
  EXPECT_EQ(read_text(dir / "final/b"), "2");
  EXPECT_FALSE(fs::exists(dir / "final/sub"));
  EXPECT_EQ(dir.count_entries(), 2u);  // final and final/b
}

TEST(PublishDirectory, FailureLeavesBothFolders) {
  const TestDir dir;
  dir.write("new/a", "1");
  dir.write("file", "x");
  EXPECT_PRED2(mentions, error_of([&] { publish_directory(dir / "new", dir / "file"); }),
               (dir / "file").string());
  EXPECT_PRED2(mentions, error_of([&] { publish_directory(dir / "new", dir / "none/final"); }),
               (dir / "none/final").string());
  EXPECT_PRED2(mentions, error_of([&] { publish_directory(dir / "missing", dir / "final"); }),
               (dir / "missing").string());
  EXPECT_EQ(read_text(dir / "new/a"), "1");
  EXPECT_EQ(read_text(dir / "file"), "x");
}

TEST(MakeWritableDirectory, CreatesItOrSaysWhyNot) {
  const TestDir dir;
  make_writable_directory(dir / "a/b/c/");
  EXPECT_TRUE(fs::is_directory(dir / "a/b/c"));
  make_writable_directory(dir / "a");
  EXPECT_EQ(dir.count_entries(), 3u);  // the probe is gone
  dir.write("file", "");
  for (const char* name : {"file", "file/x"})
    EXPECT_PRED2(mentions, error_of([&] { make_writable_directory(dir / name); }), (dir / name).string());
  EXPECT_PRED2(mentions, error_of([] { make_writable_directory("/proc/self/x"); }), "/proc/self/x");
}

}  // namespace
}  // namespace sps
