#include "tokenizer/splitter.h"

#include "base/error.h"
#include "tokenizer/unicode.h"

namespace sps {

namespace patterns {
const std::string_view gpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const std::string_view gpt2_tiktoken =
    R"('(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s)";
const std::string_view cl100k =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
const std::string_view cl100k_tiktoken =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|)"
    R"(\s++$|\s*[\r\n]|\s+(?!\S)|\s)";
const std::string_view cl100k_written =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s+\z|\s*[\r\n]|\s+(?!\S)|\s)";
const std::string_view qwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
const std::string_view o200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
}  // namespace patterns

namespace {

constexpr uint8_t kLetter = CharClass::letter, kNumber = CharClass::number, kSpace = CharClass::space;
constexpr uint8_t kAnyClass = kLetter | kNumber | kSpace;

// What the scanners share: a text and the classes of its characters.
class Scan {
 public:
  Scan(std::string_view text, const CharTable& table) : table_(table), end_(text.data() + text.size()) {}

  const char* end() const { return end_; }
  uint8_t at(const char* p, int& length) const { return table_.at(p, end_, length); }
  uint8_t at(const char* p) const {
    int length;
    return at(p, length);
  }
  bool in(const char* p, uint8_t classes) const { return p != end_ && (at(p) & classes) != 0; }

  // The end of the run of characters that have one of `classes` (or none of them).
  template <uint8_t classes, bool have = true>
  const char* run(const char* p) const {
    int length;
    while (p != end_ && ((at(p, length) & classes) != 0) == have) p += length;
    return p;
  }
  const char* letters(const char* p) const { return run<kLetter>(p); }
  const char* others(const char* p) const { return run<kAnyClass, false>(p); }
  const char* numbers(const char* p, int most) const {
    int length;
    for (int n = 0; n < most && p != end_ && (at(p, length) & kNumber) != 0; ++n) p += length;
    return p;
  }

  // `p` at an apostrophe: the end of 's 't 'm 'd 're 've 'll, else `p`. Without regard to case the long s
  // (U+017F) is an s too.
  template <bool ignore_case>
  const char* contraction(const char* p) const {
    const auto lower = [](char c) { return ignore_case && c >= 'A' && c <= 'Z' ? char(c + 32) : c; };
    if (end_ - p < 2) return p;
    const char first = lower(p[1]);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return p + 2;
    if (end_ - p < 3) return p;
    if (ignore_case && first == '\xC5' && p[2] == '\xBF') return p + 3;
    const char second = lower(p[2]);
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
      return p + 3;
    return p;
  }

  // `p` at white space, of which the pattern takes \s+(?!\S) or else \s+: all of it but the last character,
  // if something follows that this one can go with.
  const char* spaces(const char* p) const {
    const char* last = p;
    const char* q = p;
    int length;
    for (; q != end_ && (at(q, length) & kSpace) != 0; q += length) last = q;
    return q == end_ || last == p ? q : last;
  }
  // The same after a \s*[\r\n]+ that goes up to the last line break.
  const char* spaces_or_lines(const char* p, bool whole_if_last) const {
    const char* last = p;
    const char* after_break = nullptr;
    const char* q = p;
    int length;
    while (q != end_) {
      const uint8_t c = at(q, length);
      if ((c & kSpace) == 0) break;
      last = q;
      q += length;
      if ((c & CharClass::newline) != 0) after_break = q;
    }
    if (q == end_ && whole_if_last) return q;
    if (after_break != nullptr) return after_break;
    return q == end_ || last == p ? q : last;
  }

 private:
  const CharTable& table_;
  const char* end_;
};

struct Gpt2Scanner {
  const char* next(const Scan& scan, const char* p) const {
    if (*p == '\'') {
      const char* q = scan.contraction<false>(p);
      if (q != p) return q;
    }
    int length;
    const char* word = p;
    uint8_t c = scan.at(p, length);
    if (*p == ' ' && p + 1 != scan.end()) {
      c = scan.at(p + 1, length);
      ++word;
    }
    if ((c & kLetter) != 0) return scan.letters(word + length);
    if ((c & kNumber) != 0) return scan.run<kNumber>(word + length);
    if ((c & kSpace) != 0) return scan.spaces(p);
    return scan.others(word + length);
  }
};

// cl100k and its kin.
struct Cl100kScanner {
  int max_digits;
  bool whole_if_last;  // white space at the end of the text stays together, line breaks or not

  const char* next(const Scan& scan, const char* p) const {
    if (*p == '\'') {
      const char* q = scan.contraction<true>(p);
      if (q != p) return q;
    }
    int length;
    const uint8_t c = scan.at(p, length);
    if ((c & kLetter) != 0) return scan.letters(p + length);
    if ((c & kNumber) != 0) return scan.numbers(p, max_digits);
    const char* word = p + length;
    if ((c & CharClass::newline) == 0 && scan.in(word, kLetter)) return scan.letters(word);
    if ((c & kSpace) == 0) return scan.run<CharClass::newline>(scan.others(word));
    if (*p == ' ' && word != scan.end() && (scan.at(word) & kAnyClass) == 0)
      return scan.run<CharClass::newline>(scan.others(word));
    return scan.spaces_or_lines(p, whole_if_last);
  }
};

struct O200kScanner {
  const char* next(const Scan& scan, const char* p) const {
    int length;
    const uint8_t c = scan.at(p, length);
    const char* after = p + length;
    const bool may_lead = (c & (kLetter | kNumber | CharClass::newline)) == 0;
    const char* word = may_lead ? lower_ended(scan, after) : nullptr;
    if (word == nullptr) word = lower_ended(scan, p);
    if (word == nullptr && may_lead) word = upper_led(scan, after);
    if (word == nullptr) word = upper_led(scan, p);
    if (word != nullptr) return word != scan.end() && *word == '\'' ? scan.contraction<true>(word) : word;
    if ((c & kNumber) != 0) return scan.numbers(p, 3);
    if ((c & kSpace) == 0) return breaks_or_slashes(scan, scan.others(after));
    if (*p == ' ' && after != scan.end() && (scan.at(after) & kAnyClass) == 0)
      return breaks_or_slashes(scan, scan.others(after));
    return scan.spaces_or_lines(p, false);
  }

 private:
  // upper* lower+, where characters without case are both: the first run gives back as many as it must.
  static const char* lower_ended(const Scan& scan, const char* p) {
    const char* after_both = nullptr;
    int length;
    while (p != scan.end()) {
      const uint8_t c = scan.at(p, length);
      if ((c & CharClass::upper) == 0) break;
      p += length;
      if ((c & CharClass::lower) != 0) after_both = p;
    }
    return scan.in(p, CharClass::lower) ? scan.run<CharClass::lower>(p) : after_both;
  }
  // upper+ lower*
  static const char* upper_led(const Scan& scan, const char* p) {
    const char* q = scan.run<CharClass::upper>(p);
    return q == p ? nullptr : scan.run<CharClass::lower>(q);
  }
  static const char* breaks_or_slashes(const Scan& scan, const char* p) {
    while (p != scan.end() && (*p == '\r' || *p == '\n' || *p == '/')) ++p;
    return p;
  }
};

// Every number is a piece, and so is what stands between numbers.
struct DigitScanner {
  const char* next(const Scan& scan, const char* p) const {
    int length;
    return (scan.at(p, length) & kNumber) != 0 ? p + length : scan.run<kNumber, false>(p);
  }
};

template <class Scanner>
class ScanCutter final : public Cutter {
 public:
  explicit ScanCutter(Scanner scanner) : scanner_(scanner), table_(CharTable::get()) {}
  size_t cut(std::string_view text, size_t begin, std::span<size_t> ends,
             std::unique_ptr<CutState>&) const override {
    const Scan scan(text, table_);
    const char* p = text.data() + begin;
    size_t n = 0;
    while (n < ends.size() && p != scan.end()) {
      p = scanner_.next(scan, p);
      ends[n++] = size_t(p - text.data());
    }
    return n;
  }

 private:
  Scanner scanner_;
  const CharTable& table_;
};

template <class Scanner>
std::unique_ptr<Cutter> scan_cutter(Scanner scanner) {
  return std::make_unique<ScanCutter<Scanner>>(scanner);
}

std::unique_ptr<Cutter> known_cutter(std::string_view pattern) {
  if (pattern == patterns::gpt2 || pattern == patterns::gpt2_tiktoken) return scan_cutter(Gpt2Scanner{});
  if (pattern == patterns::cl100k) return scan_cutter(Cl100kScanner{3, false});
  if (pattern == patterns::cl100k_tiktoken) return scan_cutter(Cl100kScanner{3, true});
  if (pattern == patterns::qwen2) return scan_cutter(Cl100kScanner{1, false});
  if (pattern == patterns::o200k) return scan_cutter(O200kScanner{});
  return nullptr;
}

}  // namespace

bool is_known_pattern(std::string_view pattern) {
  return known_cutter(pattern) != nullptr;
}

std::string pattern_of_text(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    const bool word = static_cast<unsigned char>(c) >= 0x80 || (c >= '0' && c <= '9') ||
                      (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!word) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

std::unique_ptr<Cutter> make_cutter(const SplitStep& step) {
  if (step.kind == SplitStep::Kind::digits) return scan_cutter(DigitScanner{});
  if (auto known = known_cutter(step.pattern)) return known;
  return make_regex_cutter(step.pattern);
}

Splitter::Splitter(const std::vector<SplitStep>& steps) {
  // Each step holds a block of positions on the stack.
  constexpr size_t kMaxSteps = 16;
  if (steps.size() > kMaxSteps)
    fail("a tokenizer splits texts in {} steps; at most {} are possible", steps.size(), kMaxSteps);
  for (const SplitStep& step : steps) cutters_.push_back(make_cutter(step));
}

}  // namespace sps
