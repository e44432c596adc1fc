// GB/s of keys and values read while decoding one position of each sequence, for one and for two streams of
// queries over the same keys.
#include "ops/bench.h"
#include "ops/check.h"
#include "ops/decode_attention/decode_attention.h"
#include "tensor/arena.h"

namespace sps::ops {
namespace {

void decode(benchmark::State& state, DType dtype, int streams) {
  constexpr int64_t kHeads = 12, kHeadDim = 64, kPage = 64, kWide = kHeads * kHeadDim;
  const int64_t sequences = state.range(0), length = state.range(1), per_slot = length / kPage + 1;
  std::vector<int32_t> slot, one, begin, zero, pages;
  for (int64_t b = 0; b < sequences; ++b) {
    slot.push_back(int32_t(b)), one.push_back(1), zero.push_back(0), begin.push_back(int32_t(length));
    for (int64_t p = 0; p < per_slot; ++p) pages.push_back(int32_t(b * per_slot + p));
  }
  // As the engine holds them: in huge pages.
  const int64_t rows = sequences * per_slot * kHeads * kPage;
  Arena memory(size_t(2 * rows * kHeadDim) * dtype_size(dtype) + 64, Device::cpu);
  const Tensor cache_k = memory.take(dtype, rows, kHeadDim), cache_v = memory.take(dtype, rows, kHeadDim);
  std::array<Matrix, kMaxQueryStreams> q, o;
  Matrix k(dtype, sequences, kWide), v(dtype, sequences, kWide);
  k.randomise(1, "k"), v.randomise(1, "v");
  DecodeStep step{sequences, 1, slot, {}, {pages, per_slot}};
  for (StepRows& rows : step.stream) rows = {slot, one, begin, zero, zero};
  std::array<DecodeQueries, kMaxQueryStreams> queries;
  for (int s = 0; s < streams; ++s) {
    q[size_t(s)] = Matrix(dtype, sequences, kWide), o[size_t(s)] = Matrix(dtype, sequences, kWide);
    q[size_t(s)].randomise(1, "q");
    queries[size_t(s)] = {q[size_t(s)], o[size_t(s)], {Band::causal()}};
  }
  const std::array<DecodeKeys, kMaxKeySets> keys{DecodeKeys{k, v, 0, {cache_k, cache_v, kPage, true}}};
  for (auto _ : state) decode_attention({}, {kHeads, kHeads, kHeadDim, 0.125F}, step, queries, keys);
  report_bytes(state, sequences * length * 2 * kWide * int64_t(dtype_size(dtype)));
}

void register_all() {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int streams : {1, 2})
      benchmark::RegisterBenchmark(fmt::format("{}/{} streams", dtype_name(dtype), streams).c_str(),
                                   [=](benchmark::State& state) { decode(state, dtype, streams); })
          ->ArgsProduct({{1, 8}, {1024, 4096}})
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
}
[[maybe_unused]] const bool registered = (register_all(), true);

BENCHMARK(bench_memcpy)->Arg(8 * 4096 * 768 * 2)->UseRealTime();

}  // namespace
}  // namespace sps::ops
