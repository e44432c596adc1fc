#include "ops/rmsnorm/rmsnorm.h"

#include "ops/bench.h"
#include "ops/check.h"

namespace sps::ops {
namespace {

constexpr int64_t kRows = 8192;

struct Data {
  Matrix x, delta, gain, s, y, rstd, dres, ds_act, dgain;
  Data(DType act, int64_t d)
      : x(DType::f32, kRows, d),
        delta(act, kRows, d),
        gain(DType::f32, 1, d),
        s(DType::f32, kRows, d),
        y(act, kRows, d),
        rstd(DType::f32, kRows, 1),
        dres(DType::f32, kRows, d),
        ds_act(act, kRows, d),
        dgain(DType::f32, 1, d) {
    x.randomise(1, "x");
    delta.randomise(1, "delta");
    gain.fill(1);
  }
};

// s = x + delta, y = norm(s)
void forward(benchmark::State& state, DType act) {
  const int64_t d = state.range(0);
  Data t(act, d);
  for (auto _ : state) rmsnorm_forward({}, t.x, t.delta, t.gain, 1e-6F, t.s, t.y, t.rstd);
  report_bytes(state, kRows * d * int64_t(8 + 2 * dtype_size(act)));
}

// y = norm(x), nothing else moves
void forward_only(benchmark::State& state, DType act) {
  const int64_t d = state.range(0);
  Data t(act, d);
  for (auto _ : state) rmsnorm_forward({}, t.x, {}, t.gain, 1e-6F, t.x, t.y, t.rstd);
  report_bytes(state, kRows * d * int64_t(4 + dtype_size(act)));
}

// As in a block: the residual gradient in place, a copy in the act dtype.
void backward(benchmark::State& state, DType act) {
  const int64_t d = state.range(0);
  Data t(act, d);
  rmsnorm_forward({}, t.x, t.delta, t.gain, 1e-6F, t.s, t.y, t.rstd);
  for (auto _ : state) rmsnorm_backward({}, t.delta, t.s, t.gain, t.rstd, t.dres, t.dres, t.ds_act, t.dgain);
  report_bytes(state, kRows * d * int64_t(12 + 2 * dtype_size(act)));
}

BENCHMARK(bench_memcpy)->Arg(kRows * 256 * 12)->Arg(kRows * 768 * 12)->UseRealTime();
BENCHMARK_CAPTURE(forward, f32, DType::f32)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(forward, bf16, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(forward_only, f32, DType::f32)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(forward_only, bf16, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(backward, f32, DType::f32)->Arg(256)->Arg(768)->UseRealTime();
BENCHMARK_CAPTURE(backward, bf16, DType::bf16)->Arg(256)->Arg(768)->UseRealTime();

}  // namespace
}  // namespace sps::ops
