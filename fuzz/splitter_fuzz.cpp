// The scanners of the known patterns cut every text where PCRE2 does.
#include <array>
#include <memory>
#include <vector>

#include "fuzz/fuzz.h"
#include "tokenizer/splitter.h"

namespace {

std::vector<size_t> ends_of(const sps::Cutter& cutter, std::string_view text) {
  std::vector<size_t> all;
  std::array<size_t, 7> ends;
  std::unique_ptr<sps::CutState> state;
  for (size_t begin = 0; begin < text.size(); begin = all.back()) {
    const size_t n = cutter.cut(text, begin, ends, state);
    SPS_CHECK(n > 0 && n <= ends.size());
    all.insert(all.end(), ends.begin(), ends.begin() + std::ptrdiff_t(n));
  }
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  static const std::array kPatterns = {patterns::gpt2,   patterns::gpt2_tiktoken,
                                       patterns::cl100k, patterns::cl100k_tiktoken,
                                       patterns::qwen2,  patterns::o200k};
  static const auto kCutters = [] {
    std::vector<std::pair<std::unique_ptr<Cutter>, std::unique_ptr<Cutter>>> cutters;
    for (const std::string_view pattern : kPatterns)
      cutters.emplace_back(make_cutter({SplitStep::Kind::pattern, std::string(pattern)}),
                           make_regex_cutter(pattern));
    return cutters;
  }();
  // The scanners know a later Unicode than PCRE2, where it is of a distribution: texts with characters that
  // it does not know are left out. U+FFFF is what it gets for a byte that is not UTF-8.
  static const auto kUnassigned = make_regex_cutter(R"([^\P{Cn}\x{FFFF}])");
  fuzz::Input input(data, size);
  const auto& [scanner, regex] = kCutters[input.choose(kCutters.size())];
  if (ends_of(*kUnassigned, input.rest()).size() > 1) return 0;
  const std::vector<size_t> ends = ends_of(*scanner, input.rest());
  SPS_CHECK(ends.empty() == input.rest().empty() && (ends.empty() || ends.back() == input.rest().size()));
  SPS_CHECK(ends == ends_of(*regex, input.rest()));
  return 0;
}
