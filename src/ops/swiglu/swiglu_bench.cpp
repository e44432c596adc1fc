// Bytes: forward reads gate and up and writes h; backward reads those and dh and writes two gradients.
#include "ops/swiglu/swiglu.h"

#include <benchmark/benchmark.h>

#include "tensor/arena.h"

namespace sps::ops {
namespace {

struct Tensors {
  Arena arena;
  Tensor gate_up, dh, d_gate_up;
  Tensors(DType dtype, int64_t rows, int64_t width)
      : arena(size_t(rows * width * 5 + 256) * dtype_size(dtype), Device::cpu),
        gate_up(arena.take(dtype, rows, 2 * width)),
        dh(arena.take(dtype, rows, width)),
        d_gate_up(arena.take(dtype, rows, 2 * width)) {}
};

void count_bytes(benchmark::State& state, const Tensors& t, int64_t tensors) {
  state.SetBytesProcessed(state.iterations() * tensors * t.dh.count() * int64_t(dtype_size(t.dh.dtype)));
  state.SetItemsProcessed(state.iterations() * t.dh.count());
}

void swiglu_forward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state) swiglu_forward({}, t.gate_up, t.dh);
  count_bytes(state, t, 3);
}

void swiglu_backward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state) swiglu_backward({}, t.gate_up, t.dh, t.d_gate_up);
  count_bytes(state, t, 5);
}

void shapes(benchmark::internal::Benchmark* b) {
  b->Args({8192, 512})->Args({8192, 768})->Args({8192, 1536})->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(swiglu_forward_bench, f32, DType::f32)->Apply(shapes);
BENCHMARK_CAPTURE(swiglu_forward_bench, bf16, DType::bf16)->Apply(shapes);
BENCHMARK_CAPTURE(swiglu_backward_bench, f32, DType::f32)->Apply(shapes);
BENCHMARK_CAPTURE(swiglu_backward_bench, bf16, DType::bf16)->Apply(shapes);

}  // namespace
}  // namespace sps::ops
