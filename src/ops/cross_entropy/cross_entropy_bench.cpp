// GFLOP/s of the output head with its loss: 2 rows d vocab for evaluation, three times that for training.
// Arguments: rows, d, vocab, threads.
#include <benchmark/benchmark.h>

#include "base/threads.h"
#include "ops/check.h"
#include "ops/cross_entropy/cross_entropy.h"

namespace sps::ops {
namespace {

template <DType act, bool train>
void HeadLoss(benchmark::State& state) {
  const int64_t rows = state.range(0), d = state.range(1), vocab = state.range(2);
  const int before = thread_count();
  set_thread_count(int(state.range(3)));
  Matrix x(act, rows, d), w(act, vocab, d), dx(act, rows, d), nll(DType::f32, rows, 1),
      dw(DType::f32, vocab, d), scale(DType::f32, 1, 1);
  x.randomise(1, "x");
  w.randomise(1, "w", 0.02);
  scale.set(0, 0, 1 / double(rows));
  std::vector<int32_t> targets;
  for (int64_t r = 0; r < rows; ++r) targets.push_back(int32_t(r % vocab));
  for (auto _ : state) {
    if (train)
      head_loss_train({}, x, w, targets, scale, nll, dx, dw);
    else
      head_loss_forward({}, x, w, targets, nll);
  }
  const double flops = (train ? 6.0 : 2.0) * double(rows) * double(d) * double(vocab);
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  set_thread_count(before);
}

void shapes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"rows", "d", "vocab", "threads"})->UseRealTime()->MinTime(0.1);
  for (const int64_t threads : {1, 2}) {
    for (const int64_t vocab : {4096, 8192}) b->Args({4096, 256, vocab, threads});
    b->Args({4096, 512, 50304, threads});
    b->Args({1, 512, 50304, threads});
  }
}

BENCHMARK_TEMPLATE(HeadLoss, DType::bf16, false)->Name("Forward/bf16")->Apply(shapes);
BENCHMARK_TEMPLATE(HeadLoss, DType::bf16, true)->Name("Train/bf16")->Apply(shapes);
BENCHMARK_TEMPLATE(HeadLoss, DType::f32, false)->Name("Forward/f32")->Apply(shapes);
BENCHMARK_TEMPLATE(HeadLoss, DType::f32, true)->Name("Train/f32")->Apply(shapes);

}  // namespace
}  // namespace sps::ops
