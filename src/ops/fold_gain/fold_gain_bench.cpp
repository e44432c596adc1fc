// Bytes: forward reads w and writes y; backward reads dy, w and updates dw.
#include "ops/fold_gain/fold_gain.h"

#include <benchmark/benchmark.h>

#include "tensor/arena.h"

namespace sps::ops {
namespace {

void fold_gain_forward_bench(benchmark::State& state, DType act) {
  const int64_t rows = state.range(0), cols = state.range(1);
  Arena arena(size_t(rows + 1) * size_t(cols) * 8 + 256, Device::cpu);
  const Tensor w = arena.take(DType::f32, rows, cols), gain = arena.take(DType::f32, 1, cols);
  const Tensor y = arena.take(act, rows, cols);
  for (auto _ : state) fold_gain_forward({}, w, gain, y);
  state.SetBytesProcessed(state.iterations() * w.count() * int64_t(4 + dtype_size(act)));
}

void fold_gain_backward_bench(benchmark::State& state) {
  const int64_t rows = state.range(0), cols = state.range(1);
  Arena arena(size_t(rows + 1) * size_t(cols) * 12 + 512, Device::cpu);
  const Tensor w = arena.take(DType::f32, rows, cols), dy = arena.take(DType::f32, rows, cols);
  const Tensor dw = arena.take(DType::f32, rows, cols);
  const Tensor gain = arena.take(DType::f32, 1, cols), dgain = arena.take(DType::f32, 1, cols);
  for (auto _ : state) fold_gain_backward({}, dy, w, gain, dw, dgain);
  state.SetBytesProcessed(state.iterations() * w.count() * 16);
}

BENCHMARK_CAPTURE(fold_gain_forward_bench, f32, DType::f32)->Args({6144, 512})->UseRealTime();
BENCHMARK_CAPTURE(fold_gain_forward_bench, bf16, DType::bf16)->Args({6144, 512})->UseRealTime();
BENCHMARK(fold_gain_backward_bench)->Args({6144, 512})->UseRealTime();

}  // namespace
}  // namespace sps::ops
