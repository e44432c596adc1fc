// GB/s of weights on a GPU: the products of a layer of M and of XL, one kind in all layers in turn or a
// layer's four behind each other as a step has them. Captured as a graph, as a step is. Registered where
// there is a GPU: --benchmark_filter=cuda.
#ifdef SPS_HAS_CUDA

#include "base/rng.h"
#include "ops/bench.h"
#include "ops/decode_linear/decode_linear.h"
#include "ops/linear/linear.h"
#include "tensor/arena.h"
#include "tensor/cuda.h"

namespace sps::ops {
namespace {

constexpr int64_t kLayers = 12, kVocab = 50304;  // the weights of all layers are several times the L2 cache
constexpr int kRuns = 10;                        // of the graph between two waits

struct Width {
  const char* name;
  int64_t d, ffn;
};
constexpr Width kWidths[] = {{"M", 1024, 3072}, {"XL", 1600, 4800}};
enum Kind { qkv, out, gate_up, down, layer, head, cublas_qkv, cublas_down };
constexpr std::pair<Kind, const char*> kKinds[] = {
    {qkv, "norm+qkv"}, {out, "out+add"},    {gate_up, "norm+gate_up+swiglu"}, {down, "down+add"},
    {layer, "layer"},  {head, "norm+head"}, {cublas_qkv, "linear/qkv"},       {cublas_down, "linear/down"}};

struct Model {
  Arena memory;
  std::vector<Tensor> qkv, out, gate_up, down;
  Tensor head, gain, residual, n, rstd, q, pair, h, delta, logits;

  void lay_out(Arena& a, const Width& w, int64_t rows) {
    const auto weights = [&](int64_t to, int64_t from) { return a.take(DType::bf16, to, from); };
    for (auto* list : {&qkv, &out, &gate_up, &down}) list->clear();
    for (int64_t i = 0; i < kLayers; ++i) {
      qkv.push_back(weights(3 * w.d, w.d)), out.push_back(weights(w.d, w.d));
      gate_up.push_back(weights(2 * w.ffn, w.d)), down.push_back(weights(w.d, w.ffn));
    }
    head = weights(kVocab, w.d), gain = a.take(DType::f32, 1, w.d);
    residual = a.take(DType::f32, rows, w.d), n = weights(rows, w.d), rstd = a.take(DType::f32, rows, 1);
    q = weights(rows, 3 * w.d), pair = weights(rows, 2 * w.ffn), h = weights(rows, w.ffn);
    delta = weights(rows, w.d), logits = a.take(DType::f32, rows, kVocab);
  }
  Model(const Exec& ex, const Width& w, int64_t rows) {
    Arena plan;
    lay_out(plan, w, rows);
    memory = Arena(plan.peak(), Device::cuda);
    lay_out(memory, w, rows);
    // Random numbers, the same ones again and again.
    const Rng rng(1, "weights");
    std::vector<bf16> some(1 << 20);
    for (size_t i = 0; i < some.size(); ++i) some[i] = bf16(float(0.02 * rng.normal(i)));
    const size_t bytes = some.size() * sizeof(bf16);
    auto* const begin = reinterpret_cast<std::byte*>(qkv[0].data);
    const auto* const end = reinterpret_cast<std::byte*>(gain.data);
    for (auto* to = begin; to < end; to += bytes)
      copy_bytes(ex, to, some.data(), std::min(bytes, size_t(end - to)));
    synchronize(ex);
  }

  // Bytes of weights that one pass over the layers reads.
  int64_t issue(const Exec& ex, Kind kind) {
    int64_t read = 0;
    const DecodeRows normed(residual, gain, 1e-5F, n, rstd);
    for (size_t i = 0; i < size_t(kLayers); ++i) {
      const bool all = kind == Kind::layer;
      if (all || kind == Kind::qkv) decode_linear(ex, normed, qkv[i], q), read += qkv[i].count();
      if (all || kind == Kind::out) decode_linear_add(ex, n, out[i], delta, residual), read += out[i].count();
      if (all || kind == Kind::gate_up)
        decode_linear_swiglu(ex, normed, gate_up[i], pair, h), read += gate_up[i].count();
      if (all || kind == Kind::down)
        decode_linear_add(ex, h, down[i], delta, residual), read += down[i].count();
      if (kind == Kind::cublas_qkv) linear_forward(ex, n, qkv[i], q), read += qkv[i].count();
      if (kind == Kind::cublas_down) linear_forward(ex, h, down[i], delta), read += down[i].count();
    }
    if (kind == Kind::head) decode_linear(ex, normed, head, logits), read += head.count();
    return read * int64_t(sizeof(bf16));
  }
};

void products(benchmark::State& state, const Width& width, Kind kind) {
  const Exec ex = open_gpu();
  Model model(ex, width, state.range(0));
  const int64_t bytes = model.issue(ex, kind);  // what is made once is made outside the graph
  synchronize(ex);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t step = nullptr;
  SPS_CUDA(cudaStreamBeginCapture(stream_of(ex), cudaStreamCaptureModeThreadLocal));
  model.issue(ex, kind);
  SPS_CUDA(cudaStreamEndCapture(stream_of(ex), &graph));
  SPS_CUDA(cudaGraphInstantiate(&step, graph, 0));
  for (auto _ : state) {
    for (int i = 0; i < kRuns; ++i) SPS_CUDA(cudaGraphLaunch(step, stream_of(ex)));
    synchronize(ex);
  }
  report_bytes(state, bytes * kRuns);
  SPS_CUDA(cudaGraphExecDestroy(step));
  SPS_CUDA(cudaGraphDestroy(graph));
}

void register_all() {
  if (gpu_count() == 0) return;
  for (const Width& width : kWidths)
    for (const auto& [kind, name] : kKinds)
      benchmark::RegisterBenchmark((std::string("cuda/") + width.name + "/" + name).c_str(),
                                   [width, kind = kind](benchmark::State& s) { products(s, width, kind); })
          ->ArgsProduct({{1, 2, 8, 16, 32, 64}})
          ->UseRealTime()
          ->MinTime(0.1)
          ->Unit(benchmark::kMicrosecond);
}
[[maybe_unused]] const bool registered = (register_all(), true);

}  // namespace
}  // namespace sps::ops

#endif
