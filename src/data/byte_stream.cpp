#include "data/byte_stream.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/error.h"

namespace sps {
namespace {

constexpr size_t kBuffer = size_t{256} << 10;
constexpr int kZstdWindowLog = 31;
constexpr std::string_view kGzipMagic = "\x1F\x8B";
constexpr size_t kZstdMagicBytes = 4;

}  // namespace

std::string_view packed_format(std::string_view head) {
  struct Magic {
    std::string_view bytes, name;
    size_t offset = 0;
  };
  static constexpr Magic magics[] = {{kGzipMagic, "gzip"},
                                     {"\x28\xB5\x2F\xFD", "zstd"},
                                     {"PK\x03\x04", "zip"},
                                     {"1AY&SY", "bzip2", 4},
                                     {std::string_view("\xFD\x37zXZ\x00", 6), "xz"},
                                     {"7z\xBC\xAF\x27\x1C", "7z"},
                                     {"ustar", "tar", 257}};
  for (const Magic& magic : magics)
    if (head.size() > magic.offset && head.substr(magic.offset).starts_with(magic.bytes)) return magic.name;
  // Prose may begin with PAR1, but does not go on with a control character, as Parquet does.
  if (head.size() >= 5 && head.starts_with("PAR1") && uint8_t(head[4]) < ' ' && head[4] != '\n' &&
      head[4] != '\r' && head[4] != '\t')
    return "Parquet";
  // A zstd frame that is to be skipped; its first byte is 50 to 5F.
  if (head.size() >= 4 && (head[0] & 0xF0) == 0x50 && head.substr(1, 3) == "\x2A\x4D\x18") return "zstd";
  return {};
}

// The bytes of the file as they are on disk, through a buffer.
class ByteStream::Source {
 public:
  Source(const std::filesystem::path& path, const std::string& name) : name_(name) {
    if (path == "-") return;
    fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd_ < 0) fail("cannot open {}: {}", name_, std::generic_category().message(errno));
  }
  ~Source() {
    if (fd_ != STDIN_FILENO) ::close(fd_);
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  // What has not been taken: at least `wanted` bytes, which a buffer must hold, unless the file ends before.
  std::string_view peek(size_t wanted = 1) {
    if (end_ - begin_ < wanted && !at_end_) {
      std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
      // To the brim: a pipe gives little at a time, and few large pieces are fewer calls.
      while (end_ < kBuffer && !at_end_) {
        const ssize_t got = ::read(fd_, buffer_.get() + end_, kBuffer - end_);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
          fail("cannot read {} after byte {}: {}", name_, read_, std::generic_category().message(errno));
        at_end_ = got == 0;
        end_ += size_t(got);
        read_ += uint64_t(got);
      }
    }
    return {buffer_.get() + begin_, end_ - begin_};
  }
  void take(size_t bytes) { begin_ += bytes; }
  uint64_t taken() const { return read_ - (end_ - begin_); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  int fd_ = STDIN_FILENO;
  std::unique_ptr<char[]> buffer_{new char[kBuffer]};
  size_t begin_ = 0, end_ = 0;
  bool at_end_ = false;
  uint64_t read_ = 0;
};

class ByteStream::Unpacker {
 public:
  explicit Unpacker(Source& source) : source_(source) {}
  virtual ~Unpacker() = default;
  virtual size_t read(char* to, size_t room) = 0;  // 0 at the end only

 protected:
  [[noreturn]] void truncated() const {
    fail("{} is truncated: it ends after {} bytes, in the middle of {} data", source_.name(), source_.taken(),
         format());
  }
  [[noreturn]] void damaged(std::string_view what) const {
    fail("{} is damaged: its {} data cannot be unpacked near byte {} ({})", source_.name(), format(),
         source_.taken(), what);
  }
  [[noreturn]] void followed() const {
    fail("{} is damaged: after byte {} there is something that is not {} data", source_.name(),
         source_.taken(), format());
  }
  virtual const char* format() const = 0;

  Source& source_;
};

namespace {

class Gunzip final : public ByteStream::Unpacker {
 public:
  explicit Gunzip(ByteStream::Source& source) : Unpacker(source) {
    if (inflateInit2(&state_, 16 + MAX_WBITS) != Z_OK) fail("no memory to unpack {}", source.name());
  }
  ~Gunzip() override { inflateEnd(&state_); }

  size_t read(char* to, size_t room) override {
    state_.next_out = reinterpret_cast<Bytef*>(to);
    state_.avail_out = uInt(room);
    while (state_.avail_out == room && !finished_) {
      const std::string_view in = source_.peek();
      if (in.empty()) truncated();
      // zlib does not write to its input.
      state_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));
      state_.avail_in = uInt(in.size());
      const int status = inflate(&state_, Z_NO_FLUSH);
      source_.take(in.size() - state_.avail_in);
      if (status == Z_STREAM_END)
        next_member();
      else if (status == Z_MEM_ERROR)
        fail("no memory to unpack {}", source_.name());
      else if (status != Z_OK && status != Z_BUF_ERROR)
        damaged(status == Z_NEED_DICT ? "a dictionary is asked for" : state_.msg ? state_.msg : "unknown");
    }
    return room - state_.avail_out;
  }

 private:
  const char* format() const override { return "gzip"; }
  void next_member() {
    if (source_.peek(kGzipMagic.size()).starts_with(kGzipMagic)) {
      if (inflateReset(&state_) != Z_OK) damaged("the next member cannot be begun");
      return;
    }
    for (std::string_view rest; !(rest = source_.peek()).empty(); source_.take(rest.size()))
      if (rest.find_first_not_of('\0') != std::string_view::npos) followed();
    finished_ = true;
  }

  z_stream state_{};
  bool finished_ = false;
};

class Unzstd final : public ByteStream::Unpacker {
 public:
  explicit Unzstd(ByteStream::Source& source) : Unpacker(source) {
    if (!state_ || ZSTD_isError(ZSTD_DCtx_setParameter(state_.get(), ZSTD_d_windowLogMax, kZstdWindowLog)))
      fail("no memory to unpack {}", source.name());
  }

  size_t read(char* to, size_t room) override {
    ZSTD_outBuffer out{to, room, 0};
    while (out.pos == 0) {
      const std::string_view bytes = source_.peek(in_frame_ ? 1 : kZstdMagicBytes);
      if (bytes.empty() && !in_frame_) break;
      if (!in_frame_ && packed_format(bytes) != "zstd") followed();
      ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
      const size_t status = ZSTD_decompressStream(state_.get(), &out, &in);
      source_.take(in.pos);
      if (ZSTD_isError(status)) damaged(ZSTD_getErrorName(status));
      if (bytes.empty() && out.pos == 0) truncated();
      in_frame_ = status != 0;
    }
    return out.pos;
  }

 private:
  const char* format() const override { return "zstd"; }
  struct Free {
    void operator()(ZSTD_DCtx* state) const { ZSTD_freeDCtx(state); }
  };
  std::unique_ptr<ZSTD_DCtx, Free> state_{ZSTD_createDCtx()};
  bool in_frame_ = false;
};

}  // namespace

ByteStream::ByteStream(const std::filesystem::path& path)
    : name_(path == "-" ? "standard input" : path.string()), source_(std::make_unique<Source>(path, name_)) {
  constexpr size_t kHead = 512;  // up to where tar has its magic
  const std::string_view head = source_->peek(kHead), format = packed_format(head);
  const std::string extension = path.extension().string();
  if (head.empty() && (extension == ".gz" || extension == ".zst"))
    fail("{} is truncated: it is empty, but should hold {} data", name_,
         extension == ".gz" ? "gzip" : "zstd");
  if (format == "gzip") unpacker_ = std::make_unique<Gunzip>(*source_);
  if (format == "zstd") unpacker_ = std::make_unique<Unzstd>(*source_);
  if (!unpacker_) {
    if (!format.empty() && format != "Parquet")
      fail("{} is a {} file, but only gzip and zstd are unpacked here: unpack it first", name_, format);
    return;
  }
  buffer_ = std::unique_ptr<char[]>(new char[kBuffer]);
  const std::string_view inner = packed_format(peek());
  if (!inner.empty())
    fail("{} holds a {} file, packed once more with {}: unpack it first", name_, inner, format);
}

ByteStream::~ByteStream() = default;

void ByteStream::refill() {
  if (unpacker_) {
    begin_ = buffer_.get();
    end_ = begin_ + unpacker_->read(buffer_.get(), kBuffer);
    return;
  }
  source_->take(size_t(end_ - handed_));
  const std::string_view bytes = source_->peek();
  begin_ = handed_ = bytes.data();
  end_ = begin_ + bytes.size();
}

uint64_t ByteStream::bytes_read() const {
  return source_->taken() + (unpacker_ ? 0 : uint64_t(begin_ - handed_));
}

}  // namespace sps
