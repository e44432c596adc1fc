#include "ops/embedding/embedding.h"

#include "ops/bench.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

constexpr int64_t kRows = 8192;

// Token frequencies fall like 1/rank, as in text.
std::vector<int32_t> zipf_ids(int64_t vocab) {
  const Rng rng(1, "ids");
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < kRows; ++r)
    ids.push_back(int32_t(std::pow(double(vocab), rng.uniform(uint64_t(r)))) - 1);
  return ids;
}

void forward(benchmark::State& state) {
  const int64_t d = state.range(0), vocab = state.range(1);
  const auto ids = zipf_ids(vocab);
  Matrix table(DType::f32, vocab, d), y(DType::f32, kRows, d);
  for (auto _ : state) embedding_forward({}, ids, table, {}, y);
  report_bytes(state, kRows * d * 8);
}

void backward(benchmark::State& state) {
  const int64_t d = state.range(0), vocab = state.range(1);
  const auto ids = zipf_ids(vocab);
  Matrix dtable(DType::f32, vocab, d), dy(DType::f32, kRows, d);
  for (auto _ : state) embedding_backward({}, ids, dy, dtable, {});
  report_bytes(state, kRows * d * 12);
}

BENCHMARK(bench_memcpy)->Arg(kRows * 256 * 8)->Arg(kRows * 768 * 8)->UseRealTime();
BENCHMARK(forward)->ArgsProduct({{192, 256, 768, 1024}, {320, 50304}})->UseRealTime();
BENCHMARK(backward)->ArgsProduct({{192, 256, 768, 1024}, {320, 50304}})->UseRealTime();

}  // namespace
}  // namespace sps::ops
