#include "data/parquet_documents.h"

#include "base/error.h"

#ifdef SPS_HAS_PARQUET

#include <parquet/api/reader.h>
#include <parquet/exception.h>

#include <algorithm>
#include <array>
#include <exception>
#include <new>

namespace sps {
namespace {

constexpr size_t kColumnsShown = 30;
constexpr int64_t kReadBuffer = int64_t{1} << 20;

// The values of one column of one row group, one after the other.
template <class Type>
class Cursor {
 public:
  using Value = typename Type::c_type;
  Cursor(parquet::RowGroupReader& group, int column)
      : reader_(std::static_pointer_cast<parquet::TypedColumnReader<Type>>(group.Column(column))),
        full_level_(reader_->descr()->max_definition_level()) {}

  // The next row's value, valid until the next call; nullptr for a null.
  const Value* next() {
    if (level_ == levels_read_) refill();
    const bool there = full_level_ == 0 || levels_[size_t(level_)] == full_level_;
    ++level_;
    if (!there) return nullptr;
    if (value_ == values_read_) throw parquet::ParquetException("a page has fewer values than it says");
    return &values_[size_t(value_++)];
  }

 private:
  // Few at a time, as an encoding may blow a small page up, and none beyond the page.
  static constexpr int64_t kBatch = 64;
  void refill() {
    level_ = value_ = values_read_ = 0;
    levels_read_ = reader_->ReadBatch(kBatch, levels_.data(), nullptr, values_.data(), &values_read_);
    if (levels_read_ <= 0) throw parquet::ParquetException("a column has fewer rows than its row group");
  }

  std::shared_ptr<parquet::TypedColumnReader<Type>> reader_;
  int16_t full_level_;
  std::array<int16_t, kBatch> levels_{};
  std::array<Value, kBatch> values_{};
  int64_t level_ = 0, levels_read_ = 0, value_ = 0, values_read_ = 0;
};

using Bytes = Cursor<parquet::ByteArrayType>;

}  // namespace

struct ParquetDocuments::State {
  std::string path;
  std::unique_ptr<parquet::ParquetFileReader> file;
  std::shared_ptr<parquet::FileMetaData> metadata;
  int text_column = -1, id_column = -1;  // -1: none
  int group = -1;                        // that is open or was passed over last
  uint64_t left = 0;                     // rows of it
  uint64_t row = 0;
  std::unique_ptr<Bytes> text, id_text;
  std::unique_ptr<Cursor<parquet::Int32Type>> id_int32;
  std::unique_ptr<Cursor<parquet::Int64Type>> id_int64;

  // The library throws on bad files; what it says becomes part of our sentence.
  template <class Call>
  auto guarded(Call&& call) {
    try {
      return call();
    } catch (const Error&) {
      throw;
    } catch (const std::bad_alloc&) {
      fail("{}: no memory to read its Parquet data at row {}", path, row);
    } catch (const std::exception& e) {
      std::string what = e.what();
      std::replace(what.begin(), what.end(), '\n', ' ');
      fail("{} is truncated or damaged: its Parquet data cannot be read at row {} ({})", path, row, what);
    }
  }

  int find(std::string_view name) const {
    for (int i = 0; i < metadata->num_columns(); ++i)
      if (metadata->schema()->Column(i)->path()->ToDotString() == name) return i;
    return -1;
  }

  void open(std::string_view text_name, std::string_view id_name) {
    parquet::ReaderProperties properties;
    properties.enable_buffered_stream();
    properties.set_buffer_size(kReadBuffer);
    file = parquet::ParquetFileReader::OpenFile(path, false, properties);
    metadata = file->metadata();
    text_column = find(text_name);
    if (text_column < 0) {
      std::string names;
      for (int i = 0; i < metadata->num_columns(); ++i) {
        if (size_t(i) == kColumnsShown) {
          names += ", ...";
          break;
        }
        names += (i == 0 ? "" : ", ") + metadata->schema()->Column(i)->path()->ToDotString();
      }
      fail("{} has no column '{}' (its columns: {}); name the text's column with --text-field", path,
           text_name, names.empty() ? "none" : names);
    }
    const parquet::ColumnDescriptor& text_type = *metadata->schema()->Column(text_column);
    if (text_type.max_repetition_level() > 0)
      fail("{}: the column '{}' is within a list, but one text a row is expected", path, text_name);
    if (text_type.physical_type() != parquet::Type::BYTE_ARRAY ||
        text_type.converted_type() == parquet::ConvertedType::DECIMAL)
      fail("{}: the column '{}' should hold strings, but it holds {}", path, text_name,
           parquet::TypeToString(text_type.physical_type()));
    id_column = id_name == text_name ? -1 : find(id_name);
    if (id_column < 0) return;
    const parquet::ColumnDescriptor& id_type = *metadata->schema()->Column(id_column);
    const auto type = id_type.physical_type();
    if (id_type.max_repetition_level() > 0 || id_type.converted_type() == parquet::ConvertedType::DECIMAL ||
        (type != parquet::Type::BYTE_ARRAY && type != parquet::Type::INT32 && type != parquet::Type::INT64))
      id_column = -1;
  }

  uint64_t rows_of(int number) const {
    const int64_t rows = metadata->RowGroup(number)->num_rows();
    if (rows < 0) throw parquet::ParquetException("a row group has a negative number of rows");
    return uint64_t(rows);
  }

  void close_group() {
    text.reset(), id_text.reset(), id_int32.reset(), id_int64.reset();
    left = 0;
  }

  // Whether there is a row; without opening its columns.
  bool find_row() {
    while (left == 0) {
      close_group();
      if (group + 1 >= metadata->num_row_groups()) return false;
      left = rows_of(++group);
    }
    return true;
  }

  void open_group() {
    const auto reader = file->RowGroup(group);
    text = std::make_unique<Bytes>(*reader, text_column);
    if (id_column < 0) return;
    const auto type = metadata->schema()->Column(id_column)->physical_type();
    if (type == parquet::Type::BYTE_ARRAY) id_text = std::make_unique<Bytes>(*reader, id_column);
    if (type == parquet::Type::INT32)
      id_int32 = std::make_unique<Cursor<parquet::Int32Type>>(*reader, id_column);
    if (type == parquet::Type::INT64)
      id_int64 = std::make_unique<Cursor<parquet::Int64Type>>(*reader, id_column);
  }

  // The next row of the open group.
  bool next(std::string* to_text, std::string* to_id) {
    if (!find_row()) return false;
    if (!text) open_group();
    const auto copy = [](const parquet::ByteArray* value, std::string* to) {
      if (to != nullptr && value != nullptr && value->len > 0)
        to->assign(reinterpret_cast<const char*>(value->ptr), value->len);
      else if (to != nullptr)
        to->clear();
    };
    const auto number = [](const auto* value, std::string* to) {
      if (to != nullptr && value != nullptr)
        *to = std::to_string(*value);
      else if (to != nullptr)
        to->clear();
    };
    copy(text->next(), to_text);
    if (id_text)
      copy(id_text->next(), to_id);
    else if (id_int32)
      number(id_int32->next(), to_id);
    else if (id_int64)
      number(id_int64->next(), to_id);
    else if (to_id != nullptr)
      to_id->clear();
    --left;
    ++row;
    return true;
  }

  uint64_t skip(uint64_t rows) {
    uint64_t skipped = 0;
    while (skipped < rows && find_row()) {
      if (const uint64_t whole = left; whole <= rows - skipped) {
        skipped += whole;
        row += whole;
        close_group();
      } else {
        next(nullptr, nullptr);
        ++skipped;
      }
    }
    return skipped;
  }
};

ParquetDocuments::ParquetDocuments(const std::filesystem::path& path, std::string_view text_column,
                                   std::string_view id_column)
    : state_(std::make_unique<State>()) {
  state_->path = path.string();
  state_->guarded([&] { state_->open(text_column, id_column); });
}

bool ParquetDocuments::next(std::string& text, std::string& id) {
  return state_->guarded([&] { return state_->next(&text, &id); });
}

uint64_t ParquetDocuments::skip(uint64_t rows) {
  return state_->guarded([&] { return state_->skip(rows); });
}

uint64_t ParquetDocuments::row() const {
  return state_->row;
}

uint64_t ParquetDocuments::rows() const {
  return uint64_t(std::max<int64_t>(state_->metadata->num_rows(), 0));
}

bool ParquetDocuments::supported() {
  return true;
}

}  // namespace sps

#else

namespace sps {

struct ParquetDocuments::State {};

ParquetDocuments::ParquetDocuments(const std::filesystem::path& path, std::string_view, std::string_view) {
  fail(
      "{} is a Parquet file, but this build of sps has no Parquet support: install pyarrow for some Python "
      "and "
      "build again with -DSPS_PYTHON=THAT_PYTHON, or convert the file to .jsonl",
      path.string());
}

bool ParquetDocuments::next(std::string&, std::string&) {
  return false;
}

uint64_t ParquetDocuments::skip(uint64_t) {
  return 0;
}

uint64_t ParquetDocuments::row() const {
  return 0;
}

uint64_t ParquetDocuments::rows() const {
  return 0;
}

bool ParquetDocuments::supported() {
  return false;
}

}  // namespace sps

#endif

namespace sps {

ParquetDocuments::~ParquetDocuments() = default;

}  // namespace sps
