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
  friend class ScratchFile;
  MappedFile(int fd, const std::filesystem::path& path);
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Writes beside `path` and moves the file there in commit(), after it has reached the disk. Without commit()
// nothing remains, where the file system has nameless files even after a kill. Parent folders must exist.
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

// A nameless file in `folder` for data that does not fit into memory: written from front to back, then read
// through a map. Its space is given back with the object and its maps, also when the process is killed.
class ScratchFile {
 public:
  explicit ScratchFile(std::filesystem::path folder);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  void write(const void* data, size_t bytes);
  uint64_t written() const { return written_; }
  MappedFile map() const;  // what has been written up to now

 private:
  std::filesystem::path folder_;
  int fd_ = -1;
  uint64_t written_ = 0;
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
