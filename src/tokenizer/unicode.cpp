#include "tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "base/error.h"

namespace sps {

namespace {

struct Range {
  uint32_t first, last;
  utf8proc_category_t category;
};

// Letters, marks and numbers that Unicode 16 added to Unicode 15, which utf8proc 2.8 knows. A later utf8proc
// knows them itself.
constexpr Range kNewInUnicode16[] = {
    {0x897, 0x897, UTF8PROC_CATEGORY_MN},     {0x1C89, 0x1C89, UTF8PROC_CATEGORY_LU},
    {0x1C8A, 0x1C8A, UTF8PROC_CATEGORY_LL},   {0xA7CB, 0xA7CC, UTF8PROC_CATEGORY_LU},
    {0xA7CD, 0xA7CD, UTF8PROC_CATEGORY_LL},   {0xA7DA, 0xA7DA, UTF8PROC_CATEGORY_LU},
    {0xA7DB, 0xA7DB, UTF8PROC_CATEGORY_LL},   {0xA7DC, 0xA7DC, UTF8PROC_CATEGORY_LU},
    {0x105C0, 0x105F3, UTF8PROC_CATEGORY_LO}, {0x10D40, 0x10D49, UTF8PROC_CATEGORY_ND},
    {0x10D4A, 0x10D4D, UTF8PROC_CATEGORY_LO}, {0x10D4E, 0x10D4E, UTF8PROC_CATEGORY_LM},
    {0x10D4F, 0x10D4F, UTF8PROC_CATEGORY_LO}, {0x10D50, 0x10D65, UTF8PROC_CATEGORY_LU},
    {0x10D69, 0x10D6D, UTF8PROC_CATEGORY_MN}, {0x10D6F, 0x10D6F, UTF8PROC_CATEGORY_LM},
    {0x10D70, 0x10D85, UTF8PROC_CATEGORY_LL}, {0x10EC2, 0x10EC4, UTF8PROC_CATEGORY_LO},
    {0x10EFC, 0x10EFC, UTF8PROC_CATEGORY_MN}, {0x11380, 0x11389, UTF8PROC_CATEGORY_LO},
    {0x1138B, 0x1138B, UTF8PROC_CATEGORY_LO}, {0x1138E, 0x1138E, UTF8PROC_CATEGORY_LO},
    {0x11390, 0x113B5, UTF8PROC_CATEGORY_LO}, {0x113B7, 0x113B7, UTF8PROC_CATEGORY_LO},
    {0x113B8, 0x113C0, UTF8PROC_CATEGORY_MN}, {0x113C2, 0x113C2, UTF8PROC_CATEGORY_MC},
    {0x113C5, 0x113C5, UTF8PROC_CATEGORY_MC}, {0x113C7, 0x113CA, UTF8PROC_CATEGORY_MC},
    {0x113CC, 0x113D0, UTF8PROC_CATEGORY_MC}, {0x113D1, 0x113D1, UTF8PROC_CATEGORY_LO},
    {0x113D2, 0x113D2, UTF8PROC_CATEGORY_MN}, {0x113D3, 0x113D3, UTF8PROC_CATEGORY_LO},
    {0x113E1, 0x113E2, UTF8PROC_CATEGORY_MN}, {0x116D0, 0x116E3, UTF8PROC_CATEGORY_ND},
    {0x11BC0, 0x11BE0, UTF8PROC_CATEGORY_LO}, {0x11BF0, 0x11BF9, UTF8PROC_CATEGORY_ND},
    {0x11F5A, 0x11F5A, UTF8PROC_CATEGORY_MN}, {0x13460, 0x143FA, UTF8PROC_CATEGORY_LO},
    {0x16100, 0x1611D, UTF8PROC_CATEGORY_LO}, {0x1611E, 0x1612F, UTF8PROC_CATEGORY_MN},
    {0x16130, 0x16139, UTF8PROC_CATEGORY_ND}, {0x16D40, 0x16D42, UTF8PROC_CATEGORY_LM},
    {0x16D43, 0x16D6A, UTF8PROC_CATEGORY_LO}, {0x16D6B, 0x16D6C, UTF8PROC_CATEGORY_LM},
    {0x16D70, 0x16D79, UTF8PROC_CATEGORY_ND}, {0x18CFF, 0x18CFF, UTF8PROC_CATEGORY_LO},
    {0x1CCF0, 0x1CCF9, UTF8PROC_CATEGORY_ND}, {0x1E5D0, 0x1E5ED, UTF8PROC_CATEGORY_LO},
    {0x1E5EE, 0x1E5EF, UTF8PROC_CATEGORY_MN}, {0x1E5F0, 0x1E5F0, UTF8PROC_CATEGORY_LO},
    {0x1E5F1, 0x1E5FA, UTF8PROC_CATEGORY_ND}, {0x2EBF0, 0x2EE5D, UTF8PROC_CATEGORY_LO},
};

bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

uint8_t classes_of(utf8proc_category_t category) {
  switch (category) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LT:
      return CharClass::letter | CharClass::upper;
    case UTF8PROC_CATEGORY_LL:
      return CharClass::letter | CharClass::lower;
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharClass::letter | CharClass::upper | CharClass::lower;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
      return CharClass::upper | CharClass::lower;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharClass::number;
    default:
      return 0;
  }
}

}  // namespace

CharTable::CharTable() {
  const Range* next = std::begin(kNewInUnicode16);
  for (uint32_t high = 0; high < block_of_.size(); ++high) {
    Block block;
    for (uint32_t low = 0; low < 256; ++low) {
      const uint32_t c = high << 8 | low;
      utf8proc_category_t category = utf8proc_category(utf8proc_int32_t(c));
      while (next != std::end(kNewInUnicode16) && next->last < c) ++next;
      if (category == UTF8PROC_CATEGORY_CN && next != std::end(kNewInUnicode16) && next->first <= c)
        category = next->category;
      block[low] = classes_of(category);
      if (is_white_space(c)) block[low] |= CharClass::space;
      if (c == '\r' || c == '\n') block[low] |= CharClass::newline;
    }
    const auto same = std::find(blocks_.begin(), blocks_.end(), block);
    block_of_[high] = uint8_t(same - blocks_.begin());
    if (same == blocks_.end()) {
      blocks_.push_back(block);
      SPS_CHECK(blocks_.size() <= 256);
    }
  }
}

const CharTable& CharTable::get() {
  static const CharTable table;
  return table;
}

namespace {

// The last byte before `from` that is ASCII may compose with what follows it, an earlier one cannot.
constexpr char kFirstLeadOfMarks =
    '\xCC';  // U+0300; characters below it are in NFC whatever stands around them

bool needs_look(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) >= static_cast<unsigned char>(kFirstLeadOfMarks);
  });
}

// `text` is valid UTF-8.
void append_nfc(std::string_view text, std::string& out) {
  utf8proc_uint8_t* composed = nullptr;
  const auto length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), utf8proc_ssize_t(text.size()),
                   &composed, utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owner(composed, std::free);
  if (length < 0) fail("a text of {} bytes cannot be normalised: {}", text.size(), utf8proc_errmsg(length));
  out.append(reinterpret_cast<const char*>(composed), size_t(length));
}

}  // namespace

std::string_view to_nfc(std::string_view text, std::string& buffer) {
  if (!needs_look(text)) return text;
  buffer.clear();
  buffer.reserve(text.size());
  const char* const end = text.data() + text.size();
  const char* p = text.data();
  const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
  // Nothing composes with an ASCII character that follows it, so texts fall apart before each of them.
  const char* piece = p;
  const auto flush = [&](const char* to) {
    const std::string_view view(piece, size_t(to - piece));
    if (needs_look(view))
      append_nfc(view, buffer);
    else
      buffer.append(view);
    piece = to;
  };
  while (p != end) {
    if (is_ascii(*p)) {
      if (p + 1 != end && !is_ascii(p[1])) flush(p);
      ++p;
      continue;
    }
    const Utf8Char c = read_utf8(p, end);
    if (c.state != Utf8::valid) {
      flush(p);
      buffer.append(p, size_t(c.length));
      piece = p + c.length;
    }
    p += c.length;
    if (p != end && is_ascii(*p)) flush(p);
  }
  flush(end);
  return buffer;
}

}  // namespace sps
