// A tokenizer.json and a text.
#include "fuzz/tokenizer_checks.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  fuzz::Input input(data, size);
  const std::string_view json = input.part(), text = input.rest();
  fuzz::accepts([&] { fuzz::check_tokenizer(parse_tokenizer_json(json, "tokenizer.json"), text); });
  return 0;
}
