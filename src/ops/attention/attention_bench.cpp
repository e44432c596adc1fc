// FLOP/s on visible pairs: 4 * head_dim per pair and head forward, 10 * head_dim backward.
#include <benchmark/benchmark.h>

#include "base/error.h"
#include "ops/attention/attention_case.h"

namespace sps::ops {

namespace {

AttentionCase family(int64_t number, int64_t length) {
  AttentionCase c{.batch = 8192 / length, .length = length, .heads = 8, .kv_heads = 8, .head_dim = 64};
  c.apart = 0;
  return number == 0 ? standard(c) : number == 1 ? sps(c, 64) : free_pause(c);
}

void attention(benchmark::State& state, DType dtype, bool backward) {
  static constexpr const char* kNames[] = {"standard", "sps(64)", "free_pause"};
  const AttentionCase c = family(state.range(0), state.range(1));
  AttentionCall call(c, dtype, 1, dtype);
  for (auto _ : state) {
    call.forward();
    if (backward) call.backward();
    benchmark::ClobberMemory();
  }
  const double flops = double((backward ? 14 : 4) * c.head_dim * c.heads * call.visible_pairs());
  state.counters["FLOP/s"] =
      benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate, benchmark::Counter::kIs1000);
  state.SetLabel(fmt::format("{} T={} batch={}", kNames[state.range(0)], c.length, c.batch));
}

void register_all() {
  for (DType dtype : {DType::f32, DType::bf16})
    for (bool backward : {false, true})
      benchmark::RegisterBenchmark(
          fmt::format("{}/{}", dtype_name(dtype), backward ? "forward+backward" : "forward").c_str(),
          [=](benchmark::State& state) { attention(state, dtype, backward); })
          ->ArgsProduct({{0, 1, 2}, {256, 1024}})
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
}
[[maybe_unused]] const bool registered = (register_all(), true);

}  // namespace

}  // namespace sps::ops
