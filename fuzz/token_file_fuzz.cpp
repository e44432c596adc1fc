// Token files: a .bin alone, or a folder with meta.json and train.bin.
#include "data/data_report.h"
#include "data/token_file.h"
#include "fuzz/fuzz.h"

namespace {

using namespace sps;

void read_all(const TokenFile& file, int32_t eot) {
  file.verify();
  const TokenStatistics statistics = token_statistics(file, eot);
  SPS_CHECK(statistics.tokens == uint64_t(file.size()));
  if (file.size() > 0) SPS_CHECK(file.token(0) >= 0 && file.token(file.size() - 1) >= 0);
}

void check_meta(const std::filesystem::path& folder) {
  const TokenMeta meta = *read_token_meta(folder);
  SPS_CHECK(!is_marked_unfinished(folder));
  fuzz::must_accept([&] { SPS_CHECK(TokenMeta::from_json(meta.to_json(), "again") == meta); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fuzz::Scratch scratch;
  fuzz::Input input(data, size);
  if (input.choose(2) == 0) {
    const auto file = scratch.write("x.bin", input.rest());
    fuzz::accepts([&] {
      TokenFile tokens = TokenFile::open(file);
      fuzz::accepts([&] { read_all(tokens, 0); });
      tokens.set_vocab_size(257);
      read_all(tokens, 256);
    });
    return 0;
  }
  const std::string_view meta = input.part(), train = input.part(), val = input.rest();
  scratch.write("meta.json", meta);
  scratch.write("train.bin", train);
  scratch.write("val.bin", val);
  fuzz::accepts([&] { check_meta(scratch.path()); });
  fuzz::accepts([&] {
    const TokenFile tokens = TokenFile::open(scratch.path());
    read_all(tokens, tokens.meta()->eot);
  });
  fuzz::accepts([&] { check_data_set(scratch.path()); });
  return 0;
}
