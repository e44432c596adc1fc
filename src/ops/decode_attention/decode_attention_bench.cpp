// GB/s of keys and values read while decoding one position of each sequence, for what the families of models
// ask: one stream of queries (standard), two over the same keys (free_pause), and two that also have a window
// of 64 predictions (sps). On a GPU the shapes are those of M and XL, the calls turn and keep rows as a step
// has them, and the calls of several layers are one graph, so that neither launches nor the last call's keys
// in the cache make the figures: --benchmark_filter=cuda.
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
  int64_t heads = 12, head_dim = 64, layers = 1;
  bool turns = false;
};

// The tensors of a step that lie in the memory of its device, and the keys of every layer.
struct Tensors {
  std::array<Tensor, kMaxQueryStreams> q, o;
  Tensor k, v, turned, cos, sin, gain;
  std::vector<std::array<KeyCache, 2>> caches;

  void lay_out(Arena& a, DType dtype, const Workload& w, int64_t sequences, int64_t length,
               int64_t per_slot) {
    const int64_t wide = w.heads * w.head_dim, rows = sequences * per_slot * w.heads * kPage,
                  ring = w.window ? sequences * w.heads * kWindow : 0;
    for (size_t s = 0; s < size_t(w.streams); ++s)
      q[s] = a.take(dtype, sequences, wide), o[s] = a.take(dtype, sequences, wide);
    k = a.take(dtype, sequences, wide), v = a.take(dtype, sequences, wide);
    turned = a.take(dtype, sequences, wide);
    cos = a.take(DType::f32, length + 1, w.head_dim / 2),
    sin = a.take(DType::f32, length + 1, w.head_dim / 2);
    gain = a.take(DType::f32, 1, w.head_dim);
    caches.clear();
    for (int64_t l = 0; l < w.layers; ++l) {
      const auto cache = [&](int64_t n) { return a.take(dtype, n, w.head_dim); };
      caches.push_back({KeyCache{cache(rows), cache(rows), kPage, true}, KeyCache{}});
      if (w.window) caches.back()[1] = {cache(ring), cache(ring), kWindow, false};
    }
  }
};

// Random numbers, the same ones again and again.
void fill(const Exec& ex, Tensor first, Tensor last, DType dtype) {
  const Rng rng(1, "numbers");
  Matrix some(dtype, 1, 1 << 20);
  for (int64_t i = 0; i < some->cols; ++i) some.set(0, i, rng.normal(uint64_t(i)));
  auto* to = static_cast<std::byte*>(first.data);
  const auto* const end = static_cast<std::byte*>(last.data) + size_t(last.count()) * dtype_size(dtype);
  for (size_t n = 0; to < end; to += n) {
    n = std::min(size_t(end - to), size_t(some->count()) * dtype_size(dtype));
    copy_bytes(ex, to, some->data, n);
  }
  synchronize(ex);
}

void decode(benchmark::State& state, Backend backend, Workload w) {
  const DType dtype = backend.dtype;
  const bool gpu = backend.device == Device::cuda;
  const int64_t sequences = state.range(0), length = state.range(1), per_slot = length / kPage + 1,
                wide = w.heads * w.head_dim, seen = length + (w.window ? kWindow : 0),
                of_layer = sequences * seen * 2 * wide * int64_t(dtype_size(dtype));
  // More than a GPU's cache holds, less than its memory.
  if (gpu) w.layers = std::clamp<int64_t>((int64_t{4} << 30) / of_layer, 4, w.layers);
  std::vector<int32_t> slot, one, begin, zero, pages;
  for (int64_t b = 0; b < sequences; ++b) {
    slot.push_back(int32_t(b)), one.push_back(1), zero.push_back(0), begin.push_back(int32_t(length));
    for (int64_t p = 0; p < per_slot; ++p) pages.push_back(int32_t(b * per_slot + p));
  }
  Tensors t;
  Arena plan;
  t.lay_out(plan, dtype, w, sequences, length, per_slot);
  Arena memory(plan.peak(), backend.device);
  t.lay_out(memory, dtype, w, sequences, length, per_slot);

  OnDevice on(backend.device);
  fill(on.exec(), t.q[0], t.turned, dtype);
  fill(on.exec(), t.caches.front()[0].k, t.caches.back()[w.window ? 1 : 0].v, dtype);
  DecodeSchedules schedules(on.exec());
  DecodeStep step{sequences,           1, on.ids(slot), {}, {on.ids(pages), per_slot}, &schedules,
                  on.ids(one).first(1)};
  for (StepRows& s : step.stream) s = {on.ids(slot), on.ids(one), on.ids(begin), on.ids(zero), on.ids(zero)};
  std::array<DecodeQueries, kMaxQueryStreams> queries;
  DecodeRotation rotation;
  rotation.table = {t.cos, t.sin, RopePairs::half_split};
  const Band none = Band::none();
  for (size_t s = 0; s < size_t(w.streams); ++s) {
    const Band recent = w.window ? Band{s == 0 ? 1 : 0, kWindow} : none;
    queries[s] = {t.q[s], t.o[s], {Band::causal(), recent, none}};
    rotation.q_gain[s] = t.gain;
  }
  std::vector<std::array<DecodeKeys, kMaxKeySets>> keys;
  for (const auto& cache : t.caches) {
    keys.push_back({DecodeKeys{t.k, t.v, 0, cache[0]}});
    if (w.window) keys.back()[1] = {t.k, t.v, 1, cache[1]};
  }
  rotation.set[0] = {t.turned, t.gain, true};
  if (w.window) rotation.set[1] = rotation.set[0];
  const DecodeShape shape{w.heads, w.heads, w.head_dim, 0.125F};
  const auto issue = [&] {
    for (const auto& layer : keys)
      w.turns ? decode_attention(on.exec(), shape, step, queries, layer, rotation)
              : decode_attention(on.exec(), shape, step, queries, layer);
  };
  issue();
  StreamGraph graph;
  if (gpu) graph.record(on.exec(), issue);
  for (auto _ : state) {
    gpu ? graph.start(on.exec()) : issue();
    synchronize(on.exec());
  }
  report_bytes(state, w.layers * of_layer);
  state.counters["us/layer"] = benchmark::Counter(double(state.iterations() * w.layers) * 1e-6,
                                                  benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void register_all() {
  const auto add = [](const std::string& name, Backend backend, Workload w,
                      const std::vector<std::vector<int64_t>>& ranges) {
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { decode(state, backend, w); })
        ->ArgsProduct(ranges)
        ->UseRealTime()
        ->MinTime(backend.device == Device::cuda ? 0.1 : 0.5)
        ->Unit(benchmark::kMicrosecond);
  };
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int streams : {1, 2})
      add(fmt::format("{}/{} streams", dtype_name(dtype), streams), {Device::cpu, dtype}, {streams},
          {{1, 8}, {1024, 4096}});
  if (gpu_count() == 0) return;
  const Backend gpu{Device::cuda, DType::bf16};
  const auto families = [&](const std::string& name, int64_t heads, int64_t head_dim, int64_t layers,
                            const std::vector<std::vector<int64_t>>& ranges) {
    add("cuda/" + name + "/standard", gpu, {1, false, heads, head_dim, layers, true}, ranges);
    add("cuda/" + name + "/sps(64)", gpu, {2, true, heads, head_dim, layers, true}, ranges);
    add("cuda/" + name + "/free_pause", gpu, {2, false, heads, head_dim, layers, true}, ranges);
  };
  // In the middle of 128 tokens behind prompts of 1024; long texts; heads of 128.
  families("M", 16, 64, 24, {{1, 4, 16, 64}, {1088}});
  families("XL", 25, 64, 48, {{1, 4, 16, 64}, {1088}});
  families("M", 16, 64, 24, {{1, 16}, {4000}});
  families("heads of 128", 16, 128, 24, {{1, 16}, {1088}});
  add("cuda/M/standard, turned before", gpu, {1, false, 16, 64, 24, false}, {{1, 16}, {1088}});
}
[[maybe_unused]] const bool registered = (register_all(), true);

BENCHMARK(bench_memcpy)->Arg(8 * 4096 * 768 * 2)->UseRealTime();

}  // namespace
}  // namespace sps::ops
