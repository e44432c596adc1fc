#include "ops/clip/clip.h"

#include <benchmark/benchmark.h>

#include "tensor/arena.h"

namespace sps::ops {
namespace {

void sum_of_squares_bench(benchmark::State& state) {
  Arena arena(size_t(state.range(0)) * 4 + 64, Device::cpu);
  const Tensor x = arena.take(DType::f32, 1, state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(sum_of_squares({}, x));
  state.SetBytesProcessed(state.iterations() * x.count() * 4);
}

BENCHMARK(sum_of_squares_bench)->Arg(3'000'000)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace sps::ops
