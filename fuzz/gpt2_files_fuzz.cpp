// GPT-2's two files and a text.
#include "fuzz/tokenizer_checks.h"
#include "tokenizer/load_gpt2_files.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sps;
  fuzz::Input input(data, size);
  const std::string_view vocab = input.part(), merges = input.part(), text = input.rest();
  fuzz::accepts(
      [&] { fuzz::check_tokenizer(parse_gpt2_files(vocab, "encoder.json", merges, "vocab.bpe"), text); });
  return 0;
}
