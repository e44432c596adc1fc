#include "tensor/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/test_dir.h"

namespace sps {
namespace {

// A file made of a header and data, with the length in front unless another one is given.
std::string file_of(const std::string& header, const std::string& data = "",
                    std::optional<uint64_t> length = {}) {
  const uint64_t n = length.value_or(header.size());
  std::string file(8, '\0');
  std::memcpy(file.data(), &n, 8);
  return file + header + data;
}

SafeTensors open(const std::string& bytes) {
  return SafeTensors(std::as_bytes(std::span(bytes.data(), bytes.size())), "x.safetensors");
}

// The error's sentence without the part that all share.
std::string why(const std::string& bytes) {
  std::string sentence = error_of([&] { open(bytes); });
  const std::string common = "x.safetensors is not a valid safetensors file: ";
  return sentence.starts_with(common) ? sentence.substr(common.size()) : sentence;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return fmt::format(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}

std::string header_of(std::initializer_list<std::string> entries) {
  std::string text;
  for (const std::string& e : entries) {
    text += text.empty() ? '{' : ',';
    text += e;
  }
  return text += '}';
}

struct Sample {
  std::vector<float> weights = std::vector<float>(6);
  std::vector<double> wide = std::vector<double>(3);
  std::vector<bf16> narrow = std::vector<bf16>(5);
  std::vector<int32_t> ids = std::vector<int32_t>(7);
  Sample() {
    std::iota(weights.begin(), weights.end(), 0.5f);
    std::iota(wide.begin(), wide.end(), -1.0);
    for (size_t i = 0; i < narrow.size(); ++i) narrow[i] = bf16(float(i) * 0.25f);
    std::iota(ids.begin(), ids.end(), -3);
  }
  std::vector<NamedTensor> tensors() {
    return {{"w", {2, 3}, view(weights.data(), 2, 3)},
            {"wide", {3}, view(wide.data(), 1, 3)},
            {"a.narrow", {5, 1}, view(narrow.data(), 5, 1)},
            {"ids", {7}, view(ids.data(), 1, 7)},
            {"none", {0, 4}, view(weights.data(), 0, 4)}};
  }
};

TEST(SafeTensors, WhatIsWrittenIsReadBack) {
  const TestDir dir;
  Sample sample;
  const auto path = dir / "a.safetensors";
  const WrittenFile written = write_safetensors(path, sample.tensors(), {{"format", "pt"}, {"note", "h\"i"}});
  const std::string bytes = read_text(path);
  EXPECT_EQ(written.bytes, bytes.size());
  EXPECT_EQ(written.hash, hash64(bytes));

  const SafeTensors file(path);
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}, {"note", "h\"i"}}));
  ASSERT_EQ(file.tensors().size(), 5u);
  EXPECT_EQ(file.at("w").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file.at("w").dtype, StoredType::f32);
  EXPECT_EQ(file.at("none").bytes, 0u);
  for (const auto& [name, t] : file.tensors())
    EXPECT_EQ(reinterpret_cast<uintptr_t>(t.data) % stored_size(t.dtype), 0u) << name << " is not aligned";

  Sample empty;
  for (auto* v : {&empty.weights}) std::fill(v->begin(), v->end(), 0.0f);
  std::fill(empty.wide.begin(), empty.wide.end(), 0.0);
  std::fill(empty.narrow.begin(), empty.narrow.end(), bf16(0.0f));
  std::fill(empty.ids.begin(), empty.ids.end(), 0);
  read_into(file, empty.tensors());
  EXPECT_EQ(empty.weights, sample.weights);
  EXPECT_EQ(empty.wide, sample.wide);
  EXPECT_EQ(empty.ids, sample.ids);
  EXPECT_EQ(0, std::memcmp(empty.narrow.data(), sample.narrow.data(), 10));
}

TEST(SafeTensors, BytesAreAsTheFormatSays) {
  const TestDir dir;
  const uint8_t mask[3] = {1, 2, 3};
  const int64_t big[1] = {-2};
  write_safetensors(dir / "b", {{"a", {StoredType::u8, {3}, mask, 3}}, {"b", {StoredType::i64, {}, big, 8}}});
  // Wider elements come first in the data although 'a' comes first in the header.
  const std::string header =
      R"({"a":{"data_offsets":[8,11],"dtype":"U8","shape":[3]},"b":{"data_offsets":[0,8],"dtype":"I64","shape":[]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(read_text(dir / "b"), file_of(padded, "\xFE\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01\x02\x03"));
}

TEST(SafeTensors, StridedTensorsAreStoredDense) {
  const TestDir dir;
  std::vector<float> all(12);
  std::iota(all.begin(), all.end(), 0.0f);
  const Tensor middle = view(all.data(), 3, 4).cols_from(1, 2);
  write_safetensors(dir / "s", std::vector<NamedTensor>{{"m", {3, 2}, middle}});
  const SafeTensors file(dir / "s");
  float got[6];
  std::memcpy(got, file.at("m").data, sizeof(got));
  EXPECT_EQ(std::vector<float>(got, got + 6), (std::vector<float>{1, 2, 5, 6, 9, 10}));
  std::vector<float> target(12, -1.0f);
  read_into(file, std::vector<NamedTensor>{{"m", {3, 2}, view(target.data(), 3, 4).cols_from(1, 2)}});
  EXPECT_EQ(target, (std::vector<float>{-1, 1, 2, -1, -1, 5, 6, -1, -1, 9, 10, -1}));
}

TEST(SafeTensors, Bf16TakesF32Rounded) {
  const TestDir dir;
  // Ties to even, both ways; what rounds up to the next power of two; signs, zero, infinity, NaN.
  const std::vector<float> all{1.00390625F, 1.01171875F, 1.9999999F, -3.1415927F,
                               -0.0F,       INFINITY,    NAN,        1e-40F};
  write_safetensors(dir / "r", std::vector<NamedTensor>{{"m", {4, 2}, view(all.data(), 4, 2)}});
  const SafeTensors file(dir / "r");
  std::vector<bf16> target(16, bf16(7.0F)), want = target;
  for (size_t i = 0; i < all.size(); ++i) want[i / 2 * 4 + 1 + i % 2] = bf16(all[i]);
  read_into(file, std::vector<NamedTensor>{{"m", {4, 2}, view(target.data(), 4, 4).cols_from(1, 2)}});
  EXPECT_EQ(0, std::memcmp(target.data(), want.data(), want.size() * sizeof(bf16)));
  // More numbers than are rounded at once.
  std::vector<float> many((size_t{4} << 20) + 5);
  for (size_t i = 0; i < many.size(); ++i) many[i] = float(i) * 1e-3F;
  write_safetensors(
      dir / "l",
      std::vector<NamedTensor>{{"m", {int64_t(many.size())}, view(many.data(), 1, int64_t(many.size()))}});
  std::vector<bf16> got(many.size());
  read_into(SafeTensors(dir / "l"),
            std::vector<NamedTensor>{{"m", {int64_t(got.size())}, view(got.data(), 1, int64_t(got.size()))}});
  for (size_t i = 0; i < many.size(); ++i) ASSERT_EQ(got[i].bits, bf16(many[i]).bits) << i;
}

TEST(SafeTensors, EveryTypeIsKnownByItsName) {
  for (const auto& [name, size] : std::map<std::string, size_t>{{"F64", 8},
                                                                {"F32", 4},
                                                                {"F16", 2},
                                                                {"BF16", 2},
                                                                {"I64", 8},
                                                                {"I32", 4},
                                                                {"I16", 2},
                                                                {"I8", 1},
                                                                {"U64", 8},
                                                                {"U32", 4},
                                                                {"U16", 2},
                                                                {"U8", 1},
                                                                {"BOOL", 1},
                                                                {"F8_E5M2", 1},
                                                                {"F8_E4M3", 1}}) {
    const std::string header = header_of({entry("t", name, "[2]", fmt::format("[0,{}]", 2 * size))});
    const std::string bytes = file_of(header, std::string(2 * size, 'x'));
    const SafeTensors file = open(bytes);
    EXPECT_EQ(stored_name(file.at("t").dtype), name);
    EXPECT_EQ(file.at("t").count(), 2);
  }
}

TEST(SafeTensors, RefusesAHeaderThatNobodyWouldRead) {
  const TestDir dir;
  std::map<std::string, StoredTensor> tensors;
  for (char c = 'a'; c <= 'k'; ++c) tensors[std::string(10'000'000, c)] = {StoredType::f32, {0}, nullptr, 0};
  EXPECT_PRED2(mentions, error_of([&] { write_safetensors(dir / "huge", tensors); }),
               "readers accept at most 100000000");
  EXPECT_EQ(dir.count_entries(), 0u);
}

// ---- what is wrong with files

TEST(SafeTensorsFaults, LengthsThatCannotBe) {
  EXPECT_EQ(why(""), "it has 0 bytes and the header's length alone takes 8");
  EXPECT_EQ(why("1234567"), "it has 7 bytes and the header's length alone takes 8");
  EXPECT_EQ(why(file_of("", "", 2)), "its header would have 2 bytes and only 0 follow");
  EXPECT_EQ(why(file_of("{}", "", UINT64_MAX)),
            "its header would have 18446744073709551615 bytes, more than the 100000000 allowed");
  EXPECT_EQ(why(file_of("{}", "", uint64_t(INT64_MIN))),
            "its header would have 9223372036854775808 bytes, more than the 100000000 allowed");
  EXPECT_EQ(why(file_of("{}", "", 100'000'001)),
            "its header would have 100000001 bytes, more than the 100000000 allowed");
  EXPECT_EQ(why(file_of("{}", "", 100'000'000)), "its header would have 100000000 bytes and only 2 follow");
  EXPECT_EQ(why(file_of("{}", "", 3)), "its header would have 3 bytes and only 2 follow");
  EXPECT_EQ(why(file_of("", "", 0)), "its header is not a JSON object");
}

TEST(SafeTensorsFaults, HeadersThatAreNoObject) {
  for (const char* header : {"[]", "\"text\"", "3", "null", " {}"})
    EXPECT_EQ(why(file_of(header)), "its header is not a JSON object") << header;
  EXPECT_PRED2(mentions, why(file_of("{\"a\":")), "the header of x.safetensors is not valid JSON");
  EXPECT_PRED2(mentions, why(file_of("{} {}")), "is not valid JSON");
  EXPECT_PRED2(mentions, why(file_of(std::string("{}\0\0", 4))), "NUL");
  EXPECT_PRED2(mentions, why(file_of("{\"\xFF\":1}")), "is not valid JSON");
  EXPECT_PRED2(mentions, why(file_of("{\"a\":" + std::string(5000, '['))), "nested more than 64 levels deep");
}

TEST(SafeTensorsFaults, EmptyNameLists) {
  EXPECT_EQ(why(file_of("{}")), "it holds no tensors");
  EXPECT_EQ(why(file_of("{\"__metadata__\":{}}")), "it holds no tensors");
  EXPECT_EQ(why(file_of("{}", "1234")), "it holds no tensors");
  EXPECT_EQ(why(file_of(header_of({entry("", "U8", "[1]", "[0,1]")}), "1")), "a tensor has an empty name");
}

TEST(SafeTensorsFaults, UnknownTypesAreNamed) {
  EXPECT_EQ(why(file_of(header_of({entry("t", "F4", "[8]", "[0,4]")}), "1234")),
            "tensor 't' has the unknown dtype \"F4\"");
  EXPECT_EQ(why(file_of(R"({"t":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", "1234")),
            "tensor 't' has the unknown dtype 7");
}

TEST(SafeTensorsFaults, EntriesOfTheWrongForm) {
  EXPECT_EQ(why(file_of(R"({"t":[1,2]})")), "tensor 't' is described by a JSON array, expected an object");
  EXPECT_EQ(why(file_of(R"({"t":{"dtype":"U8","shape":[0]}})")), "tensor 't' has no data_offsets");
  EXPECT_EQ(why(file_of(R"({"t":{"dtype":"U8","data_offsets":[0,0]}})")), "tensor 't' has no shape");
  EXPECT_EQ(why(file_of(R"({"t":{"shape":[0],"data_offsets":[0,0]}})")), "tensor 't' has no dtype");
  EXPECT_EQ(why(file_of(R"({"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"zip":1}})")),
            "tensor 't' has an unknown field 'zip'");
  EXPECT_EQ(why(file_of(R"({"__metadata__":[],"t":1})")), "__metadata__ is a JSON array, expected an object");
  EXPECT_EQ(why(file_of(R"({"__metadata__":{"a":1},"t":1})")),
            "__metadata__ 'a' is a JSON number, expected a string");
}

TEST(SafeTensorsFaults, ShapesThatCannotBe) {
  const auto with = [](const std::string& shape) {
    return why(file_of(header_of({entry("t", "F32", shape, "[0,4]")}), "1234"));
  };
  EXPECT_EQ(with("[-1]"), "tensor 't' has the dimension -1, expected an integer of at least 0");
  EXPECT_EQ(with("[1.0]"), "tensor 't' has the dimension 1.0, expected an integer of at least 0");
  EXPECT_EQ(with("[\"1\"]"), "tensor 't' has the dimension \"1\", expected an integer of at least 0");
  EXPECT_EQ(with("[9223372036854775808]"),
            "tensor 't' has the dimension 9223372036854775808, expected an integer of at least 0");
  EXPECT_EQ(with("1"), "tensor 't' has the shape 1, expected a list");
  EXPECT_EQ(with("[4294967296,4294967296]"),
            "tensor 't' of shape [4294967296, 4294967296] is larger than any file");
  // 4 * 2^62 wraps to zero, and so does 2^62 + 1 times 4 to the right number of bytes.
  EXPECT_EQ(with("[4611686018427387904]"),
            "tensor 't' of shape [4611686018427387904] is larger than any file");
  EXPECT_EQ(with("[4611686018427387905]"),
            "tensor 't' of shape [4611686018427387905] is larger than any file");
  EXPECT_EQ(with("[2]"), "tensor 't' takes 4 bytes but F32 [2] needs 8");
  EXPECT_EQ(with("[0,9223372036854775807,9223372036854775807]"),
            "tensor 't' takes 4 bytes but F32 [0, 9223372036854775807, 9223372036854775807] needs 0");
}

TEST(SafeTensorsFaults, OffsetsThatCannotBe) {
  const auto with = [](const std::string& offsets) {
    return why(file_of(header_of({entry("t", "F32", "[1]", offsets)}), "1234"));
  };
  EXPECT_EQ(with("[4,0]"), "tensor 't' ends at offset 0 before it begins at 4");
  EXPECT_EQ(with("[4,8]"), "tensor 't' ends at offset 8 but there are 4 bytes of data");
  EXPECT_EQ(with("[0,18446744073709551615]"),
            "tensor 't' ends at offset 18446744073709551615 but there are 4 bytes of data");
  for (const char* odd :
       {"[-4,0]", "[0.0,4.0]", "[\"0\",\"4\"]", "[0]", "[0,4,8]", "{}", "[0,18446744073709551616]"})
    EXPECT_PRED2(mentions, with(odd), "expected two integers of at least 0") << odd;
}

TEST(SafeTensorsFaults, RangesMustCoverTheDataOnce) {
  const auto two = [](const std::string& a, const std::string& b, const std::string& data) {
    return why(file_of(header_of({entry("a", "U8", "[4]", a), entry("b", "U8", "[4]", b)}), data));
  };
  EXPECT_EQ(two("[0,4]", "[2,6]", "123456"), "tensors 'a' and 'b' overlap");
  EXPECT_EQ(two("[0,4]", "[0,4]", "1234"), "tensors 'a' and 'b' overlap");  // two names for one range
  EXPECT_EQ(two("[0,4]", "[5,9]", "123456789"), "1 bytes before tensor 'b' belong to no tensor");
  EXPECT_EQ(two("[6,10]", "[2,6]", "1234567890"), "2 bytes before tensor 'b' belong to no tensor");
  EXPECT_EQ(two("[0,4]", "[4,8]", "123456789"), "1 bytes after the last tensor belong to no tensor");
  // An empty tensor in the middle of another one overlaps nothing but still stands in no place of its own.
  EXPECT_EQ(
      why(file_of(header_of({entry("a", "U8", "[4]", "[0,4]"), entry("b", "U8", "[0]", "[2,2]")}), "1234")),
      "tensors 'a' and 'b' overlap");
}

TEST(SafeTensorsFaults, DuplicateKeysAreNamed) {
  const std::string once = entry("twin", "U8", "[4]", "[0,4]"), again = entry("twin", "U8", "[4]", "[4,8]");
  EXPECT_EQ(why(file_of(header_of({once, again}), "12345678")),
            "the header of x.safetensors has a duplicate key 'twin'");
  EXPECT_EQ(why(file_of(R"({"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "1")),
            "the header of x.safetensors has a duplicate key 'dtype'");
}

TEST(SafeTensors, HeaderOrderNeedNotBeOffsetOrder) {
  const std::string bytes =
      file_of(header_of({entry("a", "U8", "[2]", "[3,5]"), entry("b", "U8", "[3]", "[0,3]"),
                         entry("c", "U8", "[0]", "[3,3]")}),
              "bbbaa");
  const SafeTensors file = open(bytes);
  EXPECT_EQ(std::string(static_cast<const char*>(file.at("a").data), 2), "aa");
  EXPECT_EQ(std::string(static_cast<const char*>(file.at("b").data), 3), "bbb");
}

TEST(SafeTensorsFaults, MissingFilesAreNamed) {
  const TestDir dir;
  EXPECT_PRED2(mentions, error_of([&] { SafeTensors file(dir / "nothing"); }), (dir / "nothing").string());
  EXPECT_PRED2(mentions, error_of([&] { SafeTensors file(dir.path()); }), dir.path().string());
}

// ---- strict matching

TEST(ReadInto, MismatchesAreNamedAndNothingIsLoaded) {
  const TestDir dir;
  Sample sample;
  write_safetensors(dir / "a", sample.tensors());
  const SafeTensors file(dir / "a");
  const std::string name = (dir / "a").string();

  std::vector<float> target(12, 7.0f);
  // 'w' stands first and would fit, so a partial load would show in `target`.
  const NamedTensor fits{"w", {2, 3}, view(target.data(), 2, 3)};
  const auto error = [&](std::vector<NamedTensor> rest) {
    rest.insert(rest.begin(), fits);
    std::string sentence = error_of([&] { read_into(file, rest); });
    EXPECT_EQ(target, std::vector<float>(12, 7.0f));
    return sentence;
  };
  EXPECT_EQ(error({{"more", {1}, view(target.data() + 6, 1, 1)}}), name + " has no tensor 'more'");
  EXPECT_EQ(error({{"ids", {5}, view(target.data() + 6, 1, 5)}}),
            name + ": tensor 'ids' has shape [7], expected [5]");
  EXPECT_EQ(error({{"none", {4, 0}, view(target.data() + 6, 0, 4)}}),
            name + ": tensor 'none' has shape [0, 4], expected [4, 0]");
  EXPECT_EQ(error({{"wide", {3}, view(target.data() + 6, 1, 3)}}),
            name + ": tensor 'wide' has dtype F64, expected F32");
  EXPECT_EQ(error({}), name + " has an unexpected tensor 'a.narrow'");
}

// ---- damage: a file loads or is refused, whatever happens to its bytes

// Reads everything that a file promises, so that a pointer to the wrong place is noticed by a sanitizer.
bool loads(std::vector<std::byte> bytes) {
  bytes.shrink_to_fit();
  try {
    const SafeTensors file{std::span<const std::byte>(bytes), "damaged"};
    uint64_t sum = 0, total = 0;
    for (const auto& [name, t] : file.tensors()) {
      const auto* data = static_cast<const std::byte*>(t.data);
      EXPECT_TRUE(t.bytes == 0 || (data >= bytes.data() && data + t.bytes <= bytes.data() + bytes.size()));
      for (uint64_t i = 0; i < t.bytes; ++i) sum += uint64_t(data[i]);
      total += t.bytes;
    }
    EXPECT_LE(total, bytes.size());
    return sum <= 255 * total;
  } catch (const Error&) {
    return false;
  }
}

std::vector<std::byte> sample_bytes() {
  const TestDir dir;
  Sample sample;
  write_safetensors(dir / "a", sample.tensors(), {{"format", "sps"}});
  const MappedFile file(dir / "a");
  return {file.bytes().begin(), file.bytes().end()};
}

TEST(SafeTensorsDamage, EveryTruncationIsRefused) {
  const std::vector<std::byte> bytes = sample_bytes();
  ASSERT_TRUE(loads(bytes));
  for (size_t n = 0; n < bytes.size(); ++n)
    EXPECT_FALSE(loads({bytes.begin(), bytes.begin() + ptrdiff_t(n)})) << n;
}

TEST(SafeTensorsDamage, EveryFlippedHeaderBitLoadsOrIsRefused) {
  const std::vector<std::byte> bytes = sample_bytes();
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  size_t refused = 0;
  for (size_t bit = 0; bit < 8 * (8 + length); ++bit) {
    auto damaged = bytes;
    damaged[bit / 8] ^= std::byte(1 << bit % 8);
    refused += !loads(damaged);
  }
  EXPECT_GT(refused, 4 * length);  // names and metadata may change unnoticed, most bits may not
}

TEST(SafeTensorsDamage, RandomHeadersLoadOrAreRefused) {
  const std::vector<std::byte> bytes = sample_bytes();
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  const Rng rng(3, "damage");
  constexpr std::string_view kLikely = "0123456789-.,:[]{}\" eE\\\xFF";
  size_t refused = 0, total = 6000;
  for (uint64_t i = 0, k = 0; i < total; ++i) {
    auto damaged = bytes;
    for (uint64_t n = 1 + rng.below(k++, 4); n > 0; --n) {
      const size_t at = 8 + size_t(rng.below(k++, length));
      const uint64_t kind = rng.below(k++, 4);
      const auto byte =
          std::byte(kind == 0 ? rng.below(k++, 256) : uint64_t(kLikely[rng.below(k++, kLikely.size())]));
      if (kind <= 1)
        damaged[at] = byte;
      else if (kind == 2)
        damaged.insert(damaged.begin() + ptrdiff_t(at), byte);
      else
        damaged.erase(damaged.begin() + ptrdiff_t(at));
    }
    refused += !loads(damaged);
  }
  EXPECT_GT(refused, total / 2);
}

// Numbers are the dangerous part of a header: replace each by values at the edges of every integer type.
TEST(SafeTensorsDamage, EdgeNumbersLoadOrAreRefused) {
  const std::vector<std::byte> bytes = sample_bytes();
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  const std::string header(reinterpret_cast<const char*>(bytes.data() + 8), length);
  const std::string data(reinterpret_cast<const char*>(bytes.data() + 8 + length), bytes.size() - 8 - length);
  size_t numbers = 0;
  std::string loaded;
  for (size_t at = 0; at < header.size(); ++at) {
    if (!std::isdigit(header[at]) || (header[at - 1] != '[' && header[at - 1] != ',')) continue;
    const size_t end = header.find_first_not_of("0123456789", at);
    const std::string old = header.substr(at, end - at);
    ++numbers;
    for (const char* number :
         {"-1", "-0", "1e2", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808",
          "18446744073709551615", "18446744073709551616", "1e400", "null", "[]"}) {
      const std::string damaged = file_of(header.substr(0, at) + number + header.substr(end), data);
      const auto bytes_of = std::as_bytes(std::span(damaged.data(), damaged.size()));
      if (loads({bytes_of.begin(), bytes_of.end()})) loaded += old + " as " + number + "; ";
    }
  }
  // An empty tensor stays empty however long its other side is.
  EXPECT_EQ(loaded, "4 as 2147483648; 4 as 4294967296; 4 as 9223372036854775807; ");
  EXPECT_EQ(numbers, 18u);  // 5 tensors: 10 offsets and 8 dimensions
}

}  // namespace
}  // namespace sps
