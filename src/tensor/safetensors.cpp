#include "tensor/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/threads.h"
#include "tensor/device.h"

namespace sps {

static_assert(std::endian::native == std::endian::little, "the data is copied as it stands");

namespace {

using nlohmann::json;

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr std::string_view kMetadata = "__metadata__";

struct TypeRow {
  StoredType type;
  std::string_view name;
  size_t size;
};
constexpr std::array kTypes{
    TypeRow{StoredType::f64, "F64", 8},         TypeRow{StoredType::f32, "F32", 4},
    TypeRow{StoredType::f16, "F16", 2},         TypeRow{StoredType::bf16, "BF16", 2},
    TypeRow{StoredType::f8_e5m2, "F8_E5M2", 1}, TypeRow{StoredType::f8_e4m3, "F8_E4M3", 1},
    TypeRow{StoredType::i64, "I64", 8},         TypeRow{StoredType::i32, "I32", 4},
    TypeRow{StoredType::i16, "I16", 2},         TypeRow{StoredType::i8, "I8", 1},
    TypeRow{StoredType::u64, "U64", 8},         TypeRow{StoredType::u32, "U32", 4},
    TypeRow{StoredType::u16, "U16", 2},         TypeRow{StoredType::u8, "U8", 1},
    TypeRow{StoredType::boolean, "BOOL", 1},
};

const TypeRow& row_of(StoredType type) {
  for (const TypeRow& row : kTypes)
    if (row.type == type) return row;
  SPS_CHECK(!"a stored type is missing in the table");
  return kTypes[0];
}

int64_t element_count(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t d : shape) {
    SPS_CHECK(d >= 0);
    SPS_CHECK(!__builtin_mul_overflow(count, d, &count));
  }
  return count;
}

// One tensor to write: `rows` runs of `row_bytes`, `stride_bytes` apart.
struct Piece {
  std::string name;
  StoredType dtype;
  std::vector<int64_t> shape;
  const std::byte* data;
  uint64_t rows, row_bytes, stride_bytes;
  Device device = Device::cpu;
  uint64_t bytes() const { return rows * row_bytes; }
};

WrittenFile write_pieces(const std::filesystem::path& path, std::vector<Piece> pieces,
                         const Metadata& metadata) {
  SPS_CHECK(!pieces.empty());
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    const size_t wide_a = stored_size(a.dtype), wide_b = stored_size(b.dtype);
    return wide_a != wide_b ? wide_a > wide_b : a.name < b.name;
  });
  json header = json::object();  // its keys are sorted
  if (!metadata.empty()) header[std::string(kMetadata)] = metadata;
  uint64_t offset = 0;
  for (const Piece& piece : pieces) {
    SPS_CHECK(!piece.name.empty() && piece.name != kMetadata && !header.contains(piece.name));
    header[piece.name] = {{"dtype", stored_name(piece.dtype)},
                          {"shape", piece.shape},
                          {"data_offsets", {offset, offset + piece.bytes()}}};
    offset += piece.bytes();
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > kMaxHeader)
    fail(
        "cannot write {}: the header would have {} bytes and readers accept at most {}; write fewer tensors "
        "to a file",
        path.string(), text.size(), kMaxHeader);

  AtomicFile file(path);
  Hasher hasher;
  const auto put = [&](const void* data, size_t bytes) {
    file.write(data, bytes);
    hasher.update(data, bytes);
  };
  const uint64_t length = text.size();
  put(&length, sizeof(length));
  put(text.data(), text.size());
  Bytes staging;  // what lies on a GPU passes through it
  for (const Piece& piece : pieces)
    for (uint64_t r = 0; r < piece.rows; ++r) {
      const std::byte* row = piece.data + r * piece.stride_bytes;
      if (piece.device == Device::cpu) {
        put(row, piece.row_bytes);
        continue;
      }
      constexpr uint64_t kAtOnce = uint64_t{64} << 20;
      if (staging.size() == 0) staging = Bytes(kAtOnce, Memory::pinned);
      for (uint64_t done = 0; done < piece.row_bytes; done += kAtOnce) {
        const uint64_t n = std::min(kAtOnce, piece.row_bytes - done);
        const Exec ex = open_gpu();
        copy_bytes(ex, staging.data(), row + done, n);
        synchronize(ex);
        put(staging.data(), n);
      }
    }
  file.commit();
  return {file.written(), hasher.digest()};
}

// Rows of a tensor as runs of bytes; a dense tensor is one run.
struct Runs {
  std::byte* data;
  uint64_t rows, row_bytes, stride_bytes;
};
Runs runs_of(const NamedTensor& named) {
  const Tensor& t = named.tensor;
  SPS_CHECK(element_count(named.shape) == t.count());
  SPS_CHECK(t.data != nullptr || t.empty());
  const uint64_t size = dtype_size(t.dtype);
  auto* data = static_cast<std::byte*>(t.data);
  if (t.empty()) return {data, 0, 0, 0};
  if (t.dense()) return {data, 1, uint64_t(t.count()) * size, 0};
  return {data, uint64_t(t.rows), uint64_t(t.cols) * size, uint64_t(t.stride) * size};
}

bool is_rounded(const StoredTensor& stored, const NamedTensor& named) {
  return stored.dtype == StoredType::f32 && named.tensor.dtype == DType::bf16;
}

// f32 numbers of a file, which may lie at any address, to rows of bf16, some megabytes at a time.
void copy_rounded(const Exec& ex, const std::byte* source, const Runs& runs) {
  constexpr size_t kAtOnce = size_t{4} << 20;
  const size_t row = runs.row_bytes / sizeof(bf16);
  std::vector<bf16> rounded(std::min(row, kAtOnce));
  for (uint64_t r = 0; r < runs.rows; ++r)
    for (size_t from = 0; from < row; from += kAtOnce) {
      const size_t count = std::min(kAtOnce, row - from);
      const std::byte* const numbers = source + (r * row + from) * sizeof(float);
      parallel_chunks(int64_t(count), 1 << 14, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          float x;
          std::memcpy(&x, numbers + size_t(i) * sizeof(x), sizeof(x));
          rounded[size_t(i)] = bf16(x);
        }
      });
      copy_bytes(ex, runs.data + r * runs.stride_bytes + from * sizeof(bf16), rounded.data(),
                 count * sizeof(bf16));
      synchronize(ex);
    }
}

}  // namespace

size_t stored_size(StoredType type) {
  return row_of(type).size;
}
std::string_view stored_name(StoredType type) {
  return row_of(type).name;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t d : shape) text += fmt::format("{}{}", text.empty() ? "" : ", ", d);
  return fmt::format("[{}]", text);
}

std::optional<StoredType> stored_from_name(std::string_view name) {
  for (const TypeRow& row : kTypes)
    if (row.name == name) return row.type;
  return std::nullopt;
}

StoredType stored_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return StoredType::f64;
    case DType::f32:
      return StoredType::f32;
    case DType::bf16:
      return StoredType::bf16;
    case DType::i32:
      return StoredType::i32;
  }
  SPS_CHECK(!"a dtype has no stored type");
  return StoredType::f32;
}

WrittenFile write_safetensors(const std::filesystem::path& path,
                              const std::map<std::string, StoredTensor>& tensors, const Metadata& metadata) {
  std::vector<Piece> pieces;
  for (const auto& [name, t] : tensors) {
    SPS_CHECK(uint64_t(element_count(t.shape)) * stored_size(t.dtype) == t.bytes);
    pieces.push_back({name, t.dtype, t.shape, static_cast<const std::byte*>(t.data), t.bytes > 0, t.bytes, 0,
                      Device::cpu});
  }
  return write_pieces(path, std::move(pieces), metadata);
}

WrittenFile write_safetensors(const std::filesystem::path& path, std::span<const NamedTensor> tensors,
                              const Metadata& metadata) {
  std::vector<Piece> pieces;
  for (const NamedTensor& named : tensors) {
    const Runs runs = runs_of(named);
    pieces.push_back({named.name, stored_type(named.tensor.dtype), named.shape, runs.data, runs.rows,
                      runs.row_bytes, runs.stride_bytes, named.tensor.device});
  }
  return write_pieces(path, std::move(pieces), metadata);
}

SafeTensors::SafeTensors(const std::filesystem::path& path) : name_(path.string()), file_(path) {
  parse(file_.bytes());
}

SafeTensors::SafeTensors(std::span<const std::byte> bytes, std::string name) : name_(std::move(name)) {
  parse(bytes);
}

namespace {

// Reads one entry of the header; offsets are returned beside the tensor and checked against each other later.
struct Entry {
  const std::string* name;
  StoredTensor tensor;
  uint64_t begin, end;
};

class HeaderReader {
 public:
  HeaderReader(const std::string& file, uint64_t data_bytes) : file_(file), data_bytes_(data_bytes) {}

  Metadata metadata(const json& value) const {
    if (!value.is_object()) bad("{} is a JSON {}, expected an object", kMetadata, value.type_name());
    Metadata metadata;
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) bad("{} '{}' is a JSON {}, expected a string", kMetadata, key, text.type_name());
      metadata[key] = text.get<std::string>();
    }
    return metadata;
  }

  Entry entry(const std::string& name, const json& value) const {
    if (name.empty()) bad("a tensor has an empty name");
    if (!value.is_object())
      bad("tensor '{}' is described by a JSON {}, expected an object", name, value.type_name());
    for (const auto& [key, unused] : value.items())
      if (key != "dtype" && key != "shape" && key != "data_offsets")
        bad("tensor '{}' has an unknown field '{}'", name, key);
    for (const char* key : {"dtype", "shape", "data_offsets"})
      if (!value.contains(key)) bad("tensor '{}' has no {}", name, key);

    Entry entry{&name, {}, 0, 0};
    const json& dtype = value["dtype"];
    const auto type =
        dtype.is_string() ? stored_from_name(dtype.get_ref<const std::string&>()) : std::nullopt;
    if (!type) bad("tensor '{}' has the unknown dtype {}", name, dump_json(dtype));
    entry.tensor.dtype = *type;

    const json& shape = value["shape"];
    if (!shape.is_array()) bad("tensor '{}' has the shape {}, expected a list", name, dump_json(shape));
    uint64_t bytes = stored_size(*type);
    bool zero = false, overflow = false;
    for (const json& d : shape) {
      if (!d.is_number_unsigned() || d.get<uint64_t>() > uint64_t(INT64_MAX))
        bad("tensor '{}' has the dimension {}, expected an integer of at least 0", name, dump_json(d));
      zero |= d == 0;
      overflow |= !zero && __builtin_mul_overflow(bytes, d.get<uint64_t>(), &bytes);
      entry.tensor.shape.push_back(d.get<int64_t>());
    }
    if (overflow && !zero)
      bad("tensor '{}' of shape {} is larger than any file", name, shape_text(entry.tensor.shape));
    entry.tensor.bytes = zero ? 0 : bytes;

    const json& offsets = value["data_offsets"];
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned())
      bad("tensor '{}' has the data_offsets {}, expected two integers of at least 0", name,
          dump_json(offsets));
    entry.begin = offsets[0].get<uint64_t>(), entry.end = offsets[1].get<uint64_t>();
    if (entry.begin > entry.end)
      bad("tensor '{}' ends at offset {} before it begins at {}", name, entry.end, entry.begin);
    if (entry.end > data_bytes_)
      bad("tensor '{}' ends at offset {} but there are {} bytes of data", name, entry.end, data_bytes_);
    if (entry.end - entry.begin != entry.tensor.bytes)
      bad("tensor '{}' takes {} bytes but {} {} needs {}", name, entry.end - entry.begin, stored_name(*type),
          shape_text(entry.tensor.shape), entry.tensor.bytes);
    return entry;
  }

  // The ranges must follow each other without overlaps and gaps from the first to the last byte.
  void check_ranges(std::vector<Entry>& entries) const {
    if (entries.empty()) bad("it holds no tensors");
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    uint64_t covered = 0;
    const Entry* previous = nullptr;
    for (const Entry& e : entries) {
      if (e.begin < covered) bad("tensors '{}' and '{}' overlap", *previous->name, *e.name);
      if (e.begin > covered)
        bad("{} bytes before tensor '{}' belong to no tensor", e.begin - covered, *e.name);
      covered = e.end;
      previous = &e;
    }
    if (covered != data_bytes_)
      bad("{} bytes after the last tensor belong to no tensor", data_bytes_ - covered);
  }

  template <class... Args>
  [[noreturn]] void bad(fmt::format_string<Args...> format, Args&&... args) const {
    fail("{} is not a valid safetensors file: {}", file_, fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  const std::string& file_;
  uint64_t data_bytes_;
};

}  // namespace

void SafeTensors::parse(std::span<const std::byte> bytes) {
  uint64_t length = 0;
  if (bytes.size() < sizeof(length))
    HeaderReader(name_, 0).bad("it has {} bytes and the header's length alone takes 8", bytes.size());
  std::memcpy(&length, bytes.data(), sizeof(length));
  const uint64_t rest = bytes.size() - sizeof(length);
  const HeaderReader reader(name_, rest - std::min(length, rest));
  if (length > kMaxHeader)
    reader.bad("its header would have {} bytes, more than the {} allowed", length, kMaxHeader);
  if (length > rest) reader.bad("its header would have {} bytes and only {} follow", length, rest);
  const std::byte* data = bytes.data() + sizeof(length) + length;
  const std::string_view text(reinterpret_cast<const char*>(bytes.data() + sizeof(length)), length);
  if (!text.starts_with('{')) reader.bad("its header is not a JSON object");

  const json header = parse_json(text, fmt::format("the header of {}", name_));
  std::vector<Entry> entries;
  for (const auto& item : header.items())
    if (item.key() == kMetadata) metadata_ = reader.metadata(item.value());
  for (auto it = header.begin(); it != header.end(); ++it)
    if (it.key() != kMetadata) entries.push_back(reader.entry(it.key(), it.value()));
  reader.check_ranges(entries);
  for (Entry& e : entries) {
    e.tensor.data = data + e.begin;
    tensors_.emplace(*e.name, std::move(e.tensor));
  }
}

const StoredTensor& SafeTensors::at(const std::string& tensor) const {
  const auto found = tensors_.find(tensor);
  if (found == tensors_.end()) fail("{} has no tensor '{}'", name_, tensor);
  return found->second;
}

void read_into(const SafeTensors& file, std::span<const NamedTensor> tensors) {
  std::set<std::string_view> wanted;
  for (const NamedTensor& named : tensors) {
    SPS_CHECK(wanted.insert(named.name).second);
    const StoredTensor& stored = file.at(named.name);
    if (stored.shape != named.shape)
      fail("{}: tensor '{}' has shape {}, expected {}", file.name(), named.name, shape_text(stored.shape),
           shape_text(named.shape));
    if (stored.dtype != stored_type(named.tensor.dtype) && !is_rounded(stored, named))
      fail("{}: tensor '{}' has dtype {}, expected {}", file.name(), named.name, stored_name(stored.dtype),
           stored_name(stored_type(named.tensor.dtype)));
  }
  for (const auto& [name, unused] : file.tensors())
    if (!wanted.contains(name)) fail("{} has an unexpected tensor '{}'", file.name(), name);
  for (const NamedTensor& named : tensors) {
    const Runs runs = runs_of(named);
    const auto* source = static_cast<const std::byte*>(file.at(named.name).data);
    const Exec ex = exec_on(named.tensor.device);
    if (is_rounded(file.at(named.name), named)) {
      copy_rounded(ex, source, runs);
      continue;
    }
    for (uint64_t r = 0; r < runs.rows; ++r)
      copy_bytes(ex, runs.data + r * runs.stride_bytes, source + r * runs.row_bytes, runs.row_bytes);
    synchronize(ex);
  }
}

}  // namespace sps
