// Microseconds of a product and GB/s of its weights on a GPU: the products of M and of XL, one kind in all
// layers in turn or a layer's four behind each other as a step has them, captured as a graph, as a step is.
// Registered where there is a GPU: --benchmark_filter=cuda.
#ifdef SPS_HAS_CUDA

#include <memory>

#include "base/rng.h"
#include "ops/bench.h"
#include "ops/decode_linear/decode_linear.h"
#include "ops/decode_linear/decode_linear_cuda.h"
#include "ops/linear/linear.h"
#include "tensor/arena.h"
#include "tensor/cuda.h"

namespace sps::ops {
namespace {

constexpr int64_t kLayers = 50, kVocab = 50304;  // all layers' weights of one kind are twice the L2 cache
constexpr int64_t kMostRows = 64;
constexpr int kRuns = 4;  // of the graph between two waits

// `start`: of 128 features alone, to see what a product costs that has next to no weights.
enum Kind { qkv, out, gate_up, down, layer, head, start, start_add, cublas_qkv, cublas_down };
constexpr std::pair<Kind, const char*> kKinds[] = {
    {qkv, "norm+qkv"},           {out, "out+add"},         {gate_up, "norm+gate_up+swiglu"},
    {down, "down+add"},          {layer, "layer"},         {head, "norm+head"},
    {start, "norm+start"},       {start_add, "start+add"}, {cublas_qkv, "linear/qkv"},
    {cublas_down, "linear/down"}};

struct Model {
  const ModelWidth width;
  Arena memory;
  std::vector<Tensor> qkv, out, gate_up, down;
  Tensor head, gain, residual, n, rstd, q, pair, h, delta, logits;

  void lay_out(Arena& a) {
    const ModelWidth& w = width;
    const auto weights = [&](int64_t to, int64_t from) { return a.take(DType::bf16, to, from); };
    for (auto* list : {&qkv, &out, &gate_up, &down}) list->clear();
    for (int64_t i = 0; i < kLayers; ++i) {
      qkv.push_back(weights(3 * w.d, w.d)), out.push_back(weights(w.d, w.d));
      gate_up.push_back(weights(2 * w.ffn, w.d)), down.push_back(weights(w.d, w.ffn));
    }
    head = weights(kVocab, w.d);
    n = weights(kMostRows, w.d), h = weights(kMostRows, w.ffn);
    gain = a.take(DType::f32, 1, w.d), residual = a.take(DType::f32, kMostRows, w.d);
    rstd = a.take(DType::f32, kMostRows, 1);
    q = weights(kMostRows, 3 * w.d), pair = weights(kMostRows, 2 * w.ffn), delta = weights(kMostRows, w.d);
    logits = a.take(DType::f32, kMostRows, kVocab);
  }
  Model(const Exec& ex, const ModelWidth& w) : width(w) {
    Arena plan;
    lay_out(plan);
    memory = Arena(plan.peak(), Device::cuda);
    lay_out(memory);
    // Random numbers, the same ones again and again.
    const Rng rng(1, "weights");
    std::vector<bf16> some(1 << 21);
    std::vector<float> floats(size_t(kMostRows * w.d));
    for (size_t i = 0; i < some.size(); ++i) some[i] = bf16(float(0.02 * rng.normal(i)));
    for (size_t i = 0; i < floats.size(); ++i) floats[i] = float(rng.normal(i));
    const size_t bytes = some.size() * sizeof(bf16);
    auto* const begin = reinterpret_cast<std::byte*>(qkv[0].data);
    const auto* const end = reinterpret_cast<std::byte*>(gain.data);
    for (auto* to = begin; to < end; to += bytes)
      copy_bytes(ex, to, some.data(), std::min(bytes, size_t(end - to)));
    copy_bytes(ex, gain.data, floats.data(), size_t(w.d) * sizeof(float));
    copy_bytes(ex, residual.data, floats.data(), floats.size() * sizeof(float));
    synchronize(ex);
  }

  struct Issued {
    int64_t products = 0, bytes = 0;  // of weights
    void count(Tensor w) { ++products, bytes += w.count() * int64_t(sizeof(bf16)); }
  };
  Issued issue(const Exec& ex, Kind kind, int64_t rows) {
    Issued all;
    const auto first = [&](Tensor t) { return t.rows_from(0, rows); };
    const Tensor s = first(residual), y = first(q), hidden = first(h), x = first(n), d = first(delta);
    const DecodeRows normed(s, gain, 1e-5F, x, first(rstd));
    for (size_t i = 0; i < size_t(kLayers); ++i) {
      const bool each = kind == Kind::layer;
      const Tensor some = out[i].rows_from(0, 128);
      if (each || kind == Kind::qkv) decode_linear(ex, normed, qkv[i], y), all.count(qkv[i]);
      if (each || kind == Kind::out) decode_linear_add(ex, x, out[i], d, s), all.count(out[i]);
      if (each || kind == Kind::gate_up)
        decode_linear_swiglu(ex, normed, gate_up[i], first(pair), hidden), all.count(gate_up[i]);
      if (each || kind == Kind::down) decode_linear_add(ex, hidden, down[i], d, s), all.count(down[i]);
      if (kind == Kind::start) decode_linear(ex, normed, some, y.cols_from(0, 128)), all.count(some);
      if (kind == Kind::start_add)
        decode_linear_add(ex, x, some, d.cols_from(0, 128), s.cols_from(0, 128)), all.count(some);
      if (kind == Kind::cublas_qkv) linear_forward(ex, x, qkv[i], y), all.count(qkv[i]);
      if (kind == Kind::cublas_down) linear_forward(ex, hidden, down[i], d), all.count(down[i]);
    }
    if (kind == Kind::head) decode_linear(ex, normed, head, first(logits)), all.count(head);
    return all;
  }
};

Model& model_of(const Exec& ex, const ModelWidth& width) {
  static std::unique_ptr<Model> model;
  if (model == nullptr || model->width.d != width.d) {
    model.reset();
    model = std::make_unique<Model>(ex, width);
  }
  return *model;
}

void products(benchmark::State& state, const ModelWidth& width, Kind kind) {
  const Exec ex = open_gpu();
  Model& model = model_of(ex, width);
  const int64_t rows = state.range(0);
  const int before = most_direct_rows;
  most_direct_rows = state.range(1) != 0 ? 0 : 8;
  const Model::Issued once = model.issue(ex, kind, rows);  // what is made once is made outside the graph
  synchronize(ex);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t step = nullptr;
  SPS_CUDA(cudaStreamBeginCapture(stream_of(ex), cudaStreamCaptureModeThreadLocal));
  model.issue(ex, kind, rows);
  SPS_CUDA(cudaStreamEndCapture(stream_of(ex), &graph));
  most_direct_rows = before;
  SPS_CUDA(cudaGraphInstantiate(&step, graph, 0));
  for (auto _ : state) {
    for (int i = 0; i < kRuns; ++i) SPS_CUDA(cudaGraphLaunch(step, stream_of(ex)));
    synchronize(ex);
  }
  report_bytes(state, once.bytes * kRuns);
  state.counters["each"] =
      benchmark::Counter(double(once.products * kRuns),
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
  SPS_CUDA(cudaGraphExecDestroy(step));
  SPS_CUDA(cudaGraphDestroy(graph));
}

// The yardstick: a copy of range(0) bytes, read and written.
void copy(benchmark::State& state) {
  const Exec ex = open_gpu();
  const auto bytes = size_t(state.range(0));
  Arena memory(2 * bytes, Device::cuda);
  const Tensor both = memory.take(DType::bf16, 2, state.range(0) / 2);
  for (auto _ : state) {
    SPS_CUDA(cudaMemcpyAsync(both.rows_from(1, 1).data, both.data, bytes, cudaMemcpyDeviceToDevice,
                             stream_of(ex)));
    synchronize(ex);
  }
  report_bytes(state, 2 * state.range(0));
}

void register_all() {
  if (gpu_count() == 0) return;
  benchmark::RegisterBenchmark("cuda/copy", copy)->Arg(int64_t{4} << 30)->UseRealTime();
  for (const ModelWidth& width : kModelWidths)
    for (const auto& [kind, name] : kKinds)
      register_on_gpu(width, name, [width, kind = kind](auto& state) { products(state, width, kind); })
          ->ArgNames({"rows", "cluster"})
          ->ArgsProduct({{1, 2, 4, 8}, {0, 1}})
          ->ArgsProduct({{9, 16, 32, 64}, {1}});
}
[[maybe_unused]] const bool registered = (register_all(), true);

}  // namespace
}  // namespace sps::ops

#endif
