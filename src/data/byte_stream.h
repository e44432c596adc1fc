// A stream of bytes from a file or from standard input, unpacked on the way if it is gzip or zstd. What it is
// packed with is read from its first bytes. Several gzip members or zstd frames after one another are one
// stream; zero bytes after the last gzip member are padding.
//
// Errors, each naming the file: packed data that ends in the middle or is damaged (with the number of the
// byte) or has something else behind it, files packed twice, zip, bzip2, xz, 7z and tar archives, and an
// empty file whose name ends in .gz or .zst.
//
// Memory: two buffers of 256 KiB and the window of the packer: 32 KiB for gzip, for zstd what the frame asks
// for, up to 2 GiB (zstd --long=31; 8 MiB or less without such an option).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace sps {

class ByteStream {
 public:
  explicit ByteStream(const std::filesystem::path& path);  // "-" is standard input
  ~ByteStream();
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  // The bytes that come next, at least one unless the stream is at its end; valid until take().
  std::string_view peek() {
    if (begin_ == end_) refill();
    return {begin_, size_t(end_ - begin_)};
  }
  void take(size_t bytes) { begin_ += bytes; }  // of what peek() gave

  bool packed() const { return unpacker_ != nullptr; }
  const std::string& name() const { return name_; }  // for errors
  uint64_t bytes_read() const;                       // of the file as it is on disk

  class Source;    // the file
  class Unpacker;  // from the source into a buffer

 private:
  void refill();

  std::string name_;
  std::unique_ptr<Source> source_;
  std::unique_ptr<Unpacker> unpacker_;
  std::unique_ptr<char[]> buffer_;  // what the unpacker gave
  const char *begin_ = nullptr, *end_ = nullptr;
  const char* handed_ = nullptr;  // without an unpacker: where in the source's buffer the present piece began
};

// The format of a file that begins like this: "gzip", "zstd", "Parquet", "zip", "bzip2", "xz", "7z" or "tar".
// Empty for anything else, which may be text.
std::string_view packed_format(std::string_view head);

}  // namespace sps
