#include "ops/rope/rope.h"

#include <numeric>

#include "ops/bench.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

constexpr int64_t kRows = 8192, kHeadDim = 64, kContext = 4096;

struct Data {
  Matrix x, y, gain, rstd, dgain, cos, sin;
  RopeTable table;
  std::vector<int32_t> positions;
  int64_t heads;
  Data(DType act, int64_t d, RopePairs pairs)
      : x(act, kRows, d),
        y(act, kRows, d),
        gain(DType::f32, 1, kHeadDim),
        rstd(DType::f32, kRows, d / kHeadDim),
        dgain(DType::f32, 1, kHeadDim),
        cos(DType::f32, kContext, kHeadDim / 2),
        sin(DType::f32, kContext, kHeadDim / 2),
        table{*cos, *sin, pairs},
        positions(size_t(kRows)),
        heads(d / kHeadDim) {
    rope_fill(table, 10000);
    for (int64_t r = 0; r < kRows; ++r) positions[size_t(r)] = int32_t(r % kContext);
    x.randomise(1, "x");
    gain.fill(1);
  }
};

void in_place(benchmark::State& state, DType act, RopePairs pairs) {
  Data t(act, state.range(0), pairs);
  for (auto _ : state) rope_forward({}, t.x, t.heads, t.table, t.positions, {}, {}, t.x);
  report_bytes(state, kRows * state.range(0) * int64_t(2 * dtype_size(act)));
}

void qk_norm(benchmark::State& state, DType act) {
  Data t(act, state.range(0), RopePairs::adjacent);
  for (auto _ : state) rope_forward({}, t.x, t.heads, t.table, t.positions, {*t.gain}, t.rstd, t.y);
  report_bytes(state, kRows * state.range(0) * int64_t(2 * dtype_size(act)));
}

void qk_norm_backward(benchmark::State& state, DType act) {
  Data t(act, state.range(0), RopePairs::adjacent);
  rope_forward({}, t.x, t.heads, t.table, t.positions, {*t.gain}, t.rstd, t.y);
  for (auto _ : state)
    rope_backward({}, t.y, t.heads, t.table, t.positions, {*t.gain}, t.x, t.rstd, t.y, t.dgain);
  report_bytes(state, kRows * state.range(0) * int64_t(3 * dtype_size(act)));
}

BENCHMARK(bench_memcpy)->Arg(kRows * 256 * 8)->Arg(kRows * 768 * 8)->UseRealTime();
BENCHMARK_CAPTURE(in_place, f32, DType::f32, RopePairs::adjacent)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(in_place, bf16, DType::bf16, RopePairs::adjacent)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(in_place, f32_half_split, DType::f32, RopePairs::half_split)
    ->Arg(256)
    ->Arg(768)
    ->UseRealTime();
BENCHMARK_CAPTURE(in_place, bf16_half_split, DType::bf16, RopePairs::half_split)
    ->Arg(256)
    ->Arg(768)
    ->UseRealTime();
BENCHMARK_CAPTURE(qk_norm, f32, DType::f32)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(qk_norm, bf16, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(qk_norm_backward, f32, DType::f32)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(qk_norm_backward, bf16, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();

}  // namespace
}  // namespace sps::ops
