// GB/s of weights: with few rows they are the traffic. The weights of twelve layers take turns, so that they
// do not stay in the caches of a core.
#include "ops/bench.h"
#include "ops/check.h"
#include "ops/decode_linear/decode_linear.h"
#include "ops/linear/linear.h"
#include "tensor/arena.h"

namespace sps::ops {
namespace {

void product(benchmark::State& state, DType dtype, bool decode) {
  constexpr int64_t kLayers = 12;
  const int64_t rows = state.range(0), in = state.range(1), out = state.range(2);
  Arena memory(size_t(kLayers * out * in) * dtype_size(dtype), Device::cpu);  // in huge pages, as weights are
  const Tensor w = memory.take(dtype, kLayers * out, in);
  Matrix x(dtype, rows, in), y(dtype, rows, out);
  x.randomise(1, "x");
  int64_t layer = 0;
  for (auto _ : state) {
    const Tensor weights = w.rows_from(layer++ % kLayers * out, out);
    decode ? decode_linear({}, *x, weights, y) : linear_forward({}, x, weights, y);
  }
  report_bytes(state, in * out * int64_t(dtype_size(dtype)));
}

void register_all() {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const bool decode : {true, false})
      benchmark::RegisterBenchmark(
          (std::string(dtype_name(dtype)) + (decode ? "/decode_linear" : "/linear")).c_str(),
          [=](benchmark::State& state) { product(state, dtype, decode); })
          ->ArgsProduct({{1, 2, 8, 32, 256}, {768}, {4608}})
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
}
[[maybe_unused]] const bool registered = (register_all(), true);

BENCHMARK(bench_memcpy)->Arg(4608 * 768 * 2)->UseRealTime();

}  // namespace
}  // namespace sps::ops
