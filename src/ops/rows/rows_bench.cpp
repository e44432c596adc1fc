#include "ops/rows/rows.h"

#include "ops/bench.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

constexpr int64_t kRows = 8192;

void copy(benchmark::State& state, DType from, DType to) {
  const int64_t d = state.range(0);
  Matrix x(from, kRows, d), y(to, kRows, d);
  x.randomise(1, "x");
  for (auto _ : state) copy_rows({}, x, y);
  report_bytes(state, kRows * d * int64_t(dtype_size(from) + dtype_size(to)));
}

void add(benchmark::State& state, DType act) {
  const int64_t d = state.range(0);
  Matrix a(DType::f32, kRows, d), b(act, kRows, d);
  b.randomise(1, "b");
  for (auto _ : state) add_rows({}, a, b, a);
  report_bytes(state, kRows * d * int64_t(8 + dtype_size(act)));
}

void sum(benchmark::State& state, DType act) {
  const int64_t d = state.range(0);
  Matrix x(act, kRows, d), y(DType::f32, 1, d);
  x.randomise(1, "x");
  for (auto _ : state) sum_rows({}, x, y);
  report_bytes(state, kRows * d * int64_t(dtype_size(act)));
}

BENCHMARK(bench_memcpy)->Arg(kRows * 256 * 8)->Arg(kRows * 768 * 8)->UseRealTime();
BENCHMARK_CAPTURE(copy, f32_to_bf16, DType::f32, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(copy, bf16_to_f32, DType::bf16, DType::f32)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(copy, bf16, DType::bf16, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(add, f32, DType::f32)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(add, bf16_onto_f32, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(sum, f32, DType::f32)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(sum, bf16, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();

}  // namespace
}  // namespace sps::ops
