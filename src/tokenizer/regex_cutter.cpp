// Pre-tokenizer patterns that no scanner knows, by PCRE2.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>

#include "base/error.h"
#include "tokenizer/splitter.h"
#include "tokenizer/utf8.h"

namespace sps {

namespace {

// PCRE2's \s has U+180E as well, which Unicode took off its white space.
constexpr std::string_view kSpaces =
    R"(\x{09}-\x{0D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

// Sets within sets mean something else to the engines that vocabulary files are written for, so they are
// refused.
std::string with_unicode_spaces(std::string_view pattern) {
  std::string result;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const std::string_view rest = pattern.substr(i);
    if (rest[0] == '\\' && rest.size() > 1) {
      ++i;
      if (rest[1] == 's' && in_class)
        result += kSpaces;
      else if (rest[1] == 's')
        (result += '[').append(kSpaces) += ']';
      else if (rest[1] == 'S' && !in_class)
        (result += "[^").append(kSpaces) += ']';
      else
        result += rest.substr(0, 2);
      continue;
    }
    if (!in_class && rest[0] == '[') {
      in_class = true;
      const std::string_view open = rest.starts_with("[^") ? "[^" : "[";
      result += open;
      i += open.size() - 1;
      if (pattern.substr(i + 1).starts_with(']')) {
        result += "\\]";
        ++i;
      }
      continue;
    }
    if (in_class && (rest.starts_with('[') || rest.starts_with("&&")))
      fail("the pre-tokenizer pattern '{}' has a set within a set, which is not supported", pattern);
    if (rest[0] == ']') in_class = false;
    result += rest[0];
  }
  return result;
}

template <auto free>
struct Free {
  template <class T>
  void operator()(T* p) const {
    free(p);
  }
};

constexpr std::string_view kNoCharacter = "\xEF\xBF\xBF";  // U+FFFF, a code point without any class

// A text as PCRE2 can take it: in place of each byte that is not UTF-8 stands kNoCharacter.
class ValidText final : public CutState {
 public:
  explicit ValidText(std::string_view text) : view_(text), match_(pcre2_match_data_create(1, nullptr)) {
    size_t invalid = 0;
    for_each_invalid(text, [&](size_t) { ++invalid; });
    if (invalid == 0) return;
    copy_.reserve(text.size() + invalid * kAdded);
    replaced_.resize(text.size() + invalid * kAdded);
    size_t kept = 0;
    for_each_invalid(text, [&](size_t at) {
      copy_.append(text, kept, at - kept);
      replaced_[copy_.size()] = true;
      copy_ += kNoCharacter;
      kept = at + 1;
    });
    copy_.append(text, kept);
    view_ = copy_;
  }

  std::string_view view() const { return view_; }
  pcre2_match_data* match() const { return match_.get(); }
  size_t begin() const { return begin_; }  // of the next piece, in view()
  // Goes on to the border of a later character and returns where that is in the text itself.
  size_t go_on(size_t position) {
    if (!replaced_.empty())
      added_ += kAdded * size_t(std::count(replaced_.begin() + std::ptrdiff_t(begin_),
                                           replaced_.begin() + std::ptrdiff_t(position), true));
    begin_ = position;
    return begin_ - added_;
  }

 private:
  static constexpr size_t kAdded = kNoCharacter.size() - 1;

  template <class Visit>
  static void for_each_invalid(std::string_view text, Visit&& visit) {
    const char* const end = text.data() + text.size();
    for (const char* p = text.data(); p != end;) {
      const Utf8Char c = read_utf8(p, end);
      if (c.state != Utf8::valid) visit(size_t(p - text.data()));
      p += c.state == Utf8::valid ? c.length : 1;
    }
  }

  std::string_view view_;
  std::string copy_;
  std::vector<bool> replaced_;    // where in `copy_` a byte was replaced; empty: nowhere
  size_t begin_ = 0, added_ = 0;  // added_: bytes of `copy_` before begin_ that are not in the text
  std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>> match_;
};

constexpr size_t kMaxPattern = 16 << 10;
constexpr uint32_t kMaxHeapKiB = 256 << 10;

class RegexCutter final : public Cutter {
 public:
  explicit RegexCutter(std::string_view pattern) : pattern_(pattern) {
    if (pattern.size() > kMaxPattern)
      fail("a pre-tokenizer pattern of {} bytes is too long; at most {} are possible", pattern.size(),
           kMaxPattern);
    const std::string text = with_unicode_spaces(pattern);
    const std::unique_ptr<pcre2_compile_context, Free<pcre2_compile_context_free>> context(
        pcre2_compile_context_create(nullptr));
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_DOLLAR_ENDONLY | PCRE2_NEVER_BACKSLASH_C, &error,
                              &offset, context.get()));
    if (!code_) fail("the pre-tokenizer pattern '{}' is not valid: {}", pattern, message(error));
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // without it the interpreter runs
    limits_.reset(pcre2_match_context_create(nullptr));
    pcre2_set_heap_limit(limits_.get(), kMaxHeapKiB);
  }

  size_t cut(std::string_view text, size_t begin, std::span<size_t> ends,
             std::unique_ptr<CutState>& state) const override {
    if (!state) {
      SPS_CHECK(begin == 0);
      state = std::make_unique<ValidText>(text);
    }
    auto& valid = static_cast<ValidText&>(*state);
    size_t n = 0;
    while (n < ends.size() && valid.begin() < valid.view().size()) {
      const auto [from, to] = match(valid);
      ends[n++] = valid.go_on(from > valid.begin() ? from : to);  // what lies before a match, or the match
    }
    return n;
  }

 private:
  struct Match {
    size_t from, to;
  };

  // The next match, of at least one character; the end of the text if there is none.
  Match match(const ValidText& valid) const {
    const std::string_view text = valid.view();
    const auto run = [&](uint32_t more) {
      return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), valid.begin(),
                         PCRE2_NOTEMPTY | PCRE2_NO_UTF_CHECK | more, valid.match(), limits_.get());
    };
    int result = run(0);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = run(PCRE2_NO_JIT);
    if (result == PCRE2_ERROR_NOMATCH) return {text.size(), text.size()};
    if (result < 0)
      fail("the pre-tokenizer pattern '{}' cannot be run on a text of {} bytes: {}", pattern_, text.size(),
           message(result));
    // \K may put a match's start anywhere.
    const PCRE2_SIZE* found = pcre2_get_ovector_pointer(valid.match());
    if (found[0] < valid.begin() || found[1] <= found[0])
      fail("the pre-tokenizer pattern '{}' moves the start of a match, which is not supported", pattern_);
    return {found[0], found[1]};
  }

  static std::string message(int error) {
    PCRE2_UCHAR text[256] = {};
    pcre2_get_error_message(error, text, sizeof text);
    return reinterpret_cast<const char*>(text);
  }

  std::string pattern_;
  std::unique_ptr<pcre2_code, Free<pcre2_code_free>> code_;
  std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>> limits_;
};

}  // namespace

std::unique_ptr<Cutter> make_regex_cutter(std::string_view pattern) {
  return std::make_unique<RegexCutter>(pattern);
}

}  // namespace sps
