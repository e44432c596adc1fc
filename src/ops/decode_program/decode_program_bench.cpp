// GB/s of weights on a GPU: the four products of a layer of M and of XL, behind each other as a step has
// them, and one of them alone, as a program and as a kernel for each, captured as a graph. Registered where
// there is a GPU with the kernel: --benchmark_filter=cuda.
#ifdef SPS_HAS_CUDA

#include <optional>

#include "ops/bench.h"
#include "ops/decode_program/decode_program.h"
#include "tensor/arena.h"
#include "tensor/device.h"
#include "tensor/graph.h"

namespace sps::ops {
namespace {

constexpr int64_t kLayers = 24;
constexpr int kRuns = 10;  // of the graph between two waits

enum Kind : unsigned { qkv = 1, out = 2, gate_up = 4, down = 8, layer = 15 };
constexpr std::pair<Kind, const char*> kKinds[] = {{layer, "layer"},
                                                   {qkv, "norm+qkv"},
                                                   {out, "out+add"},
                                                   {gate_up, "norm+gate_up+swiglu"},
                                                   {down, "down+add"}};

constexpr std::pair<int, const char*> kHows[] = {
    {1, "/program"}, {2, "/program_without_mail"}, {0, "/chain"}};

struct Layers {
  Arena memory;
  Tensor qkv, out, gate_up, down;  // of all layers
  Tensor gain, residual, n, rstd, q, pair, h, delta;

  void lay_out(Arena& a, const ModelWidth& w, int64_t rows) {
    const auto acts = [&](int64_t r, int64_t cols) { return a.take(DType::bf16, r, cols); };
    qkv = acts(kLayers * 3 * w.d, w.d), out = acts(kLayers * w.d, w.d);
    gate_up = acts(kLayers * 2 * w.ffn, w.d), down = acts(kLayers * w.d, w.ffn);
    gain = a.take(DType::f32, 1, w.d), residual = a.take(DType::f32, rows, w.d);
    rstd = a.take(DType::f32, rows, 1);
    n = acts(rows, w.d), q = acts(rows, 3 * w.d), pair = acts(rows, 2 * w.ffn), h = acts(rows, w.ffn);
    delta = acts(rows, w.d);
  }
  Layers(const ModelWidth& w, int64_t rows) {
    Arena plan;
    lay_out(plan, w, rows);
    memory = Arena(plan.peak(), Device::cuda);  // zeros: as fast as other numbers
    lay_out(memory, w, rows);
  }
  // Bytes of weights that are read.
  int64_t issue(const Exec& ex, Kind kind, DecodeProgram* program) {
    const DecodeRows normed(residual, gain, 1e-5F, n, rstd);
    int64_t read = 0;
    const auto of_layer = [&](Tensor all, int64_t i) {
      const int64_t rows = all.rows / kLayers;
      read += rows * all.cols * int64_t(sizeof(bf16));
      return all.rows_from(i * rows, rows);
    };
    for (int64_t i = 0; i < kLayers; ++i) {
      if ((kind & Kind::qkv) != 0) {
        const Tensor w = of_layer(qkv, i);
        program ? void(program->linear(normed, w, q)) : decode_linear(ex, normed, w, q);
      }
      if ((kind & Kind::out) != 0) {
        const Tensor w = of_layer(out, i);
        program ? void(program->linear_add(n, w, residual)) : decode_linear_add(ex, n, w, delta, residual);
      }
      if ((kind & Kind::gate_up) != 0) {
        const Tensor w = of_layer(gate_up, i);
        program ? void(program->linear_swiglu(normed, w, h)) : decode_linear_swiglu(ex, normed, w, pair, h);
      }
      if ((kind & Kind::down) != 0) {
        const Tensor w = of_layer(down, i);
        program ? void(program->linear_add(h, w, residual)) : decode_linear_add(ex, h, w, delta, residual);
      }
    }
    if (program != nullptr) program->launch();
    return read;
  }
};

void products(benchmark::State& state, const ModelWidth& width, Kind kind, int how) {
  const Exec ex = open_gpu();
  Layers layers(width, state.range(0));
  const int64_t bytes = layers.issue(ex, kind, nullptr);  // what is made once is made outside the graph
  std::optional<DecodeProgram> program;
  if (how > 0) program.emplace(ex, 4 * kLayers, how == 1);
  StreamGraph graph;
  graph.record(ex, [&] { layers.issue(ex, kind, program ? &*program : nullptr); });
  if (program) program->upload();
  for (auto _ : state) {
    for (int i = 0; i < kRuns; ++i) graph.start(ex);
    synchronize(ex);
  }
  report_bytes(state, bytes * kRuns);
  state.counters["us_per_layer"] =
      benchmark::Counter(double(state.iterations()) * kRuns * kLayers * 1e-6,
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void register_all() {
  if (gpu_count() == 0 || !DecodeProgram::usable(open_gpu())) return;
  for (const ModelWidth& width : kModelWidths)
    for (const auto& [kind, name] : kKinds)
      for (const auto& [how, which] : kHows)
        register_on_gpu(width, std::string(name) + which, [width, kind = kind, how = how](auto& state) {
          products(state, width, kind, how);
        })->ArgsProduct({{1, 2, 4, 8}});
}
[[maybe_unused]] const bool registered = (register_all(), true);

}  // namespace
}  // namespace sps::ops

#endif
