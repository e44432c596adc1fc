// Bytes: reads w, grad, m, v and writes w, m, v, and the bf16 copy where there is one: 28 or 30 a weight.
#include "ops/adamw/adamw.h"

#include <benchmark/benchmark.h>

#include <algorithm>

#include "tensor/arena.h"

namespace sps::ops {
namespace {

void adamw_bench(benchmark::State& state, bool copy) {
  const int64_t n = state.range(0);
  Arena arena(size_t(n) * 18 + 512, Device::cpu);
  const Tensor w = arena.take(DType::f32, 1, n), grad = arena.take(DType::f32, 1, n);
  const Tensor m = arena.take(DType::f32, 1, n), v = arena.take(DType::f32, 1, n);
  const Tensor w_act = copy ? arena.take(DType::bf16, 1, n) : Tensor{};
  std::fill_n(w.as<float>(), n, 0.02F);
  std::fill_n(grad.as<float>(), n, 1e-3F);
  for (auto _ : state) adamw({}, {}, w, grad, m, v, w_act);
  state.SetBytesProcessed(state.iterations() * n * (copy ? 30 : 28));
}

BENCHMARK_CAPTURE(adamw_bench, f32, false)->Arg(3'000'000)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(adamw_bench, with_bf16_copy, true)
    ->Arg(3'000'000)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace sps::ops
