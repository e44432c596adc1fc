// GB/s of keys and values read while decoding one position of each sequence: one stream of queries, two over
// the same keys, and two that also have a window of 64 predictions. On a GPU the calls of all layers of a
// model are one graph, so that neither launches nor the last call's keys in the cache make the figures.
#include "ops/bench.h"
#include "ops/check.h"
#include "ops/decode_attention/decode_attention.h"
#include "tensor/arena.h"
#include "tensor/graph.h"

namespace sps::ops {
namespace {

constexpr int64_t kPage = 64, kWindow = 64;

struct Workload {
  int streams = 1;
  bool window = false;
  int64_t heads = 12, head_dim = 64;
};

void decode(benchmark::State& state, Backend backend, Workload w) {
  const DType dtype = backend.dtype;
  const bool gpu = backend.device == Device::cuda;
  const int64_t sequences = state.range(0), length = state.range(1), per_slot = length / kPage + 1,
                wide = w.heads * w.head_dim, layers = gpu ? 24 : 1;
  std::vector<int32_t> slot, one, begin, zero, pages;
  for (int64_t b = 0; b < sequences; ++b) {
    slot.push_back(int32_t(b)), one.push_back(1), zero.push_back(0), begin.push_back(int32_t(length));
    for (int64_t p = 0; p < per_slot; ++p) pages.push_back(int32_t(b * per_slot + p));
  }
  // As the engine holds them: one allocation.
  const int64_t rows = sequences * per_slot * w.heads * kPage, ring = sequences * w.heads * kWindow;
  const int64_t rings = w.window ? ring : 0;
  Arena memory(
      size_t(layers * (2 * (rows + rings) * w.head_dim)) * dtype_size(dtype) + size_t(4 * layers + 8) * 64,
      backend.device);
  std::array<Matrix, kMaxQueryStreams> q, o;
  Matrix k(dtype, sequences, wide), v(dtype, sequences, wide);
  k.randomise(1, "k"), v.randomise(1, "v");
  OnDevice on(backend.device);
  DecodeStep step{sequences, 1, on.ids(slot), {}, {on.ids(pages), per_slot}};
  for (StepRows& s : step.stream) s = {on.ids(slot), on.ids(one), on.ids(begin), on.ids(zero), on.ids(zero)};
  std::array<DecodeQueries, kMaxQueryStreams> queries;
  const Band none = Band::none();
  for (size_t s = 0; s < size_t(w.streams); ++s) {
    q[s] = Matrix(dtype, sequences, wide), o[s] = Matrix(dtype, sequences, wide);
    q[s].randomise(1, "q");
    const Band recent = w.window ? Band{s == 0 ? 1 : 0, kWindow} : none;
    queries[s] = {on(q[s]), on(o[s]), {Band::causal(), recent, none}};
  }
  std::vector<std::array<DecodeKeys, kMaxKeySets>> keys;
  for (int64_t l = 0; l < layers; ++l) {
    const auto cache = [&](int64_t n) { return memory.take(dtype, n, w.head_dim); };
    keys.push_back({DecodeKeys{on(k), on(v), 0, {cache(rows), cache(rows), kPage, true}}});
    if (w.window) keys.back()[1] = {on(k), on(v), 1, {cache(ring), cache(ring), kWindow, false}};
  }
  const auto issue = [&] {
    for (const auto& layer : keys)
      decode_attention(on.exec(), {w.heads, w.heads, w.head_dim, 0.125F}, step, queries, layer);
  };
  issue();
  StreamGraph graph;
  if (gpu) graph.record(on.exec(), issue);
  for (auto _ : state) {
    gpu ? graph.start(on.exec()) : issue();
    synchronize(on.exec());
  }
  const int64_t seen = length + (w.window ? kWindow : 0);
  report_bytes(state, layers * sequences * seen * 2 * wide * int64_t(dtype_size(dtype)));
  state.counters["us/layer"] = benchmark::Counter(double(state.iterations() * layers) * 1e-6,
                                                  benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void register_all() {
  const auto add = [](const std::string& name, Backend backend, Workload w,
                      const std::vector<std::vector<int64_t>>& ranges) {
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { decode(state, backend, w); })
        ->ArgsProduct(ranges)
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  };
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int streams : {1, 2})
      add(fmt::format("{}/{} streams", dtype_name(dtype), streams), {Device::cpu, dtype}, {streams},
          {{1, 8}, {1024, 4096}});
  if (gpu_count() == 0) return;
  // 16 heads of 64, as in M; 128 wide.
  const Backend gpu{Device::cuda, DType::bf16};
  for (const int64_t head_dim : {64, 128})
    for (const Workload& w :
         std::vector<Workload>{{1, false, 16, head_dim}, {2, false, 16, head_dim}, {2, true, 16, head_dim}})
      add(fmt::format("cuda/heads of {}/{} streams{}", head_dim, w.streams, w.window ? " and a window" : ""),
          gpu, w, {{1, 4, 16}, {2560}});
}
[[maybe_unused]] const bool registered = (register_all(), true);

BENCHMARK(bench_memcpy)->Arg(8 * 4096 * 768 * 2)->UseRealTime();

}  // namespace
}  // namespace sps::ops
