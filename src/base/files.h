// Files: whole reads, memory maps, and writes that are either complete or not there. All offsets are 64-bit
// and all sums of offsets are checked; short reads and writes are continued. Failures throw Error with the
// path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace sps {

std::string read_text(const std::filesystem::path& path);

// A read-only view of a whole file. An empty file has an empty view.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Writes beside `path` and moves the file there in commit(), after it has reached the disk. Without commit()
// nothing remains, where the file system has nameless files even after a kill. Parent folders must exist. A
// link stays one: the file it names is replaced. What is there and no regular file is an error.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(const void* data, size_t bytes);  // disk full and other failures throw, naming the path
  void write(std::string_view text) { write(text.data(), text.size()); }
  uint64_t written() const { return written_; }
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  int fd_ = -1;
  uint64_t written_ = 0;
};

// A file of intermediate results that do not fit into memory, appended at its end and read anywhere. It stays
// until somebody removes it, so that a later process can go on with it.
class WorkFile {
 public:
  // Opens or creates the file and cuts it after its first `keep` bytes; an error if it has fewer.
  explicit WorkFile(std::filesystem::path path, uint64_t keep = 0);
  ~WorkFile();
  WorkFile(const WorkFile&) = delete;
  WorkFile& operator=(const WorkFile&) = delete;
  void append(const void* data, size_t bytes);
  // Bytes [offset, offset + bytes), which must have been appended before. Any number of threads may read.
  void read(uint64_t offset, void* data, size_t bytes) const;
  uint64_t size() const { return size_; }
  void sync();  // brings what was appended to the disk

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

void write_atomically(const std::filesystem::path& path, std::string_view text);

// Appends a line and pushes it to the operating system; a torn last line from an earlier crash is cut off on
// opening.
class AppendFile {
 public:
  explicit AppendFile(std::filesystem::path path);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;
  void line(std::string_view text);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

// Makes every file of `temporary` durable, then renames the folder to `path` (which must not exist or is
// replaced).
void publish_directory(const std::filesystem::path& temporary, const std::filesystem::path& path);

// Creates the folder and checks that files can be written in it.
void make_writable_directory(const std::filesystem::path& path);

}  // namespace sps
