// Loading, encoding and decoding on one thread. The tokenizer is what SPS_BENCH_TOKENIZER names (as for
// make_tokenizer), the text is the file SPS_BENCH_TEXT.
#include <benchmark/benchmark.h>

#include <cstdlib>

#include "base/files.h"
#include "tokenizer/bpe_tokenizer.h"

namespace sps {
namespace {

bool has_inputs(benchmark::State& state) {
  if (std::getenv("SPS_BENCH_TOKENIZER") != nullptr && std::getenv("SPS_BENCH_TEXT") != nullptr) return true;
  state.SkipWithError("set SPS_BENCH_TOKENIZER to a tokenizer and SPS_BENCH_TEXT to a text file");
  return false;
}

const Tokenizer& bench_tokenizer() {
  static const auto tokenizer = make_tokenizer(std::getenv("SPS_BENCH_TOKENIZER"));
  return *tokenizer;
}

const std::string& bench_text() {
  static const std::string text = read_text(std::getenv("SPS_BENCH_TEXT"));
  return text;
}

void load(benchmark::State& state) {
  if (!has_inputs(state)) return;
  for (auto _ : state) benchmark::DoNotOptimize(make_tokenizer(std::getenv("SPS_BENCH_TOKENIZER")));
}
BENCHMARK(load)->Unit(benchmark::kMillisecond);

// Documents of about 4 kB, as preparing a corpus has them.
void encode(benchmark::State& state) {
  if (!has_inputs(state)) return;
  std::string_view text = bench_text();
  std::vector<std::string_view> documents;
  for (size_t length; !text.empty(); text.remove_prefix(length)) {
    length = text.size() <= 4000 ? text.size() : std::min(text.find('\n', 4000), text.size());
    documents.push_back(text.substr(0, length));
  }
  std::vector<int32_t> ids;
  for (auto _ : state)
    for (const std::string_view document : documents) {
      ids.clear();
      bench_tokenizer().encode(document, ids);
      benchmark::DoNotOptimize(ids.data());
    }
  state.SetBytesProcessed(int64_t(state.iterations() * bench_text().size()));
}
BENCHMARK(encode)->Unit(benchmark::kMillisecond);

// Cutting alone.
void split(benchmark::State& state) {
  if (!has_inputs(state)) return;
  const auto* bpe = dynamic_cast<const BpeTokenizer*>(&bench_tokenizer());
  if (bpe == nullptr) return state.SkipWithError("SPS_BENCH_TOKENIZER is no BPE");
  const Splitter splitter(bpe->model().splits);
  size_t words = 0;
  for (auto _ : state) splitter.for_each(bench_text(), [&](std::string_view word) { words += word.size(); });
  benchmark::DoNotOptimize(words);
  state.SetBytesProcessed(int64_t(words));
}
BENCHMARK(split)->Unit(benchmark::kMillisecond);

void decode(benchmark::State& state) {
  if (!has_inputs(state)) return;
  std::vector<int32_t> ids;
  bench_tokenizer().encode(bench_text(), ids);
  for (auto _ : state) benchmark::DoNotOptimize(bench_tokenizer().decode(ids));
  state.SetBytesProcessed(int64_t(state.iterations() * bench_text().size()));
}
BENCHMARK(decode)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace sps
