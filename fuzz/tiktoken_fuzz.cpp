// A rank file of tiktoken and a text.
#include "fuzz/tokenizer_checks.h"
#include "tokenizer/load_tiktoken.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  constexpr std::string_view kStems[] = {"gpt2", "cl100k_base", "o200k_base", "tokenizer", "unknown"};
  fuzz::Input input(data, size);
  const std::string_view stem = kStems[input.choose(std::size(kStems))];
  const TokenizerOptions options =
      stem == "unknown" ? TokenizerOptions{.eot = "<|end|>", .pattern = R"(\w+|\W)"} : TokenizerOptions{};
  const std::string_view ranks = input.part(), text = input.rest();
  fuzz::accepts([&] { fuzz::check_tokenizer(parse_tiktoken(ranks, "x.tiktoken", stem, options), text); });
  return 0;
}
