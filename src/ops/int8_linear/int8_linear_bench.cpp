// GB/s of weights in 8 bits. Those of twelve layers take turns, so that they do not stay in the caches of a
// core.
#include "ops/bench.h"
#include "ops/check.h"
#include "ops/int8_linear/int8_linear.h"

namespace sps::ops {
namespace {

void product(benchmark::State& state) {
  constexpr int64_t kLayers = 12;
  const int64_t rows = state.range(0), in = state.range(1), out = state.range(2);
  std::vector<int8_t> values(Int8Matrix::value_bytes(kLayers * out, in), 3);
  std::vector<bf16> scales(Int8Matrix::scale_bytes(kLayers * out, in) / sizeof(bf16), bf16(0.01F));
  const Int8Matrix w{values.data(), scales.data(), kLayers * out, in};
  Matrix x(DType::bf16, rows, in), y(DType::bf16, rows, out);
  x.randomise(1, "x");
  int64_t layer = 0;
  for (auto _ : state) int8_linear({}, x, w.rows_from(layer++ % kLayers * out, out), y);
  report_bytes(state, int64_t(Int8Matrix::value_bytes(out, in) + Int8Matrix::scale_bytes(out, in)));
}
BENCHMARK(product)
    ->ArgsProduct({{1, 2, 8, 32, 256}, {768}, {4608}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace sps::ops
