// Bytes: pool forward reads a, p and writes m; its backward reads dm, a, p and updates da, dp; scatter
// forward reads a, p, f twice and writes two rows; its backward reads five and writes three. One number a row
// is not counted.
#include "ops/gates/gates.h"

#include <benchmark/benchmark.h>

#include <array>

#include "tensor/arena.h"

namespace sps::ops {
namespace {

struct Tensors {
  Arena arena;
  std::array<Tensor, 8> rows;
  std::array<Tensor, 4> w;
  std::array<Tensor, 2> s;
  Tensors(DType dtype, int64_t n, int64_t d)
      : arena(size_t(n * d * 8) * dtype_size(dtype) + size_t(n * 8 + d * 32) + 4096, Device::cpu) {
    for (Tensor& t : rows) t = arena.take(dtype, n, d);
    for (Tensor& t : w) t = arena.take(DType::f32, 1, 2 * d);
    for (Tensor& t : s) t = arena.take(DType::f32, n, 1);
  }
  Tensor half(size_t i) const { return w[i].cols_from(0, w[i].cols / 2); }
};

void count_bytes(benchmark::State& state, const Tensors& t, int64_t tensors) {
  state.SetBytesProcessed(state.iterations() * tensors * t.rows[0].count() *
                          int64_t(dtype_size(t.rows[0].dtype)));
}

void pool_forward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state) pool_forward({}, t.rows[0], t.rows[1], t.w[0], t.s[0], t.rows[2]);
  count_bytes(state, t, 3);
}

void pool_backward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state)
    pool_backward({}, t.rows[0], t.rows[1], t.rows[2], t.w[0], t.s[0], t.rows[3], t.rows[4], t.w[1]);
  count_bytes(state, t, 7);
}

void scatter_forward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state)
    scatter_forward({}, t.rows[0], t.rows[1], t.rows[2], t.half(0), t.half(1), t.s[0], t.s[1], t.rows[3],
                    t.rows[4]);
  count_bytes(state, t, 6);
}

void scatter_backward_bench(benchmark::State& state, DType dtype) {
  const Tensors t(dtype, state.range(0), state.range(1));
  for (auto _ : state)
    scatter_backward({}, t.rows[0], t.rows[1], t.rows[2], t.rows[3], t.rows[4], t.half(0), t.half(1), t.s[0],
                     t.s[1], t.rows[5], t.rows[6], t.rows[7], t.half(2), t.half(3));
  count_bytes(state, t, 8);
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
