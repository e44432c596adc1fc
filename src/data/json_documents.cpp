#include "data/json_documents.h"

#include <bit>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace sps {
namespace {

constexpr int kMaxDepth = 64;
constexpr int kNamesShown = 30;

// The first byte that is a quote, a backslash, a control character or not ASCII. Eight bytes at a time: the
// lowest of the marked bits is exact, those above it may come from a borrow.
const char* skip_plain(const char* p, const char* end) {
  constexpr uint64_t kOnes = 0x0101010101010101, kHigh = kOnes * 0x80;
  static_assert(std::endian::native == std::endian::little);
  for (; end - p >= 8; p += 8) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    const uint64_t quote = v ^ kOnes * '"', backslash = v ^ kOnes * '\\';
    const uint64_t marks =
        (((quote - kOnes) & ~quote) | ((backslash - kOnes) & ~backslash) | ((v - kOnes * 0x20) & ~v) | v) &
        kHigh;
    if (marks != 0) return p + std::countr_zero(marks) / 8;
  }
  while (p < end && uint8_t(*p) >= 0x20 && uint8_t(*p) < 0x80 && *p != '"' && *p != '\\') ++p;
  return p;
}

// The bytes of the UTF-8 sequence at p, which is not ASCII; 0 if there is none.
int utf8_length(const char* p, const char* end) {
  const auto at = [p](int i) { return uint8_t(p[i]); };
  const auto tail = [&](int i) { return (at(i) & 0xC0) == 0x80; };
  const ptrdiff_t room = end - p;
  const uint8_t lead = at(0);
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return room >= 2 && tail(1) ? 2 : 0;
  if (lead < 0xF0) {
    if (room < 3 || !tail(1) || !tail(2)) return 0;
    if (lead == 0xE0 && at(1) < 0xA0) return 0;  // could be shorter
    if (lead == 0xED && at(1) > 0x9F) return 0;  // half a surrogate pair
    return 3;
  }
  if (lead > 0xF4 || room < 4 || !tail(1) || !tail(2) || !tail(3)) return 0;
  if (lead == 0xF0 && at(1) < 0x90) return 0;
  if (lead == 0xF4 && at(1) > 0x8F) return 0;  // beyond U+10FFFF
  return 4;
}

void append_utf8(uint32_t c, std::string& to) {
  if (c < 0x80) {
    to += char(c);
  } else if (c < 0x800) {
    to += {char(0xC0 | c >> 6), char(0x80 | (c & 0x3F))};
  } else if (c < 0x10000) {
    to += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 0x3F)), char(0x80 | (c & 0x3F))};
  } else {
    to += {char(0xF0 | c >> 18), char(0x80 | (c >> 12 & 0x3F)), char(0x80 | (c >> 6 & 0x3F)),
           char(0x80 | (c & 0x3F))};
  }
}

// How a key relates to a dotted path that is looked for in the object.
struct Step {
  bool here = false;        // it is the field
  std::string_view rest{};  // the path within its value, or empty
};
Step step(std::string_view path, std::string_view key) {
  if (path == key) return {.here = !path.empty()};
  if (path.size() > key.size() && path[key.size()] == '.' && path.starts_with(key))
    return {.rest = path.substr(key.size() + 1)};
  return {};
}

// A recursive-descent parser that keeps nothing but the two fields.
class Parser {
 public:
  Parser(std::string_view json, std::string_view place, std::string_view text_field,
         std::string_view id_field, Document& document)
      : begin_(json.data()),
        p_(begin_),
        end_(begin_ + json.size()),
        place_(place),
        text_field_(text_field),
        id_field_(id_field == text_field ? std::string_view() : id_field),
        document_(document) {}

  void parse() {
    skip_blanks();
    if (p_ < end_ && *p_ != '{') {
      const char* type = type_name();
      skip_value(0);
      finish();
      fail("{}: a JSON object is expected, but there is a JSON {}", place_, type);
    }
    document_.text.clear();
    object(0, text_field_, id_field_);
    finish();
    if (has_text_) return;
    fail("{}: the object has no field '{}' (its fields: {}); name the text's field with --text-field", place_,
         text_field_, names_.empty() ? "none" : names_);
  }

 private:
  [[noreturn]] void invalid(std::string_view what) const {
    fail("{} is not valid JSON: {} at byte {}", place_, what, p_ - begin_ + 1);
  }
  [[noreturn]] void repeated(std::string_view field) const {
    fail("{}: the object has the field '{}' twice", place_, field);
  }

  void finish() {
    skip_blanks();
    if (p_ < end_) invalid("something follows the value");
  }

  void skip_blanks() {
    while (p_ < end_ && (*p_ == ' ' || *p_ == '\n' || *p_ == '\r' || *p_ == '\t')) ++p_;
  }

  char peek() const { return p_ < end_ ? *p_ : '\0'; }  // a NUL byte is wrong wherever this is asked

  void expect(char c, const char* what) {
    if (peek() != c) invalid(p_ == end_ ? "the end comes too early" : what);
    ++p_;
  }

  const char* type_name() const {
    switch (peek()) {
      case '{':
        return "object";
      case '[':
        return "array";
      case '"':
        return "string";
      case 't':
      case 'f':
        return "boolean";
      case 'n':
        return "null";
      default:
        return "number";
    }
  }

  void object(int depth, std::string_view text_path, std::string_view id_path) {
    open('{', depth);
    if (peek() == '}') return void(++p_);
    for (std::string unescaped;;) {
      const std::string_view name = key(unescaped);
      if (depth == 0) remember(name);
      const Step text = step(text_path, name), id = step(id_path, name);
      skip_blanks();
      expect(':', "a colon is expected");
      skip_blanks();
      if (text.here)
        take_text();
      else if (id.here && text.rest.empty())
        take_id(depth + 1);
      else if (text.rest.empty() && id.rest.empty())
        skip_value(depth + 1);
      else
        descend(depth + 1, text.rest, id.rest);
      if (!another('}')) return;
      skip_blanks();
    }
  }

  // The value of a field that a path leads through.
  void descend(int depth, std::string_view text_path, std::string_view id_path) {
    if (peek() == '{') return object(depth, text_path, id_path);
    if (peek() == 'n' && !text_path.empty()) found_text();
    skip_value(depth);
  }

  void open(char bracket, int depth) {
    expect(bracket, "an object is expected");
    if (depth >= kMaxDepth) fail("{} is nested more than {} levels deep", place_, kMaxDepth);
    skip_blanks();
  }

  // After an element: whether there is another, or else `bracket`.
  bool another(char bracket) {
    skip_blanks();
    if (peek() == ',') return ++p_, true;
    expect(bracket, "a comma or the closing bracket is expected");
    return false;
  }

  // A view of the JSON, or of `unescaped` for a key with an escape.
  std::string_view key(std::string& unescaped) {
    if (peek() != '"') invalid(p_ == end_ ? "the end comes too early" : "a name in quotes is expected");
    const char* begin = p_ + 1;
    const char* stop = skip_plain(begin, end_);
    if (stop < end_ && *stop == '"') {
      p_ = stop + 1;
      return {begin, stop};
    }
    unescaped.clear();
    string(&unescaped);
    return unescaped;
  }

  void remember(std::string_view name) {
    if (name_count_++ < kNamesShown) names_.append(names_.empty() ? "" : ", ").append(name);
    if (name_count_ == kNamesShown + 1) names_ += ", ...";
  }

  void found_text() {
    if (has_text_) repeated(text_field_);
    has_text_ = true;
  }

  void take_text() {
    found_text();
    if (peek() == '"') {
      document_.text.reserve(size_t(end_ - p_));
      return string(&document_.text);
    }
    const char* type = type_name();
    const bool null = peek() == 'n';
    skip_value(0);
    if (!null) fail("{}: the field '{}' should be a string, but it is a JSON {}", place_, text_field_, type);
  }

  void take_id(int depth) {
    if (has_id_) repeated(id_field_);
    has_id_ = true;
    const char* begin = p_;
    std::string id;
    if (peek() == '"') {
      string(&id);
    } else {
      const bool number = peek() == '-' || (peek() >= '0' && peek() <= '9');
      skip_value(depth);
      if (number) id.assign(begin, p_);
      if (id.find_first_of(".eE") != std::string::npos) id.clear();
    }
    if (!id.empty()) document_.id = std::move(id);
  }

  void skip_value(int depth) {
    switch (peek()) {
      case '{':
        return object(depth, {}, {});
      case '[':
        return array(depth);
      case '"':
        return string(nullptr);
      case 't':
        return word("true");
      case 'f':
        return word("false");
      case 'n':
        return word("null");
      default:
        return number();
    }
  }

  void array(int depth) {
    open('[', depth);
    if (peek() == ']') return void(++p_);
    do {
      skip_blanks();
      skip_value(depth + 1);
    } while (another(']'));
  }

  void word(std::string_view word) {
    if (!std::string_view(p_, size_t(end_ - p_)).starts_with(word)) invalid("a value is expected");
    p_ += word.size();
  }

  void digits() {
    if (peek() < '0' || peek() > '9') invalid(p_ == end_ ? "the end comes too early" : "a value is expected");
    while (peek() >= '0' && peek() <= '9') ++p_;
  }

  void number() {
    if (peek() == '-') ++p_;
    if (peek() == '0')
      ++p_;
    else
      digits();
    if (peek() == '.') ++p_, digits();
    if (peek() == 'e' || peek() == 'E') {
      ++p_;
      if (peek() == '+' || peek() == '-') ++p_;
      digits();
    }
  }

  // Appends the unescaped string to `to` if there is one.
  void string(std::string* to) {
    ++p_;
    for (const char* run = p_;;) {
      p_ = skip_plain(p_, end_);
      if (p_ == end_) invalid("a string does not end");
      if (uint8_t(*p_) >= 0x80) {
        const int length = utf8_length(p_, end_);
        if (length == 0) invalid("a string has bytes that are not UTF-8");
        p_ += length;
        continue;
      }
      if (uint8_t(*p_) < 0x20) invalid("a string has a control character");
      if (to != nullptr) to->append(run, p_);
      if (*p_ == '"') return void(++p_);
      const uint32_t c = escape();
      if (to != nullptr) append_utf8(c, *to);
      run = p_;
    }
  }

  uint32_t escape() {
    ++p_;
    switch (peek()) {
      case '"':
        return ++p_, '"';
      case '\\':
        return ++p_, '\\';
      case '/':
        return ++p_, '/';
      case 'b':
        return ++p_, '\b';
      case 'f':
        return ++p_, '\f';
      case 'n':
        return ++p_, '\n';
      case 'r':
        return ++p_, '\r';
      case 't':
        return ++p_, '\t';
      case 'u':
        break;
      default:
        invalid("a string has an unknown escape");
    }
    const uint32_t high = hex4();
    if (high < 0xD800 || high > 0xDFFF) return high;
    if (high > 0xDBFF || peek() != '\\') invalid("a string has half a surrogate pair");
    ++p_;
    if (peek() != 'u') invalid("a string has half a surrogate pair");
    const uint32_t low = hex4();
    if (low < 0xDC00 || low > 0xDFFF) invalid("a string has half a surrogate pair");
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
  }

  // The four digits after the u.
  uint32_t hex4() {
    ++p_;
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i, ++p_) {
      const char c = peek();
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) invalid("a string has a wrong \\u escape");
      value = value << 4 | uint32_t(digit);
    }
    return value;
  }

  const char *begin_, *p_, *end_;
  std::string_view place_, text_field_, id_field_;
  Document& document_;
  bool has_text_ = false, has_id_ = false;
  std::string names_;
  int name_count_ = 0;
};

}  // namespace

void parse_json_document(std::string_view json, std::string_view place, std::string_view text_field,
                         std::string_view id_field, Document& document) {
  Parser(json, place, text_field, id_field, document).parse();
}

}  // namespace sps
