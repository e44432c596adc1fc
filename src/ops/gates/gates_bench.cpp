// Bytes: pool forward reads a, p and writes m; its backward reads dm, a, p and writes da, dp; scatter forward
// reads f and writes two rows; its backward reads three and writes one. One number a row is not counted.
#include "ops/gates/gates.h"

#include <benchmark/benchmark.h>

#include <array>

#include "tensor/arena.h"

namespace sps::ops {
namespace {

struct Tensors {
  Arena arena;
  std::array<Tensor, 5> rows;
  std::array<Tensor, 6> w;
  std::array<Tensor, 5> s;
  Tensors(DType dtype, int64_t n, int64_t d)
      : arena(size_t(n * d * 5) * dtype_size(dtype) + size_t(n * 20 + d * 48) + 4096, Device::cpu) {
    for (Tensor& t : rows) t = arena.take(dtype, n, d);
    for (Tensor& t : w) t = arena.take(DType::f32, 1, 2 * d);
    for (Tensor& t : s) t = arena.take(DType::f32, n, 1);
  }
  Tensor half(size_t i) const { return w[i].cols_from(0, w[i].cols / 2); }
  GateWeights weights(size_t i) const { return {w[i], half(i + 1), half(i + 2)}; }
  GateRows gates() const { return {s[0], s[1], s[2]}; }
  GateRows t() const { return {{}, s[3], s[4]}; }
};

void count_bytes(benchmark::State& state, const Tensors& t, int64_t tensors) {
  state.SetBytesProcessed(state.iterations() * tensors * t.rows[0].count() *
                          int64_t(dtype_size(t.rows[0].dtype)));
}

void pool_forward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state) pool_forward({}, t.rows[0], t.rows[1], t.weights(0), t.gates(), t.rows[2]);
  count_bytes(state, t, 3);
}

void pool_backward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state)
    pool_backward({}, t.rows[0], t.rows[1], t.rows[2], t.weights(0), t.gates(), t.t(), t.rows[3], t.rows[4],
                  t.weights(3));
  count_bytes(state, t, 5);
}

void scatter_forward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state) scatter_forward({}, t.rows[0], t.gates(), t.rows[1], t.rows[2]);
  count_bytes(state, t, 3);
}

void scatter_backward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state) scatter_backward({}, t.rows[0], t.rows[1], t.rows[2], t.gates(), t.rows[3], t.t());
  count_bytes(state, t, 4);
}

void shapes(benchmark::internal::Benchmark* b) {
  b->Args({8192, 512})->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(pool_forward_bench, f32, DType::f32)->Apply(shapes);
BENCHMARK_CAPTURE(pool_forward_bench, bf16, DType::bf16)->Apply(shapes);
BENCHMARK_CAPTURE(pool_backward_bench, f32, DType::f32)->Apply(shapes);
BENCHMARK_CAPTURE(pool_backward_bench, bf16, DType::bf16)->Apply(shapes);
BENCHMARK_CAPTURE(scatter_forward_bench, f32, DType::f32)->Apply(shapes);
BENCHMARK_CAPTURE(scatter_forward_bench, bf16, DType::bf16)->Apply(shapes);
BENCHMARK_CAPTURE(scatter_backward_bench, f32, DType::f32)->Apply(shapes);
BENCHMARK_CAPTURE(scatter_backward_bench, bf16, DType::bf16)->Apply(shapes);

}  // namespace
}  // namespace sps::ops
