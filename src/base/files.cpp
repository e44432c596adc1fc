#include "base/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"

namespace sps {
namespace fs = std::filesystem;
namespace {

static_assert(sizeof(off_t) == 8 && sizeof(size_t) == 8, "file offsets are 64-bit");

// One system call moves at most 2^31 - 4096 bytes on Linux; larger transfers go in pieces of this size.
constexpr size_t kPiece = size_t{1} << 30;

std::string reason(int error) {
  return std::strerror(error);
}

// A descriptor that closes itself.
struct Fd {
  int fd;
  explicit Fd(int value) : fd(value) {}
  ~Fd() {
    if (fd >= 0) ::close(fd);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
};

fs::path folder_of(const fs::path& path) {
  const fs::path parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

// "runs/x/" names the same folder as "runs/x", but its parent is another one.
fs::path without_trailing_slash(const fs::path& path) {
  return path.has_filename() || !path.has_relative_path() ? path : path.parent_path();
}

int open_for_reading(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("cannot open {}: {}", path.string(), reason(errno));
  return fd;
}

void write_all(int fd, const void* data, size_t bytes, const fs::path& path) {
  const char* p = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd, p, std::min(bytes, kPiece));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot write {}: {}", path.string(), reason(errno));
    p += n;
    bytes -= size_t(n);
  }
}

void sync_fd(int fd, const fs::path& path) {
  // EINVAL: a kind of file that has nothing to sync.
  if (::fsync(fd) != 0 && errno != EINVAL)
    fail("cannot write {} to the disk: {}", path.string(), reason(errno));
}

void sync_path(const fs::path& path) {
  const Fd file(open_for_reading(path));
  sync_fd(file.fd, path);
}

// A name beside `path` that no other writer uses.
fs::path temporary_beside(const fs::path& path) {
  static std::atomic<uint64_t> counter{0};
  return folder_of(path) /
         fmt::format(".{}.{}-{}.partial", path.filename().string(), ::getpid(), counter.fetch_add(1));
}

// A file without a name, or -1 where that is not possible. /proc is what gives it a name later.
int open_nameless(const fs::path& folder) {
  static const bool can_be_named = ::access("/proc/self/fd", X_OK) == 0;
  return can_be_named ? ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0666) : -1;
}

int open_new(const fs::path& path) {
  return ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0666);
}

}  // namespace

std::string read_text(const fs::path& path) {
  const Fd file(open_for_reading(path));
  std::string text;
  struct stat info {};
  if (::fstat(file.fd, &info) == 0 && info.st_size > 0) text.reserve(size_t(info.st_size) + 1);
  for (;;) {  // until the end, not until st_size: pipes and /proc state no size
    const size_t have = text.size(), room = std::clamp(text.capacity() - have, size_t{65536}, kPiece);
    text.resize(have + room);
    const ssize_t n = ::read(file.fd, text.data() + have, room);
    text.resize(have + size_t(std::max<ssize_t>(n, 0)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot read {}: {}", path.string(), reason(errno));
    if (n == 0) return text;
  }
}

// ---- MappedFile

MappedFile::MappedFile(const fs::path& path) {
  const Fd file(open_for_reading(path));
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) fail("cannot read {}: {}", path.string(), reason(errno));
  if (!S_ISREG(info.st_mode)) fail("cannot read {}: it is not a regular file", path.string());
  if (info.st_size == 0) return;
  void* data = ::mmap(nullptr, size_t(info.st_size), PROT_READ, MAP_SHARED, file.fd, 0);
  if (data == MAP_FAILED) fail("cannot map {} ({} bytes): {}", path.string(), info.st_size, reason(errno));
  data_ = static_cast<const std::byte*>(data);
  size_ = size_t(info.st_size);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

// ---- AtomicFile

AtomicFile::AtomicFile(fs::path path) : path_(std::move(path)) {
  std::error_code error;
  if (fs::is_symlink(path_, error)) {
    const fs::path target = fs::canonical(path_, error);
    if (!error) path_ = target;
  }
  // Moving a file to the place of a device or a pipe would remove that from the system; of a folder it fails.
  const fs::file_status there = fs::status(path_, error);
  if (fs::exists(there) && !fs::is_regular_file(there) && !fs::is_directory(there))
    fail("cannot write {}: it is not a regular file", path_.string());
  fd_ = open_nameless(folder_of(path_));
  if (fd_ >= 0) return;
  const fs::path temporary = temporary_beside(path_);
  fd_ = open_new(temporary);
  if (fd_ < 0) fail("cannot write {}: {}", path_.string(), reason(errno));
  temporary_ = temporary;
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  SPS_CHECK(fd_ >= 0);
  write_all(fd_, data, bytes, path_);
  written_ += bytes;
}

void AtomicFile::commit() {
  SPS_CHECK(fd_ >= 0);
  sync_fd(fd_, path_);
  if (temporary_.empty()) {
    const fs::path temporary = temporary_beside(path_), self = fmt::format("/proc/self/fd/{}", fd_);
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, temporary.c_str(), AT_SYMLINK_FOLLOW) != 0)
      fail("cannot write {}: {}", path_.string(), reason(errno));
    temporary_ = temporary;
  }
  if (::close(std::exchange(fd_, -1)) != 0) fail("cannot write {}: {}", path_.string(), reason(errno));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0)
    fail("cannot write {}: {}", path_.string(), reason(errno));
  temporary_.clear();
  sync_path(folder_of(path_));
}

void write_atomically(const fs::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

// ---- WorkFile

WorkFile::WorkFile(fs::path path, uint64_t keep) : path_(std::move(path)), size_(keep) {
  Fd file(::open(path_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666));
  struct stat info {};
  if (file.fd < 0 || ::fstat(file.fd, &info) != 0) fail("cannot write {}: {}", path_.string(), reason(errno));
  if (!S_ISREG(info.st_mode)) fail("cannot write {}: it is not a regular file", path_.string());
  if (uint64_t(info.st_size) < keep)
    fail("{} has {} bytes, but at least {} are expected", path_.string(), info.st_size, keep);
  if (::ftruncate(file.fd, off_t(keep)) != 0 || ::lseek(file.fd, off_t(keep), SEEK_SET) < 0)
    fail("cannot write {}: {}", path_.string(), reason(errno));
  fd_ = std::exchange(file.fd, -1);
}

WorkFile::~WorkFile() {
  if (fd_ >= 0) ::close(fd_);
}

void WorkFile::append(const void* data, size_t bytes) {
  write_all(fd_, data, bytes, path_);
  size_ += bytes;
}

void WorkFile::read(uint64_t offset, void* data, size_t bytes) const {
  SPS_CHECK(offset <= size_ && bytes <= size_ - offset);
  char* p = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, p, std::min(bytes, kPiece), off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("cannot read {}: {}", path_.string(), n < 0 ? reason(errno) : "it has become shorter");
    p += n;
    offset += uint64_t(n);
    bytes -= size_t(n);
  }
}

void WorkFile::sync() {
  sync_fd(fd_, path_);
}

// ---- AppendFile

namespace {

// Bytes up to and including the last newline.
off_t end_of_last_line(int fd, off_t size, const fs::path& path) {
  std::vector<char> block(65536);
  while (size > 0) {
    const off_t begin = std::max<off_t>(0, size - off_t(block.size()));
    const ssize_t n = ::pread(fd, block.data(), size_t(size - begin), begin);
    if (n < 0 && errno == EINTR) continue;
    if (n != size - begin)
      fail("cannot read {}: {}", path.string(), n < 0 ? reason(errno) : "it is changing");
    for (ssize_t i = n; i > 0; --i)
      if (block[size_t(i) - 1] == '\n') return begin + i;
    size = begin;
  }
  return 0;
}

}  // namespace

AppendFile::AppendFile(fs::path path) : path_(std::move(path)) {
  Fd file(::open(path_.c_str(), O_CREAT | O_RDWR | O_APPEND | O_CLOEXEC, 0666));
  struct stat info {};
  if (file.fd < 0 || ::fstat(file.fd, &info) != 0) fail("cannot write {}: {}", path_.string(), reason(errno));
  if (S_ISREG(info.st_mode)) {
    const off_t keep = end_of_last_line(file.fd, info.st_size, path_);
    if (keep != info.st_size && ::ftruncate(file.fd, keep) != 0)
      fail("cannot cut the torn last line of {}: {}", path_.string(), reason(errno));
  }
  fd_ = std::exchange(file.fd, -1);
}

AppendFile::~AppendFile() {
  if (fd_ >= 0) ::close(fd_);
}

void AppendFile::line(std::string_view text) {
  SPS_CHECK(text.find('\n') == std::string_view::npos);
  std::string whole(text);
  whole += '\n';
  struct stat before {};
  const bool known = ::fstat(fd_, &before) == 0 && S_ISREG(before.st_mode);
  try {
    write_all(fd_, whole.data(), whole.size(), path_);
  } catch (const Error&) {
    // A later line must not continue the torn one. Should this fail too, the next opening cuts it.
    [[maybe_unused]] const int failed = known ? ::ftruncate(fd_, before.st_size) : 0;
    throw;
  }
}

// ---- folders

void publish_directory(const fs::path& temporary_path, const fs::path& final_path) {
  const fs::path temporary = without_trailing_slash(temporary_path),
                 path = without_trailing_slash(final_path);
  std::error_code error;
  fs::recursive_directory_iterator entry(temporary, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const auto type = entry->symlink_status(error).type();
    if (type == fs::file_type::regular || type == fs::file_type::directory) sync_path(entry->path());
  }
  if (error) fail("cannot read the folder {}: {}", temporary.string(), error.message());
  sync_path(temporary);

  const bool replace = fs::exists(fs::symlink_status(path));
  if (replace && !fs::is_directory(fs::symlink_status(path)))
    fail("cannot put the folder {} in place: something that is not a folder has this name", path.string());
  int failed;
  if (replace) {
    failed = ::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE);
    if (failed != 0 && (errno == EINVAL || errno == ENOSYS)) {
      // No exchange on this file system: for a moment the folder has only its old version, under another
      // name.
      const fs::path old = temporary_beside(path);
      failed = ::rename(path.c_str(), old.c_str());
      if (failed == 0) failed = ::rename(temporary.c_str(), path.c_str());
      if (failed == 0) failed = ::rename(old.c_str(), temporary.c_str());
    }
  } else {
    failed = ::rename(temporary.c_str(), path.c_str());
  }
  if (failed != 0) fail("cannot put the folder {} in place: {}", path.string(), reason(errno));
  sync_path(folder_of(path));
  if (folder_of(temporary) != folder_of(path)) sync_path(folder_of(temporary));
  if (replace) {
    fs::remove_all(temporary, error);  // the replaced version
    if (error) fail("cannot remove the replaced folder {}: {}", temporary.string(), error.message());
  }
}

void make_writable_directory(const fs::path& given) {
  const fs::path path = without_trailing_slash(given);
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail("cannot create the folder {}: {}", path.string(), error.message());
  if (!fs::is_directory(path, error))
    fail("cannot create the folder {}: a file has this name", path.string());
  // Nameless if possible: then a kill at this moment leaves nothing.
  if (const Fd nameless(open_nameless(path)); nameless.fd >= 0) return;
  const fs::path probe = temporary_beside(path / "probe");
  const Fd fd(open_new(probe));
  if (fd.fd < 0) fail("cannot write in the folder {}: {}", path.string(), reason(errno));
  ::unlink(probe.c_str());
}

}  // namespace sps
